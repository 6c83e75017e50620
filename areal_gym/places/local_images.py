"""Images of local places: this machine's own root, unpacked roots, and Dockerfiles upon them."""

from __future__ import annotations

import asyncio
import fnmatch
import glob
import hashlib
import io
import os
import posixpath
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from areal_gym.errors import SandboxError
from areal_gym.places import dockerfile
from areal_gym.places.base import PlaceImage
from areal_gym.places.dockerfile import Instruction
from areal_gym.places.host_root import host_root_key, write_host_root
from areal_gym.places.images import content_key
from areal_gym.places.layer_store import LayerStore, LocalImage
from areal_gym.places.local_place import LocalPlace
from areal_gym.places.local_server import LocalServer

HOST_ROOT = "areal-gym/host"
"""The name of the root that is made of the running interpreter and this machine's tools."""

PACKAGES_LABEL = "areal-gym.packages"
"""The label of an image with installed packages that the host's root shall have."""

_BACKEND = "local-1"  # raised when the same folder must be built anew
_NUM_BUILDS = 2
_LOG_CHARS = 1000
# They change no files: labels, ports, and what an engine would start in a place.
_IGNORED = {
    *("LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK"),
}

StartPlace = Callable[[LocalImage], Awaitable[LocalPlace]]


class LocalImages:
    """Finds and builds images; several callers with one folder share a build.

    Args:
        store: where they are kept.
        build_args: arguments of all builds, such as `BASE_IMAGE`.
        packages: installed packages that the host's root has, with what they require.
        roots: folders or archives of root directories on this machine, by image name.
        start: starts a place for a build.
    """

    def __init__(
        self,
        store: LayerStore,
        *,
        build_args: Mapping[str, str],
        packages: Sequence[str],
        roots: Mapping[str, Path | str],
        start: StartPlace,
    ) -> None:
        self.store = store
        self._build_args = dict(build_args)
        self._packages = tuple(packages)
        self._roots = {name: Path(path) for name, path in roots.items()}
        self._start = start
        self._host_keys: dict[tuple[str, ...], str] = {}
        self._slots = asyncio.Semaphore(_NUM_BUILDS)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def resolve(self, server: LocalServer, image: PlaceImage) -> LocalImage:
        """Return an image, built if need be; what cannot be built is a SandboxError."""
        if image.reference is not None:
            return await self._base(server, image.reference, ())
        folder = image.folder
        if folder is None or not (folder / "Dockerfile").is_file():
            raise SandboxError(
                f"no Dockerfile in {folder}", hints=("or name an image: PlaceImage(reference=...)",)
            )
        try:
            async with asyncio.timeout(image.build_timeout_s):
                return await self._folder(server, folder)
        except TimeoutError:
            raise SandboxError(
                f"{folder} was not built within {image.build_timeout_s:g} s"
            ) from None

    async def _folder(self, server: LocalServer, folder: Path) -> LocalImage:
        text = (folder / "Dockerfile").read_text(encoding="utf-8", errors="replace")
        try:
            dockerfile.require_readable(text)
            bases = dockerfile.base_images(text, self._build_args)
            if len(bases) != 1:
                raise SandboxError(f"one FROM is supported, and here are {len(bases)}")
            base = await self._base(server, bases[0], _labelled_packages(text))
            base_id = {bases[0]: base.layers[0]}
            arguments = (folder, self._build_args, base_id, _BACKEND)
            key = (await asyncio.to_thread(content_key, *arguments))[:20]
            async with self._locks[key]:
                built = self.store.find(key)
                if built is not None:
                    return built
                async with self._slots:
                    return await self._build(server, folder, text, base, key)
        except SandboxError as error:
            raise SandboxError(
                f"the image of {folder} was not built: {error.message}", hints=error.hints
            ) from error

    async def _base(self, server: LocalServer, name: str, packages: Sequence[str]) -> LocalImage:
        """Return the image of a name in FROM, or of a reference; the host's has `packages`, too."""
        if name in self._roots:
            source = self._roots[name]
            key = await asyncio.to_thread(_root_key, source)
            return await self._unpacked(server, key, lambda tar: _add_root(tar, source))
        repository = name.rpartition("/")[2].partition(":")[0]
        if name == HOST_ROOT or repository == "python":
            wanted = tuple(sorted({*self._packages, *packages}))
            if wanted not in self._host_keys:
                self._host_keys[wanted] = await asyncio.to_thread(host_root_key, wanted)
            key = self._host_keys[wanted]
            return await self._unpacked(server, key, lambda tar: write_host_root(tar, wanted))
        known = ", ".join([HOST_ROOT, "python:*", *sorted(self._roots)])
        raise SandboxError(
            f"local places have no image {name!r}; there are: {known}",
            hints=(
                f"play it upon this machine's root: build_args={{'BASE_IMAGE': {HOST_ROOT!r}}}, "
                "if its Dockerfile has ARG BASE_IMAGE",
                f"or unpack it (docker export) and name it: roots={{{name!r}: 'FOLDER_OR_TAR'}}",
                "or use an engine: the place 'docker'",
            ),
        )

    async def _unpacked(
        self, server: LocalServer, key: str, write: Callable[[tarfile.TarFile], None]
    ) -> LocalImage:
        async with self._locks[key]:
            built = self.store.find(key)
            if built is not None:
                return built
            async with self._slots, self.store.new_layer(partial(_discard, server)) as new:
                with tempfile.TemporaryFile() as file:
                    await asyncio.to_thread(_write_archive, file, write)
                    size = file.tell()
                    file.seek(0)
                    await server.ask("unpack", [file.fileno()], layer=new)
                return self.store.add(key, new, LocalImage(layers=(), size_bytes=size))

    async def _build(
        self, server: LocalServer, folder: Path, text: str, base: LocalImage, key: str
    ) -> LocalImage:
        place = await self._start(base)
        try:
            build = _Build(place, folder, base, self._build_args)
            for instruction in dockerfile.parse(text):
                await build.execute(instruction)
            await place.freeze()
            async with self.store.new_layer(partial(_discard, server)) as new:
                await place.keep(new)
                return self.store.add(key, new, replace(build.image, size_bytes=build.size_bytes))
        finally:
            await place.aclose()


