"""One place on a Docker engine: its commands, its files and its end."""

from __future__ import annotations

import asyncio
import io
import posixpath
import shlex
import socket
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from areal_gym.errors import SandboxError, SandboxUnreachableError
from areal_gym.places.base import CommandResult, FileChanges
from areal_gym.places.engine_calls import engine_errors, remove_container
from areal_gym.places.listening import listen_inside

T = TypeVar("T")

_OUTPUT_BYTES = 1 << 20
_KILL_S = 5.0
_KILLED = 137
_MODIFIED, _REMOVED = 0, 2  # the engine's kinds of changes; 1 is what was added
_GO_FOLDER = 1 << 31  # a folder, in a mode as Go writes it
# The command's pid inside the place, which leads its session: how it is killed at its deadline.
_WRAPPER = 'echo $$ >&2; exec "$@"'


@dataclass
class _Output:
    """What a command has written so far, up to a bound; the rest is read and dropped."""

    texts: dict[int, bytearray] = field(default_factory=lambda: {1: bytearray(), 2: bytearray()})

    def add(self, stream: int, data: bytes) -> None:
        text = self.texts.setdefault(stream, bytearray())
        text += data[: max(0, _OUTPUT_BYTES + 32 - len(text))]

    @property
    def pid(self) -> int | None:
        """The pid that the wrapper wrote, or None when the command could not be started."""
        first, end, _ = bytes(self.texts[2]).partition(b"\n")
        return int(first) if end and first.isdigit() else None


