"""A process that plays environments of verifiers for this one, in a Python of its own."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from areal_gym.envs.verifiers import worker_program
from areal_gym.errors import (
    AgentError,
    EngineError,
    EnvError,
    EpisodeError,
    SandboxError,
    UsageError,
)

_ERRORS: Mapping[str, type[EpisodeError]] = {
    "policy": EngineError,
    "sandbox": SandboxError,
    "agent": AgentError,
}
_LOG_CHARS = 600


class VerifiersWorker:
    """One process with one environment; rollouts run in it at once.

    Args:
        python: the interpreter that has verifiers and the environment's package.
        env: the environment's id.
        arguments: of the environment.
        open_timeout_s: the longest time until it is loaded.

    Raises:
        UsageError: there is no such interpreter, or it cannot load the environment.
    """

    def __init__(
        self, python: str, env: str, arguments: Mapping[str, Any], *, open_timeout_s: float
    ) -> None:
        self._python, self._env = python, env
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._writing = threading.Lock()
        try:
            self._process = subprocess.Popen(
                [python, worker_program.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise UsageError(
                f"{python} does not start: {error.strerror}",
                hints=["env.kwargs.python is the interpreter of a virtual environment"],
            ) from error
        threading.Thread(target=self._read, name="areal-gym-verifiers", daemon=True).start()
        try:
            opened = self.ask("open", env=env, arguments=dict(arguments))
            about = opened.result(timeout=open_timeout_s)
        except (EpisodeError, TimeoutError) as error:
            reason = str(error) or f"it took more than {open_timeout_s:g} s"
            self.close()
            raise UsageError(
                f"verifiers cannot load {env!r} with {python}: {reason}",
                hints=[
                    f"{python} -m pip install verifiers==0.4.0 and the environment's package",
                    "env.kwargs.python is the interpreter that has them",
                ],
            ) from error
        self.version: str = about["version"]
        """The version of verifiers there."""
        self.num_tasks: dict[str, int] = about["num_tasks"]
        """The number of tasks of each split."""

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def ask(self, call: str, **arguments: Any) -> Future[Any]:
        """Send a request; its result, or an EpisodeError, arrives in the future."""
        return self._request(call, **arguments)[1]

    def _request(self, call: str, **arguments: Any) -> tuple[int, Future[Any]]:
        number = next(self._numbers)
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()
        self._waiting[number] = answer
        try:
            self._send({"id": number, "call": call, **arguments})
        except OSError:
            self._fail(number)
        return number, answer

    async def play(self, **arguments: Any) -> dict[str, Any]:
        """Play a rollout and return its outcome; a caller that is cancelled cancels it there.

        Raises EngineError, SandboxError, AgentError or EnvError, by what failed.
        """
        number, answer = self._request("play", **arguments)
        try:
            result: dict[str, Any] = await asyncio.wrap_future(answer)
            return result
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                self._send({"call": "cancel", "of": number})
            raise

    def close(self) -> None:
        """End the process and all that it has started. May be called twice."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._log.close()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with self._writing:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # closed meanwhile
            for line in self._process.stdout:
                reply = json.loads(line)
                answer = self._waiting.pop(reply["id"], None)
                if answer is None:
                    continue
                if "error" in reply:
                    kind = _ERRORS.get(reply["kind"], EnvError)
                    answer.set_exception(kind(f"verifiers, {self._env}: {reply['error']}"))
                else:
                    answer.set_result(reply["result"])
        for number in list(self._waiting):
            self._fail(number)

    def _fail(self, number: int) -> None:
        answer = self._waiting.pop(number, None)
        if answer is not None:
            answer.set_exception(EnvError(f"the process of verifiers has ended{self._log_tail()}"))

    def _log_tail(self) -> str:
        try:
            text = os.pread(self._log.fileno(), 1 << 20, 0).decode("utf-8", "replace").strip()
        except (OSError, ValueError):
            return ""
        return f": {text[-_LOG_CHARS:]}" if text else ""


_workers: dict[str, VerifiersWorker] = {}
_lock = threading.Lock()


def shared_worker(
    python: str, env: str, arguments: Mapping[str, Any], *, open_timeout_s: float
) -> VerifiersWorker:
    """Return this process's worker for these settings, started on first use or after it ended."""
    key = json.dumps([python, env, dict(arguments)], sort_keys=True, default=repr)
    with _lock:
        worker = _workers.get(key)
        if worker is None or not worker.is_alive:
            worker = VerifiersWorker(python, env, arguments, open_timeout_s=open_timeout_s)
            _workers[key] = worker
    return worker


def close_workers() -> None:
    """End all workers of this process."""
    with _lock:
        for worker in _workers.values():
            worker.close()
        _workers.clear()


def default_python() -> str:
    """Return the interpreter that AREAL_GYM_VERIFIERS_PYTHON names, or raise UsageError."""
    python = os.environ.get("AREAL_GYM_VERIFIERS_PYTHON", "")
    if not python:
        raise UsageError(
            "which Python has verifiers? It cannot be installed beside areal-gym",
            hints=[
                "python -m venv VENV && VENV/bin/pip install verifiers==0.4.0 ENVIRONMENT",
                "env.kwargs.python=VENV/bin/python, or the variable AREAL_GYM_VERIFIERS_PYTHON",
            ],
        )
    return str(Path(python).expanduser())


atexit.register(close_workers)