async def _discard(server: LocalServer, layer: str) -> None:
    await server.ask("discard", layer=layer)


class _Build:
    """Executes the instructions of one Dockerfile in a place."""

    def __init__(
        self, place: LocalPlace, folder: Path, base: LocalImage, build_args: Mapping[str, str]
    ) -> None:
        self._place = place
        self._folder = folder
        self._given = build_args
        self._arguments: dict[str, str] = {}
        self._has_base = False
        self.image = base
        self.size_bytes = 0

    async def execute(self, instruction: Instruction) -> None:
        """Execute one instruction; SandboxError, with its line, if that is not possible."""
        try:
            await self._execute(instruction)
        except (SandboxError, OSError, ValueError) as error:
            text = error.message if isinstance(error, SandboxError) else str(error)
            name = f"Dockerfile, line {instruction.line}, {instruction.keyword}"
            raise SandboxError(f"{name}: {text}") from error

    async def _execute(self, instruction: Instruction) -> None:
        keyword = instruction.keyword
        values = {**self._arguments, **self.image.env}
        if keyword == "FROM":
            self._has_base, self._arguments = True, {}
        elif keyword == "ARG":
            for word in instruction.words():
                name, _, default = word.partition("=")
                if self._has_base:
                    text = self._given.get(name, dockerfile.substitute(default, values))
                    self._arguments[name] = text
        elif keyword == "ENV":
            env = {**self.image.env, **dockerfile.pairs(instruction, values)}
            self.image = replace(self.image, env=env)
        elif keyword == "WORKDIR":
            path = dockerfile.substitute(" ".join(instruction.words()), values)
            workdir = posixpath.join(self.image.workdir, path)
            await self._place.put(_archive([]), workdir)
            self.image = replace(self.image, workdir=posixpath.normpath(workdir))
        elif keyword == "USER":
            user = dockerfile.substitute(instruction.text, values)
            self.image = replace(self.image, user=user)
        elif keyword in ("COPY", "ADD"):
            words = [dockerfile.substitute(word, values) for word in instruction.words()]
            await self._copy(instruction, words[:-1], words[-1] if words else "")
        elif keyword == "RUN":
            await self._run(instruction)
        elif keyword not in _IGNORED:
            raise SandboxError("not supported by local places")

    async def _run(self, instruction: Instruction) -> None:
        if instruction.flags:
            raise SandboxError(f"--{min(instruction.flags)} is not supported by local places")
        argv = instruction.words() if instruction.is_list else ["/bin/sh", "-c", instruction.text]
        result = await self._place.run(
            argv,
            cwd=self.image.workdir,
            env={**self._arguments, **self.image.env},
            user=self.image.user,
            timeout_s=86_400.0,  # the build has a time of its own
        )
        if result.exit_code:
            log = (result.stdout + result.stderr).decode("utf-8", "replace")[-_LOG_CHARS:]
            raise SandboxError(
                f"exit code {result.exit_code} (local builds have no network): {log.strip()}"
            )

    async def _copy(self, instruction: Instruction, sources: Sequence[str], target: str) -> None:
        unknown = instruction.flags.keys() - {"chown", "chmod"}
        if unknown:
            raise SandboxError(f"--{min(unknown)} is not supported by local places")
        if not sources:
            raise SandboxError("a source and a target are expected")
        if instruction.keyword == "ADD":
            remote = [s for s in sources if "://" in s or s.startswith("git@")]
            packed = [s for s in sources if ".tar" in s or s.endswith((".tgz", ".tbz2", ".txz"))]
            if remote or packed:
                raise SandboxError(f"{(remote + packed)[0]}: only files can be added here")
        owner = _owner(instruction.flags.get("chown", "0:0"))
        mode = int(instruction.flags["chmod"], 8) if "chmod" in instruction.flags else None
        rows = _context_files(self._folder, sources)
        path = posixpath.join(self.image.workdir, target)
        is_folder = target.endswith("/") or target in (".", "") or len(rows) > 1
        entries: list[tuple[Path, str]] = []
        for source, is_tree in rows:
            if is_tree:
                entries += [
                    (file, str(file.relative_to(source)))
                    for file in sorted(source.rglob("*"))
                    if not _is_ignored(self._folder, file)
                ]
                is_folder = True
            else:
                is_there = is_folder or await self._is_folder(path)
                entries.append((source, source.name if is_there else posixpath.basename(path)))
                if not is_there:
                    path = posixpath.dirname(path)
        data = await asyncio.to_thread(_archive, entries, owner, mode)
        self.size_bytes += len(data)
        await self._place.put(data, path)

    async def _is_folder(self, path: str) -> bool:
        result = await self._place.run(["test", "-d", path], timeout_s=60, cwd="/", user=0)
        return result.exit_code == 0


