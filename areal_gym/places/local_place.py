"""One local place: its commands, its files and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from areal_gym.errors import SandboxError
from areal_gym.places.base import CommandResult, FileChanges
from areal_gym.places.keeper_commands import KILLED, Commands
from areal_gym.places.local_server import LocalServer, receive


class LocalPlace:
    """A place of a server on this machine, started with its image's layers and `settings`."""

    def __init__(
        self,
        server: LocalServer,
        number: int,
        *,
        layers: Sequence[str],
        settings: Mapping[str, Any],
        user: str,
    ) -> None:
        self._server = server
        self._number = number
        self._layers = list(layers)
        self._settings = dict(settings)
        self._user = user
        self._commands: Commands | None = None
        self._starting = asyncio.Lock()
        self._is_closed = False

    async def start(self) -> Commands:
        """Start the first process, also of a frozen place; SandboxError if it does not answer."""
        async with self._starting:
            if self._commands is not None and self._commands.is_alive:
                return self._commands
            if self._is_closed:
                raise SandboxError("the place is closed")
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            try:
                with theirs:
                    self._server.send(
                        "start",
                        [theirs.fileno()],
                        place=self._number,
                        layers=self._layers,
                        settings=self._settings,
                    )
                event, _ = await receive(ours)
                if "error" in event:
                    raise SandboxError(f"a local place did not start: {event['error'].strip()}")
            except OSError:
                ours.close()
                raise SandboxError("a local place did not start: its first process died") from None
            except BaseException:
                ours.close()
                raise
            self._commands = Commands(ours)
            return self._commands

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
        commands = await self.start()
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

    async def put(self, tar: bytes, path: str) -> None:
        """Unpack an archive below a folder, which is made; SandboxError if a link leads there."""
        with memory_file(tar) as file:
            await self._server.ask("put", [file], place=self._number, path=path)

    async def listen(self, port: int) -> socket.socket:
        """Return a socket that listens on 127.0.0.1:`port` inside; it ends with `freeze`."""
        await self.start()
        _, fds = await self._server.ask("listen", place=self._number, port=port)
        listener = socket.socket(fileno=fds[0])
        listener.setblocking(False)
        return listener

    async def freeze(self) -> None:
        """End all processes; the files stay."""
        if self._commands is not None:
            self._commands.close("the place was frozen")
        await self._server.ask("freeze", place=self._number)

    async def changes(self) -> FileChanges:
        """Return how the files of the frozen place differ from those of its image."""
        self._require_frozen()
        with memory_file(b"") as file:
            await self._server.ask("changes", [file], place=self._number, layers=self._layers)
            paths = json.loads(os.pread(file, os.fstat(file).st_size, 0))
        return FileChanges(written=tuple(paths["written"]), removed=tuple(paths["removed"]))

    def _require_frozen(self) -> None:
        if self._commands is None or self._commands.is_alive:
            raise SandboxError("files are read from a frozen place only: await place.freeze()")

    async def take(self, paths: Sequence[str], *, max_bytes: int) -> bytes:
        """Return an archive of paths of a frozen place; no link is followed."""
        self._require_frozen()
        with memory_file(b"") as file:
            await self._server.ask(
                "take", [file], place=self._number, paths=list(paths), max_bytes=max_bytes
            )
            return os.pread(file, os.fstat(file).st_size, 0)

    async def keep(self, layer: str) -> None:
        """Copy what a frozen place has written to a new layer."""
        await self._server.ask("keep", place=self._number, layer=layer)

    async def aclose(self) -> None:
        """Remove the place with its files. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._commands is not None:
            self._commands.close("the place is closed")
        if self._server.is_alive:
            await self._server.ask("end", place=self._number)


@contextlib.contextmanager
def memory_file(content: bytes) -> Any:
    """Give a descriptor of a file in memory, read from its beginning."""
    fd = os.memfd_create("archive", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
