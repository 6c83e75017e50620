"""Images of places on a Docker engine: built once per content, at most two at a time."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_gym.errors import SandboxError
from areal_gym.places.base import PlaceImage
from areal_gym.places.dockerfile import base_images

LABEL = "areal-gym.place-image"
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

    def __init__(self, build_args: Mapping[str, str], *, network: str | None) -> None:
        self._build_args = dict(build_args)
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
                return tag
            async with self._slots:
                build = asyncio.to_thread(self._build, client, image, tag)
                try:
                    await asyncio.wait_for(build, image.build_timeout_s)
                except TimeoutError:
                    raise SandboxError(
                        f"{folder} was not built within {image.build_timeout_s:g} s"
                    ) from None
        return tag

    def _key(self, client: Any, folder: Path) -> str:
        dockerfile = (folder / "Dockerfile").read_text(encoding="utf-8", errors="replace")
        bases = base_images(dockerfile, self._build_args)
        ids = {base: _image_id(client, base) for base in bases}
        return content_key(folder, self._build_args, ids)

    def _build(self, client: Any, image: PlaceImage, tag: str) -> None:
        import docker

        try:
            client.images.build(
                path=str(image.folder),
                tag=tag,
                buildargs=self._build_args,
                labels={LABEL: "1"},
                network_mode=self._network,
                rm=True,
                forcerm=True,
                timeout=int(image.build_timeout_s) + 1,
            )
        except docker.errors.BuildError as error:
            lines = "".join(entry.get("stream", "") for entry in error.build_log)
            text = f"{image.folder} was not built: {error}\n{lines[-_LOG_CHARS:]}"
            raise SandboxError(text.rstrip()) from error


def _image_id(client: Any, name: str) -> str:
    import docker

    try:
        return str(client.images.get(name).id)
    except docker.errors.ImageNotFound:
        return ""
