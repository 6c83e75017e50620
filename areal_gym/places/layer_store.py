"""The store of local images: layers as folders, and a record of each image beside them.

    KEY/            a layer: files with the owners of places, so only the server writes and removes
    KEY.json        an image: its layers, topmost first, and its settings; there when it is complete
    new-OWNER/      a layer that is being made

An image in use is locked, by its record; the lock ends with the process. The least recently used
images that are not in use go when all together need more than the budget.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from areal_gym.errors import SandboxError
from areal_gym.places.owners import is_gone, new_owner

_NEW = "new-"


@dataclass(frozen=True, kw_only=True)
class LocalImage:
    """A complete image: the names of its layers, topmost first, and how its commands start."""

    layers: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0"
    size_bytes: int = 0
    """The size of its topmost layer."""


class LayerStore:
    """The images in a folder; `discard` removes a layer by name.

    Args:
        folder: where they are; it is made.
        budget_bytes: the size of all layers together above which unused images are removed.
    """

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.folder = folder
        self._budget = budget_bytes
        self._locks: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def find(self, key: str) -> LocalImage | None:
        """Return an image, which is now locked and most recently used; None if it is not here."""
        if key not in self._locks:
            try:
                lock = os.open(self._record(key), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            fcntl.flock(lock, fcntl.LOCK_SH)
            if not os.fstat(lock).st_nlink:  # removed meanwhile
                os.close(lock)
                return None
            self._locks[key] = lock
        os.utime(self._record(key))
        row = json.loads(self._record(key).read_text())
        return LocalImage(**{**row, "layers": tuple(row["layers"])})

    @asynccontextmanager
    async def new_layer(self, discard: Callable[[str], Awaitable[object]]) -> AsyncIterator[str]:
        """Yield the name of a layer to make; what is left of one that fails is removed.

        `discard` removes a layer by name. Files that cannot be written are a SandboxError.
        """
        new = _NEW + new_owner().replace(":", "~")
        try:
            yield new
        except BaseException as error:
            with suppress(SandboxError):  # the first error is the one to tell
                await asyncio.shield(discard(new))
            (self.folder / f"{new}.json").unlink(missing_ok=True)
            if isinstance(error, OSError) and not isinstance(error, SandboxError):
                raise SandboxError(f"a layer in {self.folder} was not made: {error}") from error
            raise

    def add(self, key: str, new: str, image: LocalImage) -> LocalImage:
        """Add an image whose topmost layer was made as `new`; another process may have been first.

        The image's `layers` are those below the new one.
        """
        with suppress(OSError):  # not empty: the same layer is there
            os.rename(self.folder / new, self.folder / key)
        record = {**asdict(image), "layers": [key, *image.layers]}
        partial = self.folder / f"{new}.json"
        partial.write_text(json.dumps(record))
        os.replace(partial, self._record(key))
        added = self.find(key)
        assert added is not None
        return added

    async def trim(self, discard: Callable[[str], Awaitable[object]]) -> None:
        """Remove what killed builds left, and images beyond the budget that are not in use."""
        for path in self.folder.glob(f"{_NEW}*"):
            if is_gone(path.name.removeprefix(_NEW).removesuffix(".json").replace("~", ":")):
                if path.suffix == ".json":
                    path.unlink(missing_ok=True)
                else:
                    await discard(path.name)
        images = sorted(self._images(), key=lambda row: row[0])
        total = sum(image.size_bytes for _, _, image in images)
        for _, key, image in images:
            if total <= self._budget:
                break
            if any(key in other.layers for _, name, other in images if name != key):
                continue  # the base of another; it goes after it
            if self._remove_record(key):
                await discard(key)
                total -= image.size_bytes

    def close(self) -> None:
        """Unlock all images. Idempotent."""
        for lock in self._locks.values():
            os.close(lock)
        self._locks.clear()

    def _record(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _images(self) -> Iterator[tuple[float, str, LocalImage]]:
        for path in self.folder.glob("*.json"):
            if path.name.startswith(_NEW):
                continue
            with suppress(OSError, ValueError, TypeError):
                row = json.loads(path.read_text())
                yield path.stat().st_mtime, path.stem, LocalImage(**row)

    def _remove_record(self, key: str) -> bool:
        """Remove the record of an image that no process has locked; return whether it is gone."""
        if key in self._locks:
            return False
        try:
            lock = os.open(self._record(key), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._record(key).unlink()
        except OSError:
            return False
        finally:
            os.close(lock)
        return True
