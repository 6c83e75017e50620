"""Resolves the device "auto"."""

from __future__ import annotations

import torch


def pick_device(name: str) -> torch.device:
    """Return the named device; "auto" is CUDA if available, otherwise the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
