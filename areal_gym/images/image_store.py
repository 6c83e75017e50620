"""A directory of pictures by the hash of their bytes: `ab/<sha256>.png`, each written once.

One store belongs to a run (`RUN/images`). Code that draws or reads a picture needs no run: it uses
the store of the process, which is the run's, or else a temporary directory.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from areal_gym.errors import InfrastructureError, UsageError
from areal_gym.images.reading import (
    MEDIA_TYPE,
    ImageLimits,
    encode_png,
    image_limits,
    png_size,
    read_image,
)
from areal_gym.message_types import ImagePart
from areal_gym.types import Trajectory
from areal_gym.utils.files import read_bytes, readable_disk_errors

if TYPE_CHECKING:
    from PIL import Image

_VARIABLE = "AREAL_GYM_IMAGES"
"""Environment variable with the directory of the process's store, for its children."""
_HASH = re.compile("[0-9a-f]{64}")
_ANY_HASH = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
LARGEST_PNG = 64 * 2**20
"""Bytes of the largest file that is read from a store."""
_MOST_REMEMBERED = 1024
"""Pictures whose foreign bytes are recognised, so that they are decoded once."""


class ImageStore:
    """The pictures of one run, which messages and token spans name by hash.

    The directory is made with the first picture. Several processes may share it: a file is written
    whole or not at all, and equal bytes are one file.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Clients of the gateway send all pictures of a dialogue with every call.
        self._parts: dict[tuple[bytes, str | None, ImageLimits], ImagePart] = {}

    def add(
        self,
        picture: bytes | Image.Image,
        *,
        media_type: str | None = None,
        limits: ImageLimits | None = None,
    ) -> ImagePart:
        """Keep a picture, and return what names it in a message.

        Args:
            picture: a Pillow image, or the bytes of a PNG, JPEG or WebP file.
            media_type: the type by which the sender of the bytes calls them.
            limits: how large it may be, and to what it is scaled; by default those of the process.

        Raises:
            UsageError: it is refused; see `read_image`.
        """
        limits = limits or image_limits()
        if not isinstance(picture, bytes):
            png = encode_png(picture, limits)
            return _part(self.put(png), *png_size(png))
        key = (hashlib.sha256(picture).digest(), media_type, limits)
        part = self._parts.get(key)
        if part is None or not self.path(part["sha256"]).exists():
            png, width, height = read_image(picture, limits, media_type=media_type)
            part = self._parts[key] = _part(self.put(png), width, height)
            if len(self._parts) > _MOST_REMEMBERED:
                del self._parts[next(iter(self._parts))]
        return part.copy()

    def part(self, sha256: str) -> ImagePart:
        """Return what names a picture of the store in a message."""
        return _part(sha256, *png_size(self.read(sha256)))

    def put(self, png: bytes) -> str:
        """Keep the bytes of `encode_png` or of another store, and return their hash."""
        sha256 = hashlib.sha256(png).hexdigest()
        file = self.path(sha256)
        if file.exists():
            return sha256
        with readable_disk_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            # The name is unique: threads may keep the same picture at the same time.
            descriptor, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=file.parent)
            try:
                with os.fdopen(descriptor, "wb") as stream:
                    stream.write(png)
                    os.fchmod(stream.fileno(), 0o644)
                Path(name).replace(file)
            finally:
                Path(name).unlink(missing_ok=True)
        return sha256

    def read(self, sha256: str) -> bytes:
        """Return the PNG bytes of a picture.

        Raises:
            InfrastructureError: the picture is not here, or its file was changed.
        """
        file = self.path(sha256)
        try:
            png = read_bytes(file, most=LARGEST_PNG)
        except FileNotFoundError:
            # Tasks that were opened before the run are in the store of before.
            for other in _stores:
                if other is not self and sha256 in other:
                    self.put(other.read(sha256))
                    return self.read(sha256)
            raise InfrastructureError(
                f"the picture {sha256[:12]} is not in {self.directory}",
                hints=["a run needs its directory `images`; was it moved or cleaned?"],
            ) from None
        if hashlib.sha256(png).hexdigest() != sha256:
            raise InfrastructureError(
                f"{file} has other bytes than its name says", hints=["delete it, and run again"]
            )
        return png

    def path(self, sha256: str) -> Path:
        """Return the file of a picture, whether it exists or not; UsageError for other texts."""
        if not _HASH.fullmatch(sha256):
            raise UsageError(f"{sha256[:80]!r} is not the SHA-256 of a picture")
        return self.directory / sha256[:2] / f"{sha256}.png"

    def __contains__(self, sha256: str) -> bool:
        return self.path(sha256).is_file()

    def __iter__(self) -> Iterator[str]:
        """Yield the hashes of all pictures."""
        for file in sorted(self.directory.glob("??/*.png")):
            if _HASH.fullmatch(file.stem):
                yield file.stem

    def keep(self, hashes: Iterable[str]) -> None:
        """Keep pictures that other stores of the process have."""
        for sha256 in set(hashes):
            if sha256 not in self:
                for other in _stores:
                    self.copy_from(other, [sha256])

    def copy_from(self, other: ImageStore, hashes: Iterable[str]) -> None:
        """Keep the pictures of another store that are missing here, if they are there."""
        for sha256 in hashes:
            if sha256 not in self and sha256 in other:
                self.put(other.read(sha256))

    def keep_images_of(self, trajectories: Iterable[Trajectory]) -> None:
        """Keep the pictures of trajectories that other stores of the process have."""
        for trajectory in trajectories:
            self.keep(hashes_of(trajectory))

    def remove_all_but(self, hashes: Iterable[str]) -> int:
        """Delete the pictures with other hashes; return how many."""
        unused = set(self) - set(hashes)
        for sha256 in unused:
            self.path(sha256).unlink(missing_ok=True)
        return len(unused)


def hashes_in(value: object) -> Iterator[str]:
    """Yield the hashes of all pictures in messages, or in the data of a task."""
    if isinstance(value, Mapping):
        if value.get("type") == "image" and isinstance(value.get("sha256"), str):
            yield value["sha256"]
        for item in value.values():
            yield from hashes_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from hashes_in(item)


def hashes_in_files(files: Iterable[Path]) -> set[str]:
    """Return every SHA-256 that stands in text files, of a picture or of something else."""
    hashes: set[bytes] = set()
    for file in files:
        with file.open("rb") as lines:
            for line in lines:
                hashes.update(_ANY_HASH.findall(line))
    return {sha256.decode() for sha256 in hashes}


def hashes_of(trajectory: Trajectory) -> set[str]:
    """Return the hashes of all pictures of a trajectory: of its tokens, messages and task."""
    tokens = (image.sha256 for span in trajectory.spans for image in span.images)
    return {*tokens, *hashes_in(trajectory.messages), *hashes_in(trajectory.task.data)}


_stores: list[ImageStore] = []
"""The stores of this process; the last one is used."""


def image_store() -> ImageStore:
    """Return the store of the process: the run's, the parent process's, or a temporary one."""
    if not _stores:
        given = os.environ.get(_VARIABLE)
        if given is None:
            given = tempfile.mkdtemp(prefix="areal-gym-images-")
            atexit.register(shutil.rmtree, given, ignore_errors=True)
        _stores.append(ImageStore(Path(given)))
    return _stores[-1]


@contextmanager
def use_image_store(directory: Path) -> Iterator[ImageStore]:
    """Make the store in `directory` that of the process, and of processes that it starts."""
    store, before = ImageStore(directory.absolute()), os.environ.get(_VARIABLE)
    _stores.append(store)
    os.environ[_VARIABLE] = str(store.directory)
    try:
        yield store
    finally:
        _stores.remove(store)
        if before is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = before


def _part(sha256: str, width: int, height: int) -> ImagePart:
    return {
        "type": "image",
        "sha256": sha256,
        "width": width,
        "height": height,
        "media_type": MEDIA_TYPE,
    }
