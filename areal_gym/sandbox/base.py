"""The sandbox contract: where untrusted code runs.

A sandbox's own failure is `SandboxError`; whatever the snippet does is a `SandboxResult`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, Self, runtime_checkable

__all__ = [
    "Sandbox",
    "SandboxLevel",
    "SandboxLimits",
    "SandboxReport",
    "SandboxResult",
    "SandboxStatus",
    "Session",
]


class SandboxLevel(StrEnum):
    """How far a snippet is from the rest of the machine; declared weakest first."""

    NONE = "none"
    """Nothing holds it: it is this user, with a clean environment and limits."""
    FILTERED = "filtered"
    """Landlock and seccomp refuse files, network and other processes; it may not fork."""
    ISOLATED = "isolated"
    """Namespaces and a root directory of its own, and seccomp; or a container."""

    @property
    def rank(self) -> int:
        """0 for the weakest."""
        return list(SandboxLevel).index(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxReport:
    """What is active on this machine. Recorded with a run; printed by `areal-gym doctor`."""

    backend: str
    level: SandboxLevel
    protections: tuple[str, ...]
    """By name; what this kernel or user refuses is not in it."""


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
    UNAVAILABLE = "unavailable"
    """The sandbox failed. `run` raises `SandboxError` instead; tables of many runs say this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """What one execution may use. Enforced by the kernel, not by the snippet's good will."""

    wall_s: float = 5.0
    cpu_s: float = 5.0
    memory_mb: int = 512
    """Of each process, and of all together, of whatever kind: see docs/sandbox.md."""
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
    peak_memory_mb: float = 0.0
    """Most memory that its processes held together, or the largest alone with the interpreter's
    share; of a session, so far and as its interpreter tells. 0 when the snippet was lost."""

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

    async def report(self) -> SandboxReport:
        """What protects this machine from the snippets.

        Raises:
            SandboxError: the sandbox does not start, or protects less than it was asked to.
        """
        ...

    async def aclose(self) -> None:
        """End every worker. Idempotent."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...
