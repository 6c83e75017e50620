"""Images of places on a Docker engine: built once per content, at most two at a time."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from areal_gym.errors import SandboxError
from areal_gym.places.base import PlaceImage
from areal_gym.places.dockerfile import base_images
from areal_gym.utils.cache import cache_directory

LABEL = "areal-gym.place-image"
"""The label of built images; its value is the size of their bases in bytes."""
_NUM_BUILDS = 2
_BACKEND = "docker-1"  # raised when the same folder must be built anew
_LOG_CHARS = 1000


def content_key(
    folder: Path,
    build_args: Mapping[str, str],
    base_ids: Mapping[str, str],
    backend: str = _BACKEND,
) -> str:
    """Return a hash of a build's inputs: names, modes, links and contents of files, arguments."""
    digest = hashlib.sha256(backend.encode())

    def add(*texts: str | bytes) -> None:
        for text in texts:
            data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
            digest.update(len(data).to_bytes(8, "big") + data)

    for table in (build_args, base_ids):
        add(str(len(table)))
        for name, value in sorted(table.items()):
            add(name, value)
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        add(str(path.relative_to(folder)), oct(status.st_mode))
        if stat.S_ISLNK(status.st_mode):
            add(os.readlink(path))
        elif stat.S_ISREG(status.st_mode):
            with path.open("rb") as file:
                add(hashlib.file_digest(file, "sha256").digest())
        elif not stat.S_ISDIR(status.st_mode):
            raise SandboxError(f"{path} is neither a file nor a folder nor a link")
    return digest.hexdigest()[:32]


class ImageBuilder:
    """Builds the images of folders; several callers with one folder share a build."""

    def __init__(
        self, build_args: Mapping[str, str], *, network: str | None, budget_bytes: int
    ) -> None:
        self._build_args = dict(build_args)
        self._uses = ImageUses(budget_bytes)
        self._network = network
        self._slots = asyncio.Semaphore(_NUM_BUILDS)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def resolve(self, client: Any, image: PlaceImage) -> str:
        """Return the name of the image in the engine, built if need be; raises SandboxError."""
        if image.reference is not None:
            return image.reference
        folder = image.folder
        if folder is None or not (folder / "Dockerfile").is_file():
            raise SandboxError(
                f"no Dockerfile in {folder}", hints=("or name an image: PlaceImage(reference=...)",)
            )
        tag = f"areal-gym-place:{await asyncio.to_thread(self._key, client, folder)}"
        async with self._locks[tag]:
            if await asyncio.to_thread(_image_id, client, tag):
                await asyncio.to_thread(self._uses.touch, tag)
                return tag
            async with self._slots:
                build = asyncio.to_thread(self._build, client, image, tag)
                try:
                    await asyncio.wait_for(build, image.build_timeout_s)
                except TimeoutError:
                    raise SandboxError(
                        f"{folder} was not built within {image.build_timeout_s:g} s"
                    ) from None
            await asyncio.to_thread(self._uses.touch, tag)
            await asyncio.to_thread(self._uses.trim, client)
        return tag

    def _key(self, client: Any, folder: Path) -> str:
        dockerfile = (folder / "Dockerfile").read_text(encoding="utf-8", errors="replace")
        bases = base_images(dockerfile, self._build_args)
        ids = {base: _image_id(client, base) for base in bases}
        return content_key(folder, self._build_args, ids)

    def _base_bytes(self, client: Any, image: PlaceImage) -> int:
        import docker

        assert image.folder is not None
        text = (image.folder / "Dockerfile").read_text(encoding="utf-8", errors="replace")
        total = 0
        for base in base_images(text, self._build_args):
            with suppress(docker.errors.ImageNotFound):
                total += int(client.images.get(base).attrs["Size"])
        return total

    def _build(self, client: Any, image: PlaceImage, tag: str) -> None:
        import docker

        try:
            client.images.build(
                path=str(image.folder),
                tag=tag,
                buildargs=self._build_args,
                labels={LABEL: str(self._base_bytes(client, image))},
                network_mode=self._network,
                rm=True,
                forcerm=True,
                timeout=int(image.build_timeout_s) + 1,
            )
        except docker.errors.BuildError as error:
            lines = "".join(entry.get("stream", "") for entry in error.build_log)
            text = f"{image.folder} was not built: {error}\n{lines[-_LOG_CHARS:]}"
            raise SandboxError(text.rstrip()) from error


class ImageUses:
    """Remembers when this user's places used each built image, and removes the oldest.

    The times are those of empty files in the cache; the engine knows none. An image that other
    users of the engine have built is as old as its build.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._folder = cache_directory() / "places" / "docker"

    def touch(self, tag: str) -> None:
        """Note that an image is used now."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file(tag).touch()

    def trim(self, client: Any) -> None:
        """Remove images beyond the budget, the least recently used first, and none in use."""
        import docker

        images = client.images.list(filters={"label": LABEL})
        rows = sorted(
            (self._used_s(tag, image), tag, _own_bytes(image))
            for image in images
            for tag in image.tags
        )
        total = sum(size for _, _, size in rows)
        for _, tag, size in rows[:-1]:  # the newest is about to be used
            if total <= self._budget:
                break
            try:
                client.images.remove(tag)
            except docker.errors.APIError:
                continue  # a container uses it
            self._file(tag).unlink(missing_ok=True)
            total -= size

    def _file(self, tag: str) -> Path:
        return self._folder / tag.rpartition(":")[2]

    def _used_s(self, tag: str, image: Any) -> float:
        try:
            return self._file(tag).stat().st_mtime
        except OSError:
            built = str(image.attrs["Created"])[:19]
            return datetime.fromisoformat(f"{built}+00:00").timestamp()


def _own_bytes(image: Any) -> int:
    """Return the size of an image without that of its bases, which several share."""
    shared = image.labels.get(LABEL, "")
    return max(0, int(image.attrs["Size"]) - (int(shared) if shared.isdigit() else 0))


def _image_id(client: Any, name: str) -> str:
    import docker

    try:
        return str(client.images.get(name).id)
    except docker.errors.ImageNotFound:
        return ""
