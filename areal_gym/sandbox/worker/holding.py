"""Stops the processes of a session between its calls.

SIGSTOP goes to every process of the session, top down, until two checks in a row find all of them
stopped. The filter of system calls (`seccomp`) prevents that a timer or a descriptor wakes a
stopped process. A session that uses processor time instead of stopping is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

from . import usage

PERIOD_S = 0.01
"""Seconds between two checks of a session that has not stopped yet."""
_NUM_CHECKS = 2
_MAX_TICKS = 0.5 * os.sysconf("SC_CLK_TCK")
_AT_REST = "TtZX"  # states of /proc: stopped, traced, ended, dead


class _Held:
    def __init__(self) -> None:
        self.fds: dict[int, int] = {}  # descriptors of its children, by pid
        self.checks_at_rest = 0
        self.first_ticks: int | None = None


class Holding:
    """The idle sessions of one fork server, by the pids of their interpreters.

    Args:
        proc: a descriptor of a /proc.
        is_alone: whether a cell cannot have processes other than its interpreter.
        is_container: whether all processes but the fork server belong to the only cell.
        kill: ends a cell.
    """

    def __init__(
        self, proc: int, *, is_alone: bool, is_container: bool, kill: Callable[[int], None]
    ) -> None:
        self._proc = proc
        self._is_container = is_container
        # A /proc of another pid namespace has other numbers.
        self._is_alone = is_alone or not (is_container or _is_own(proc))
        self._kill = kill
        self._held: dict[int, _Held] = {}
        self._restless: set[int] = set()

    @property
    def has_restless(self) -> bool:
        """Whether `check` has something to do."""
        return bool(self._restless)

    def hold(self, pid: int) -> None:
        """Stop the interpreter `pid` and its children."""
        if pid not in self._held:
            self._held[pid] = _Held()
            os.kill(pid, signal.SIGSTOP)  # our child, not yet waited for
            if not self._is_alone:
                self._restless.add(pid)

    def resume(self, pid: int) -> None:
        """Continue the processes of `pid`."""
        if pid in self._held:
            self.forget(pid, should_continue=True)
            os.kill(pid, signal.SIGCONT)

    def forget(self, pid: int, *, should_continue: bool = False) -> None:
        """Forget `pid`, which has ended or continues."""
        held = self._held.pop(pid, None)
        self._restless.discard(pid)
        if held is None:
            return
        for fd in held.fds.values():
            if should_continue:
                _send(fd, signal.SIGCONT)
            os.close(fd)
        if should_continue and self._is_container:
            _send_all(signal.SIGCONT)

    def check(self) -> None:
        """Stop running processes; called every `PERIOD_S` while sessions are not at rest."""
        for pid in tuple(self._restless):
            held = self._held[pid]
            is_at_rest, ticks = self._stop(pid, held)
            held.checks_at_rest = held.checks_at_rest + 1 if is_at_rest else 0
            if held.first_ticks is None:
                held.first_ticks = ticks
            if held.checks_at_rest >= _NUM_CHECKS:
                self._restless.discard(pid)
            elif ticks - held.first_ticks > _MAX_TICKS:
                self._restless.discard(pid)
                self._kill(pid)

    def _stop(self, pid: int, held: _Held) -> tuple[bool, int]:
        """Stop the processes of `pid`; return whether all were at rest, and their CPU ticks."""
        is_at_rest, total = True, 0
        for process, parent in self._processes(pid):
            is_ours = process == pid or self._is_container or self._has(held, process, parent)
            stat = _stat(self._proc, process)
            if stat is None:
                continue
            if not is_ours:
                is_at_rest = False  # it has a new parent: the next check finds it there
                continue
            state, _, ticks = stat
            total += ticks
            if state not in _AT_REST:
                is_at_rest = False
                if process == pid:
                    os.kill(pid, signal.SIGSTOP)
                elif not self._is_container:
                    _send(held.fds[process], signal.SIGSTOP)
        if self._is_container and not is_at_rest:
            _send_all(signal.SIGSTOP)
        return is_at_rest, total

    def _processes(self, pid: int) -> Iterator[tuple[int, int]]:
        """Yield pids with those of their parents, parents first."""
        if not self._is_container:
            yield from usage.tree(self._proc, pid)
            return
        for name in os.listdir(self._proc):
            if name.isdigit() and int(name) != os.getpid():
                yield int(name), os.getpid()

    def _has(self, held: _Held, pid: int, parent: int) -> bool:
        """Return whether there is a descriptor of `pid`: the number alone could be reused."""
        if pid not in held.fds:
            try:
                fd = os.pidfd_open(pid)
            except OSError:
                return False
            stat = _stat(self._proc, pid)
            if stat is None or stat[1] != parent:
                os.close(fd)
                return False
            held.fds[pid] = fd
        return True


def _is_own(proc: int) -> bool:
    try:
        return os.readlink("self", dir_fd=proc) == str(os.getpid())
    except OSError:
        return False


def _stat(proc: int, pid: int) -> tuple[str, int, int] | None:
    """Return state, parent and CPU time in ticks, including waited-for children."""
    fields = usage.stat_fields(proc, pid)
    if len(fields) < 15:
        return None
    return fields[0], int(fields[1]), sum(map(int, fields[11:15]))


def _send(fd: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(fd, number)


def _send_all(number: signal.Signals) -> None:
    """Signal every process of the container but this one, which is its first."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, number)
