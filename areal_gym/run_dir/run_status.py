"""The state of a run: `status.json`, and a lock on the directory while a process writes to it.

    {"state": "failed", "step": 12, "steps": 60, "error": "...", "hints": [...],
     "pid": 4242, "host": "node-3", "boot_id": "...", "process_start": 123456,
     "started_at": "2026-01-02T03:04:05+00:00", "updated_at": "..."}

A killed process cannot update its file, which then says "running" forever. Readers therefore check
whether the process is alive, and report the run as "died" if it is not.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from areal_gym.errors import GymError, InfrastructureError, TrainError
from areal_gym.utils.command_words import quoted
from areal_gym.utils.files import read_json, to_json, write_atomic

RunStatus = Literal["running", "finished", "failed", "interrupted", "died", "stopped"]
"""The state of a run. "stopped" is a run of an earlier version, without a `status.json`."""

_SILENCE_S = 6 * 3600
"""A run on another machine without a step for this long is considered dead."""
_ENDED = ("finished", "failed", "interrupted")


@dataclass(frozen=True, kw_only=True, slots=True)
class StatusRecord:
    """The content of `status.json`."""

    state: RunStatus
    step: int = 0  # the number of steps taken
    steps: int | None = None  # the number of steps in total
    error: str | None = None
    hints: Sequence[str] = ()  # commands to type next, after an error
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    boot_id: str = field(default_factory=lambda: _boot_id())
    process_start: int | None = field(default_factory=lambda: _process_start(os.getpid()))
    """The process's start time in kernel ticks; it tells a process from a later one with its pid.
    """
    started_at: str = field(default_factory=lambda: _now())
    updated_at: str = field(default_factory=lambda: _now())

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self | None:
        """Make a record from an untrusted file; return None if the content is not valid."""
        if row.get("state") not in ("running", *_ENDED):
            return None
        numbers = {"step": 0, "steps": None, "pid": 0, "process_start": 0}
        texts = {"error": None, "host": "", "boot_id": "", "started_at": "", "updated_at": ""}
        values: dict[str, Any] = {**numbers, **texts}
        for name in values:
            if type(row.get(name)) is (int if name in numbers else str):
                values[name] = row[name]
        hints = row.get("hints")
        values["hints"] = tuple(map(str, hints)) if isinstance(hints, list) else ()
        return cls(state=row["state"], **values)

    @property
    def is_alive(self) -> bool:
        """Whether the process that wrote the record is alive, as far as this machine can tell."""
        if self.boot_id and self.boot_id == _boot_id() and self.host == socket.gethostname():
            return self.process_start == _process_start(self.pid)
        if self.host == socket.gethostname():  # this machine, before its last reboot
            return False
        try:
            updated = datetime.datetime.fromisoformat(self.updated_at)
            return time.time() - updated.timestamp() < _SILENCE_S
        except (ValueError, OverflowError, OSError):
            return False

    @property
    def current_state(self) -> RunStatus:
        """The state; "died" for a running one whose process does not exist any more."""
        return "died" if self.state == "running" and not self.is_alive else self.state

    def advice(self, run: Path) -> list[str]:
        """Return hints about a run that has not finished."""
        hints = list(self.hints)
        if self.current_state != "running":
            hints.append(
                f"continue from its newest checkpoint: areal-gym train --resume --out {quoted(run)}"
            )
        return hints


class StatusFile:
    """Writes a run's `status.json` at its start, after each step, and at its end.

    Errors while writing are ignored, because the run itself reports a full disk.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._record: StatusRecord | None = None

    def read(self) -> StatusRecord | None:
        """Read the file; None when it is missing or cannot be read."""
        try:
            return StatusRecord.from_dict(read_json(self.file))
        except (GymError, OSError):
            return None

    def start(self, *, step: int, steps: int) -> None:
        """Record that the run starts, or continues after `step`."""
        self._write(StatusRecord(state="running", step=step, steps=steps))

    def took_step(self, step: int) -> None:
        """Record that the run has taken a step."""
        if self._record is not None:
            self._write(replace(self._record, step=step))

    def end(self, error: BaseException | None) -> None:
        """Record that the run has ended, by an error or without one."""
        if self._record is None:
            return
        record = replace(self._record, state="finished" if error is None else "interrupted")
        if isinstance(error, GymError):
            record = replace(record, state="failed", error=error.message, hints=error.hints)
        elif isinstance(error, Exception):  # not KeyboardInterrupt or CancelledError
            record = replace(record, state="failed", error=repr(error))
        self._write(record)

    def _write(self, record: StatusRecord) -> None:
        self._record = replace(record, updated_at=_now())
        with suppress(TrainError, OSError):
            write_atomic(self.file, to_json(asdict(self._record), indent=2), is_synced=False)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _process_start(pid: int) -> int | None:
    """Return the start time of a process in kernel ticks; None if it cannot be determined."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


class DirectoryLock:
    """Locks a directory for this process until `release` or the end of the process.

    Raises:
        InfrastructureError: another process has locked it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise InfrastructureError(
                f"another process is writing to {path}",
                hints=["wait for its end, or choose another directory with --out"],
            ) from None
        except OSError:
            # Some network file systems cannot lock directories; then only `mode` protects runs.
            pass

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def is_valid(self) -> bool:
        """Whether the path still leads to the directory that was locked."""
        if self._descriptor is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except FileNotFoundError:
            return False


def is_locked(path: Path) -> bool:
    """Return whether a process of this machine has the lock; False if it cannot be determined."""
    try:
        inode = path.stat().st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return False
    # Do not try to take the lock: that could make a run fail that starts at this moment.
    return any(" FLOCK " in line and f":{inode} " in line for line in locks.splitlines())
