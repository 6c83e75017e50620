"""Any causal language model that transformers knows, behind `PolicyModel`."""

import logging

# transformers imports torchao where it is installed, which warns of each of its kernels for other
# machines, and torch of torchao's use of it.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
