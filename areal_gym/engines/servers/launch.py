"""Starts servers as child processes, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from areal_gym.engines.servers import process_guard as guard
from areal_gym.errors import ConfigError, EngineError
from areal_gym.utils.child_python import python_argv
from areal_gym.utils.command_words import command_words
from areal_gym.utils.http_servers.addresses import http_address, listen

_POLL_S = 0.25
_HEALTH_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRecipe:
    """The program and arguments that start a server; it can be sent to other machines."""

    name: str
    """The first part of the names of logs."""
    python_arguments: tuple[str, ...]
    """Arguments by which the Python of the server's machine starts a server."""
    model_flag: str | None
    """The flag before the model's path; None if the path comes first, without a flag."""
    arguments: tuple[str, ...] = ()
    """Arguments of all servers, before the user's."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the server, which the user's override."""
    modules: Path | None = None
    """A folder in `areal_gym/engines` with modules that servers import."""

    def variables(self) -> dict[str, str]:
        """Return the environment of a server that this process starts."""
        variables = {**self.environment, **os.environ}
        if self.modules is not None:
            paths = (str(module_folder(self.modules)), os.environ.get("PYTHONPATH"))
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return variables

    def model_arguments(self, policy: Path) -> tuple[str, ...]:
        """Return the arguments that name the model."""
        return (*filter(None, (self.model_flag,)), str(policy))


class ServerProcess(Protocol):
    """A server process that the engine starts, and restarts after its death."""

    url: str
    log: Path

    @property
    def is_running(self) -> bool:
        """Whether the process is running; it may still be starting."""

    async def start(self) -> None:
        """Start the server and return when it serves; raise EngineError if it does not come up."""

    async def aclose(self) -> None:
        """End the server. Idempotent."""

    def last_lines(self, limit: int = 20) -> list[str]:
        """Return the end of its log."""


class LaunchedServer:
    """Runs one server as a process on this machine.

    The server ends when this process ends in any way (see `process_guard`).

    Args:
        policy: the checkpoint directory to serve.
        recipe: how servers of this kind are started.
        command: starts the server, as a string or a list; by default this Python does.
        server_args: further arguments.
        gpus: the value of CUDA_VISIBLE_DEVICES; None leaves it unchanged.
        host: the address to listen on.
        port: the port; by default a free one.
        log: the file for its output; by default a temporary file, removed if all goes well.
        start_timeout_s: how many seconds the server may take until it serves.
    """

    def __init__(
        self,
        policy: Path,
        *,
        recipe: StartRecipe,
        command: str | Sequence[str] | None = None,
        server_args: str | Sequence[str] = (),
        gpus: str | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,
        log: Path | None = None,
        start_timeout_s: float = 600.0,
    ) -> None:
        if not port:
            with listen(host, 0) as free:
                port = free.getsockname()[1]
        self.url = http_address(host, port)
        name = f"areal-gym-{recipe.name}-{os.getpid()}-{port}.log"
        self.log = log or Path(tempfile.gettempdir(), name)
        self._is_log_kept = log is not None
        self._arguments = [
            *(command_words(command) or python_argv(*recipe.python_arguments)),
            *recipe.model_arguments(policy),
            *("--host", host, "--port", str(port)),
            *recipe.arguments,
            *command_words(server_args),
        ]
        self._environment = recipe.variables()
        if gpus is not None:
            self._environment["CUDA_VISIBLE_DEVICES"] = gpus
        self._start_timeout_s = start_timeout_s
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def process_group(self) -> int | None:
        """The process group of the server and its children; None before the start."""
        return None if self._guard is None else self._guard.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is running; it may still be starting."""
        return self._guard is not None and self._guard.poll() is None

    async def start(self) -> None:
        """Start the server, and return when it serves.

        Raises:
            EngineError: the process ended or took too long; the hints quote its log.
        """
        await self.aclose()
        self._run()
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while self.is_running:
                    if await is_healthy(self.url):
                        return
                    await asyncio.sleep(_POLL_S)
                raise self._failure("ended while it was starting")
        except TimeoutError:
            raise self._failure(f"did not serve within {self._start_timeout_s:g} s") from None

    async def aclose(self) -> None:
        """End the server and all its children. Idempotent."""
        process, self._guard = self._guard, None
        if process is None:
            return
        assert process.stdin is not None
        was_running = process.poll() is None
        with process.stdin, contextlib.suppress(BrokenPipeError):
            # Forked children may hold the pipe open, so closing it alone is not enough.
            process.stdin.write(b"end")
        await asyncio.to_thread(process.wait)
        if was_running and not self._is_log_kept:
            self.log.unlink(missing_ok=True)

    def last_lines(self, limit: int = 20) -> list[str]:
        """Return the end of its log."""
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace").splitlines()[-limit:]
        return []

    def _run(self) -> None:
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            log_file = self.log.open("ab")
        except OSError as error:
            raise ConfigError(
                f"the server's log cannot be written to {self.log}: {error.strerror}",
                hints=["name another directory: engine.kwargs.log_dir=DIR"],
            ) from error
        with log_file:
            self._guard = subprocess.Popen(
                [sys.executable, guard.__file__, *self._arguments],
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
                bufsize=0,
            )

    def _failure(self, problem: str) -> EngineError:
        self._is_log_kept = True
        return EngineError(
            f"the server {problem}: {shlex.join(self._arguments)}",
            hints=[f"its log: {self.log}", *self.last_lines()],
        )


def module_folder(modules: Path) -> Path:
    """Return the absolute path of a folder of `engines` on this machine."""
    return Path(__file__).parents[1] / modules


async def is_healthy(url: str) -> bool:
    """Return whether a server answers `/health` with success."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=_HEALTH_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/health") as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
