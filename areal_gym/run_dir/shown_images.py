"""Read images of a run directory for pages; only those in its image store can be read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_gym.errors import GymError
from areal_gym.images import ImageStore, data_url, hashes_in

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MOST_INLINED = 2**16
"""The maximum size in bytes of an image that is copied into a page."""


def read_shown(directory: Path, sha256: str) -> bytes | None:
    """Return an image of the run; None if it is missing, was changed, or is not a PNG file."""
    store = ImageStore(directory / "images")
    try:
        file = store.path(sha256)
        # Links could lead to any file of this machine.
        if file.is_symlink() or file.parent.is_symlink() or store.directory.is_symlink():
            return None
        raw = store.read(sha256)
    except (GymError, OSError):
        return None
    return raw if raw.startswith(_SIGNATURE) else None


def inlined(directory: Path, row: Mapping[str, Any]) -> dict[str, str]:
    """Return `data:` URLs of the images in a trajectory's messages, by hash, without large ones."""
    images = {h: read_shown(directory, h) for h in set(hashes_in(row.get("messages")))}
    return {
        sha256: data_url(png)
        for sha256, png in images.items()
        if png is not None and len(png) <= _MOST_INLINED
    }
