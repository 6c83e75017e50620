"""Where things are kept that can be made again: starter policies, search indexes."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

__all__ = ["cache_directory"]


def cache_directory() -> Path:
    """AREAL_GYM_CACHE, else the user's cache directory. It need not exist yet."""
    chosen = os.environ.get("AREAL_GYM_CACHE")
    return Path(chosen) if chosen else platformdirs.user_cache_path("areal-gym")
