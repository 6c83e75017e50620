"""Training on several ranks: FSDP2, process groups, and trainers in child processes."""

import logging

# Where experts are divided, weights and norms are gathered over two dimensions of the mesh, one
# after the other. torch advises each rank to merge them, in long lines, which users cannot do.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