class DockerPlace:
    """A container; `control` runs short calls to the engine, `commands` wait for commands."""

    def __init__(
        self, container: Any, *, control: ThreadPoolExecutor, commands: ThreadPoolExecutor
    ) -> None:
        self._container = container
        self._control = control
        self._commands = commands
        self._is_frozen = False
        self._is_closed = False

    @property
    def id(self) -> str:
        """The engine's id of the container."""
        return str(self._container.id)

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        timeout_s: float,
    ) -> CommandResult:
        """Run a command; at its deadline its process group is killed, or else the whole place."""
        if self._is_frozen:
            await self._call(self._container.start)
            self._is_frozen = False
        command = ["/bin/sh", "-c", _WRAPPER, "sh", *argv]
        options = {"environment": dict(env or {}), "workdir": cwd, "user": str(user or "")}
        created = await self._call(
            lambda: self._api.exec_create(self.id, command, stdin=False, **options)
        )
        output = _Output()
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._commands, self._read, created["Id"], output)
        is_timed_out = False
        try:
            done, _ = await asyncio.wait({reading}, timeout=timeout_s)
            if not done:
                is_timed_out = True
                await self._kill(output, reading)
        except asyncio.CancelledError:
            await asyncio.shield(self._kill(output, reading))
            raise
        if is_timed_out:
            with suppress(Exception):  # its connection was cut
                reading.result()
            exit_code = _KILLED
        else:
            with self._errors():
                reading.result()
            exit_code = (await self._call(self._api.exec_inspect, created["Id"]))["ExitCode"]
        return self._result(argv, output, exit_code, is_timed_out)

    def _result(
        self, argv: Sequence[str], output: _Output, exit_code: int | None, is_timed_out: bool
    ) -> CommandResult:
        stdout, stderr = bytes(output.texts[1]), bytes(output.texts[2])
        if exit_code is None or (output.pid is None and not is_timed_out):
            text = (stdout + stderr).decode("utf-8", "replace").strip()[-400:]
            raise SandboxError(f"{shlex.join(argv)[:200]} could not be started: {text}")
        stderr = stderr.partition(b"\n")[2]
        return CommandResult(
            exit_code=exit_code,
            stdout=stdout[:_OUTPUT_BYTES],
            stderr=stderr[:_OUTPUT_BYTES],
            is_timed_out=is_timed_out,
        )

    async def put(self, tar: bytes, path: str) -> None:
        """Unpack an archive below a folder, which is made; SandboxError if a link leads there."""
        await self._call(self._put, tar, posixpath.normpath("/" + path))

    async def listen(self, port: int) -> socket.socket:
        """Return a socket that listens on 127.0.0.1:`port` inside; it ends with `freeze`."""
        await self._call(self._container.reload)
        pid = int(self._container.attrs["State"]["Pid"])
        if not pid:
            raise SandboxError("the place is not running: nothing can listen inside")
        return await self._call(listen_inside, pid, port)

    async def freeze(self) -> None:
        """End all processes; the files stay."""
        await self._call(self._stop)
        self._is_frozen = True

    async def changes(self) -> FileChanges:
        """Return how the files of the frozen place differ from those of its image."""
        if not self._is_frozen:
            raise SandboxError("files are compared in a frozen place only: await place.freeze()")
        return await self._call(self._changes)

    async def take(self, paths: Sequence[str], *, max_bytes: int) -> bytes:
        """Return an archive of paths of a frozen place; no link is followed."""
        if not self._is_frozen:
            raise SandboxError("files are taken from a frozen place only: await place.freeze()")
        return await self._call(self._take, list(paths), max_bytes)

    async def aclose(self) -> None:
        """Remove the container with its volumes. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            await self._call(remove_container, self._container)

    # -- in threads

    @property
    def _api(self) -> Any:
        return self._container.client.api

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        with self._errors():
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._control, function, *arguments)

    def _errors(self) -> Any:
        return engine_errors(f"the place {self.id[:12]}")

    def _read(self, command: str, output: _Output) -> None:
        from docker.utils.socket import frames_iter

        stream = self._api.exec_start(command, socket=True)
        try:
            for number, data in frames_iter(stream, tty=False):
                output.add(number, data)
        finally:
            # Both: otherwise the engine waits for the inner one when the container is removed.
            inner = getattr(stream, "_sock", None)
            stream.close()
            if inner is not None:
                inner.close()

    async def _kill(self, output: _Output, reading: asyncio.Future[None]) -> None:
        """End a command: its process group, and if that does not help the place's processes."""
        pid = output.pid
        if pid is not None:
            kill = ["/bin/sh", "-c", f"kill -9 -{pid}; kill -9 {pid}"]
            with suppress(SandboxError, SandboxUnreachableError):
                await self._call(lambda: self._container.exec_run(kill, user="0", detach=True))
            await asyncio.wait({reading}, timeout=_KILL_S)
        if not reading.done():
            await self.freeze()  # the next command starts it again, with its files
            await asyncio.wait({reading}, timeout=_KILL_S)

    def _stop(self) -> None:
        import docker

        try:
            self._container.kill()
        except docker.errors.APIError as error:
            if error.status_code != 409:  # it does not run
                raise
        self._container.wait(timeout=30)

    def _link_target(self, path: str) -> str | None:
        """Return where the link at `path` leads, "" if it is none, None if nothing is there."""
        import docker

        try:
            stream, status = self._api.get_archive(self.id, path)
        except docker.errors.NotFound:
            return None
        stream.close()
        return str(status.get("linkTarget") or "")

    def _put(self, tar: bytes, path: str) -> None:
        missing: list[str] = []
        for folder in _parents(path):
            target = None if missing else self._link_target(folder)
            if target:
                raise SandboxError(f"{folder} is a link to {target} in the place: not followed")
            if target is None:
                missing.append(folder)
        if missing:
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w") as archive:
                for folder in missing:
                    entry = tarfile.TarInfo(folder.lstrip("/"))
                    entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                    archive.addfile(entry)
            self._container.put_archive("/", buffer.getvalue())
        self._container.put_archive(path, tar)

    def _changes(self) -> FileChanges:
        entries = self._container.diff() or []
        kinds = {str(entry["Path"]): int(entry["Kind"]) for entry in entries}
        holders = {parent for path in kinds for parent in _parents(posixpath.dirname(path))}
        written: list[str] = []
        removed: list[str] = []
        whole = ""
        for path in sorted(kinds, key=lambda path: path.split("/")):
            if whole and path.startswith(whole):
                continue
            is_holder = path in holders
            if kinds[path] == _REMOVED:
                removed.append(path)
                if not is_holder:
                    continue
            elif kinds[path] == _MODIFIED and (is_holder or self._is_folder(path)):
                continue
            written.append(path)
            whole = f"{path}/"
        return FileChanges(written=tuple(written), removed=tuple(removed))

    def _is_folder(self, path: str) -> bool:
        stream, status = self._api.get_archive(self.id, path)
        stream.close()
        return bool(int(status["mode"]) & _GO_FOLDER)

    def _take(self, paths: Sequence[str], max_bytes: int) -> bytes:
        import docker

        buffer = io.BytesIO()
        archive = tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        for path in paths:
            path = posixpath.normpath("/" + path)
            if any(self._link_target(folder) != "" for folder in _parents(posixpath.dirname(path))):
                continue  # a link leads there, or nothing does
            try:
                stream, _ = self._api.get_archive(self.id, path)
            except docker.errors.NotFound:
                continue
            try:
                if not _copy(stream, posixpath.dirname(path).lstrip("/"), archive, max_bytes):
                    return buffer.getvalue()[:max_bytes]
            finally:
                stream.close()
        archive.close()
        return buffer.getvalue()


def _copy(stream: Iterator[bytes], parent: str, archive: tarfile.TarFile, max_bytes: int) -> bool:
    """Copy the members of an archive under `parent`; return False when the bound is reached."""
    with tarfile.open(fileobj=_Chunks(stream), mode="r|") as source:
        for member in source:
            member.name = posixpath.join(parent, member.name)
            if member.islnk():
                member.linkname = posixpath.join(parent, member.linkname)
            member.pax_headers = {}
            if archive.offset + member.size + 512 > max_bytes:
                return False
            archive.addfile(member, source.extractfile(member) if member.isreg() else None)
    return True


class _Chunks(io.RawIOBase):
    """A stream of chunks as a file to read."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        parts, left = [], size
        while left > 0:
            if not self._rest:
                self._rest = next(self._chunks, b"")
                if not self._rest:
                    break
            part, self._rest = self._rest[:left], self._rest[left:]
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def _parents(path: str) -> list[str]:
    """Return the folders on the way to `path` and itself, outermost first, without the root."""
    names = [name for name in path.split("/") if name]
    return ["/" + "/".join(names[: n + 1]) for n in range(len(names))]
