"""The sandbox contract: where untrusted code runs.

A sandbox's own failure is `SandboxError`; whatever the snippet does is a `SandboxResult`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self, runtime_checkable

__all__ = ["Sandbox", "SandboxLimits", "SandboxResult", "SandboxStatus", "Session"]


class SandboxStatus(StrEnum):
    """How an execution ended."""

    OK = "ok"
    ERROR = "error"
    """The snippet raised or exited with a non-zero status."""
    TIMEOUT = "timeout"
    MEMORY = "memory"
    OUTPUT = "output"
    """The output limit was reached; what fits is kept."""
    KILLED = "killed"
    """The snippet killed itself or was killed by a limit that has no name of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """What one execution may use. Enforced by the kernel, not by the snippet's good will."""

    wall_s: float = 5.0
    cpu_s: float = 5.0
    memory_mb: int = 512
    output_bytes: int = 64 * 1024
    file_mb: int = 16
    num_processes: int = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxResult:
    """What an execution did."""

    status: SandboxStatus
    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    """`repr` of the last expression, when the snippet ends in one."""
    elapsed_s: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether the snippet ended normally."""
        return self.status is SandboxStatus.OK


@runtime_checkable
class Session(Protocol):
    """A persistent interpreter: names defined by one call are there in the next."""

    async def run(self, code: str, *, limits: SandboxLimits | None = None) -> SandboxResult:
        """Execute `code` in the session. After a time-out or a crash the next call starts afresh.

        Raises:
            SandboxError: the sandbox itself failed.
        """
        ...

    async def aclose(self) -> None:
        """End the interpreter and everything it started."""
        ...


@runtime_checkable
class Sandbox(Protocol):
    """Runs untrusted Python. One object serves many concurrent callers."""

    async def run(self, code: str, *, limits: SandboxLimits | None = None) -> SandboxResult:
        """Execute `code` in a fresh interpreter.

        Raises:
            SandboxError: the sandbox itself failed; the snippet is not to blame.
        """
        ...

    async def session(self) -> Session:
        """A new persistent interpreter, of one episode's own."""
        ...

    async def aclose(self) -> None:
        """End every worker. Idempotent."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...