def _labelled_packages(text: str) -> list[str]:
    """Return the packages that a Dockerfile's label names for the root of this machine."""
    names: list[str] = []
    for instruction in dockerfile.parse(text):
        if instruction.keyword == "LABEL":
            names += dockerfile.pairs(instruction, {}).get(PACKAGES_LABEL, "").split()
    return names


def _context_files(folder: Path, sources: Sequence[str]) -> list[tuple[Path, bool]]:
    """Return the files and folders of the context that the patterns name, and which are folders."""
    rows: list[tuple[Path, bool]] = []
    for source in sources:
        inside = posixpath.normpath("/" + source).lstrip("/") or "."
        names = sorted(glob.glob(inside, root_dir=folder, include_hidden=True)) or [inside]
        paths = [folder / name for name in names if not _is_ignored(folder, folder / name)]
        if not paths or not all(os.path.lexists(path) for path in paths):
            raise SandboxError(f"{source} is not in {folder}")
        for path in paths:
            if not path.resolve().is_relative_to(folder.resolve()):
                raise SandboxError(f"{source} leads out of {folder}")
            rows.append((path, path.is_dir()))
    return rows


def _is_ignored(folder: Path, path: Path) -> bool:
    """Return whether the file .dockerignore of a context leaves a path out."""
    file = folder / ".dockerignore"
    if not file.is_file():
        return False
    name = path.relative_to(folder).as_posix()
    parts = name.split("/")
    ancestors = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    is_ignored = False
    for line in file.read_text(errors="replace").splitlines():
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        is_exception = pattern.startswith("!")
        pattern = pattern.lstrip("!").strip("/").removeprefix("./")
        plain = pattern.removeprefix("**/")
        if any(
            fnmatch.fnmatch(a, pattern) or (plain != pattern and fnmatch.fnmatch(a, plain))
            for a in ancestors
        ):
            is_ignored = not is_exception
    return is_ignored


def _owner(text: str) -> tuple[int, int]:
    user, _, group = text.partition(":")
    if not user.isdigit() or (group and not group.isdigit()):
        raise SandboxError(f"--chown={text}: only numbers are supported by local places")
    return int(user), int(group or user)


def _archive(
    entries: Sequence[tuple[Path, str]], owner: tuple[int, int] = (0, 0), mode: int | None = None
) -> bytes:
    """Return an archive of files and folders under other names."""
    buffer = io.BytesIO()

    def adjusted(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid, entry.gid = owner
        if mode is not None and not entry.issym():
            entry.mode = mode
        return entry

    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, name in entries:
            tar.add(path, name, recursive=False, filter=adjusted)
    return buffer.getvalue()


def _write_archive(file: Any, write: Callable[[tarfile.TarFile], None]) -> None:
    with tarfile.open(fileobj=file, mode="w") as tar:
        write(tar)


def _root_key(source: Path) -> str:
    try:
        about = source.stat()
    except OSError as error:
        raise SandboxError(f"the root directory {source} cannot be read: {error}") from None
    text = f"{_BACKEND} {source.resolve()} {about.st_size} {about.st_mtime_ns} {about.st_ino}"
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _add_root(tar: tarfile.TarFile, source: Path) -> None:
    """Copy an unpacked root, or an archive of one, without devices."""
    if source.is_dir():

        def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
            return entry if entry.isreg() or entry.isdir() or entry.issym() else None

        tar.add(source, ".", filter=plain)
        return
    with tarfile.open(source) as archive:
        for member in archive:
            if member.isreg() or member.isdir() or member.issym() or member.islnk():
                tar.addfile(member, archive.extractfile(member) if member.isreg() else None)
