"""Modules that vLLM's servers import: they find them by this folder in PYTHONPATH.

Servers have another Python than areal-gym, so these modules need nothing of it.
"""
