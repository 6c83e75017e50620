"""The cache directory, for files that can be made again: starter policies, search indexes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from areal_gym.errors import TrainError


def cache_directory() -> Path:
    """Return AREAL_GYM_CACHE or the user's cache directory, which may not exist yet."""
    chosen = os.environ.get("AREAL_GYM_CACHE")
    return Path(chosen) if chosen else platformdirs.user_cache_path("areal-gym")


@contextmanager
def readable_cache_errors() -> Iterator[None]:
    """Turn the OSError of a cache that cannot be written into a readable TrainError."""
    try:
        yield
    except OSError as error:
        raise TrainError(
            f"cannot write the cache in {cache_directory()} ({error.strerror})",
            hints=["choose another place for it: AREAL_GYM_CACHE=DIR areal-gym ..."],
        ) from error
