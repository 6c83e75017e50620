"""Which device "auto" means."""

from __future__ import annotations

import torch


def pick_device(name: str) -> torch.device:
    """The named device; "auto" is CUDA when there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
