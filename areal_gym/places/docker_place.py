"""One place on a Docker engine: its commands, its files and its end."""

from __future__ import annotations

import asyncio
import io
import posixpath
import socket
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from areal_gym.errors import SandboxError
from areal_gym.places.base import CommandResult, FileChanges
from areal_gym.places.engine_calls import engine_errors, remove_container
from areal_gym.places.engine_commands import EngineCommands
from areal_gym.places.keeper_commands import KILLED, Commands
from areal_gym.places.keeper_socket import FOLDER, KeeperSocket
from areal_gym.places.listening import listen_beside, listen_inside

T = TypeVar("T")

_MODIFIED, _REMOVED = 0, 2  # the engine's kinds of changes; 1 is what was added
_GO_FOLDER = 1 << 31  # a folder, in a mode as Go writes it


class DockerPlace:
    """A container whose commands a keeper executes, or the engine.

    Args:
        container: the started container.
        commands: its commands; None: the engine's execs.
        keeper: the socket of its keeper, if it has one.
        user: the user of commands that name none.
        control: runs short calls to the engine.
        waiting: waits for the engine's execs.
    """

    def __init__(
        self,
        container: Any,
        *,
        commands: Commands | None,
        keeper: KeeperSocket,
        user: str,
        control: ThreadPoolExecutor,
        waiting: ThreadPoolExecutor,
    ) -> None:
        self._container = container
        self._keeper = keeper
        self._has_keeper = commands is not None
        self._commands: Commands | EngineCommands = commands or EngineCommands(
            container, control=control, waiting=waiting
        )
        self._user = user
        self._control = control
        self._waiting = waiting
        self._starting = asyncio.Lock()
        self._is_frozen = False
        self._is_closed = False

    @property
    def id(self) -> str:
        """The engine's id of the container."""
        return str(self._container.id)

    @property
    def has_keeper(self) -> bool:
        """Whether a command costs a fork, and not an exec of the engine."""
        return self._has_keeper

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
        commands = await self._running()
        details = {
            "cwd": cwd,
            "env": dict(env or {}),
            "user": str(self._user if user is None else user),
        }
        result = await commands.run(argv, details, timeout_s)
        if result is None:
            await self.freeze()  # the next command starts it again, with its files
            return CommandResult(exit_code=KILLED, stdout=b"", stderr=b"", is_timed_out=True)
        return result

    async def _running(self) -> Commands | EngineCommands:
        """Return the commands of the place, which is started again if it was frozen."""
        async with self._starting:
            if not self._is_frozen:
                return self._commands
            commands: Commands | EngineCommands | None = None
            if self._has_keeper:
                commands = await self._start_keeper()
            if commands is None:
                await self._call(self._container.start)
                commands = EngineCommands(
                    self._container, control=self._control, waiting=self._waiting
                )
            self._commands = commands
            self._is_frozen = False
            return commands

    async def _start_keeper(self) -> Commands | None:
        """Start the container with its keeper; None if its own commands have broken its python3.

        That must not count as a failure of the machine, which would spare a policy its reward.
        """
        connection = await self._keeper.connect(
            lambda: self._call(self._container.start), self.is_running
        )
        if connection is not None:
            return Commands(connection)
        self._has_keeper = False
        self._keeper.give_up()
        await self._call(self._stop)
        return None

    async def is_running(self) -> bool:
        """Return whether the container runs; SandboxError if the engine has lost it."""
        await self._call(self._container.reload)
        return str(self._container.status) == "running"

    async def put(self, tar: bytes, path: str) -> None:
        """Unpack an archive below a folder, which is made; SandboxError if a link leads there."""
        await self._call(self._put, tar, posixpath.normpath("/" + path))

    async def listen(self, port: int) -> socket.socket:
        """Return a socket that listens on 127.0.0.1:`port` inside; it ends with `freeze`.

        The keeper makes it. Without one, a thread of this process enters the place's network; where
        that is refused, a container of this interpreter does that has the same network.
        """
        commands = await self._running()
        if isinstance(commands, Commands):
            return await commands.listen(port)
        await self._call(self._container.reload)
        pid = int(self._container.attrs["State"]["Pid"])
        if not pid:
            raise SandboxError("the place is not running: nothing can listen inside")
        try:
            return await self._call(listen_inside, pid, port)
        except SandboxError as refused:
            try:
                return await listen_beside(self._container, self._keeper.owner, self._call, port)
            except SandboxError as error:
                raise SandboxError(f"{refused.message}; {error.message}") from error

    async def freeze(self) -> None:
        """End all processes; the files stay."""
        self._commands.close("the place was frozen")
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
            self._commands.close("the place is closed")
            try:
                await self._call(remove_container, self._container)
            finally:
                self._keeper.remove()

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
        kinds = {path: kind for path, kind in kinds.items() if not is_keepers(path)}
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


def is_keepers(path: str) -> bool:
    """Return whether a path is the folder that is mounted for the keeper, or in it."""
    return path == FOLDER or path.startswith(f"{FOLDER}/")


def _parents(path: str) -> list[str]:
    """Return the folders on the way to `path` and itself, outermost first, without the root."""
    names = [name for name in path.split("/") if name]
    return ["/" + "/".join(names[: n + 1]) for n in range(len(names))]
