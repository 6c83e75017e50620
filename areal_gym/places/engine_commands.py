"""Commands of a container as execs of the engine: for images without a python3 of 3.9 or later."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from areal_gym.errors import SandboxError, SandboxUnreachableError
from areal_gym.places.base import CommandResult
from areal_gym.places.engine_calls import engine_errors
from areal_gym.places.keeper_commands import KILLED, OUTPUT_BYTES

T = TypeVar("T")

_KILL_S = 5.0
# The command's pid inside the place, which leads its session: how it is killed at its deadline.
_WRAPPER = 'echo $$ >&2; exec "$@"'


@dataclass
class _Output:
    """Keeps the outputs of a command up to a bound; the rest is read and dropped."""

    texts: dict[int, bytearray] = field(default_factory=lambda: {1: bytearray(), 2: bytearray()})

    def add(self, stream: int, data: bytes) -> None:
        text = self.texts.setdefault(stream, bytearray())
        text += data[: max(0, OUTPUT_BYTES + 32 - len(text))]

    @property
    def pid(self) -> int | None:
        """The pid that the wrapper wrote, or None when the command could not be started."""
        first, end, _ = bytes(self.texts[2]).partition(b"\n")
        return int(first) if end and first.isdigit() else None


class EngineCommands:
    """Runs commands as `Commands` does; `control` makes short calls, and `waiting` waits."""

    def __init__(
        self, container: Any, *, control: ThreadPoolExecutor, waiting: ThreadPoolExecutor
    ) -> None:
        self._container = container
        self._control = control
        self._waiting = waiting
        self.is_alive = True

    async def run(
        self, argv: Sequence[str], details: Mapping[str, Any], timeout_s: float
    ) -> CommandResult | None:
        """Run a command; None if its outputs stayed open after it was killed at its deadline."""
        command = ["/bin/sh", "-c", _WRAPPER, "sh", *argv]
        options = {
            "environment": details["env"],
            "workdir": details["cwd"],
            "user": details["user"],
        }
        created = await self._call(
            lambda: self._api.exec_create(self._container.id, command, stdin=False, **options)
        )
        output = _Output()
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._waiting, self._read, created["Id"], output)
        try:
            done, _ = await asyncio.wait({reading}, timeout=timeout_s)
            if not done:
                await self._kill(output, reading)
                if not reading.done():
                    reading.add_done_callback(_ignore_error)
                    return None
        except asyncio.CancelledError:
            await asyncio.shield(self._kill(output, reading))
            raise
        if not done:
            _ignore_error(reading)  # its connection was cut
            return self._result(argv, output, KILLED, is_timed_out=True)
        with self._errors():
            reading.result()
        exit_code = (await self._call(self._api.exec_inspect, created["Id"]))["ExitCode"]
        return self._result(argv, output, exit_code, is_timed_out=False)

    def close(self, reason: str) -> None:
        """Give up: the processes have ended."""
        self.is_alive = False

    def _result(
        self, argv: Sequence[str], output: _Output, exit_code: int | None, *, is_timed_out: bool
    ) -> CommandResult:
        stdout, stderr = bytes(output.texts[1]), bytes(output.texts[2])
        if exit_code is None or (output.pid is None and not is_timed_out):
            text = (stdout + stderr).decode("utf-8", "replace").strip()[-400:]
            raise SandboxError(f"{shlex.join(argv)[:200]} could not be started: {text}")
        stderr = stderr.partition(b"\n")[2]
        return CommandResult(
            exit_code=exit_code,
            stdout=stdout[:OUTPUT_BYTES],
            stderr=stderr[:OUTPUT_BYTES],
            is_timed_out=is_timed_out,
        )

    @property
    def _api(self) -> Any:
        return self._container.client.api

    async def _call(self, function: Callable[..., T], *arguments: object) -> T:
        with self._errors():
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._control, function, *arguments)

    def _errors(self) -> Any:
        return engine_errors(f"the place {self._container.id[:12]}")

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
        """Kill a command's process group, and wait a little for the end of its outputs."""
        pid = output.pid
        if pid is not None:
            kill = ["/bin/sh", "-c", f"kill -9 -{pid}; kill -9 {pid}"]
            with suppress(SandboxError, SandboxUnreachableError):
                await self._call(lambda: self._container.exec_run(kill, user="0", detach=True))
            await asyncio.wait({reading}, timeout=_KILL_S)


def _ignore_error(reading: asyncio.Future[None]) -> None:
    if not reading.cancelled():
        reading.exception()
