"""Any causal language model that transformers knows, behind `PolicyModel`."""
