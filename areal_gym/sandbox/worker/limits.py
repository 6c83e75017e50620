"""Resource limits of a cell."""

from __future__ import annotations

import resource

_RLIMIT_LOCKS = 10  # unused by the kernel since Linux 2.4: stores a number that /proc shows
NOTED_LIMIT = "Max file locks"
"""The name in /proc/PID/limits of what `note_num_processes` has stored."""
_GVISOR_LACKS = (resource.RLIMIT_CORE, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_SIGPENDING)


def lower_limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Set a resource limit, never above the one inherited from the parent."""
    _, ceiling = resource.getrlimit(kind)
    limit = soft if hard is None else hard
    if ceiling != resource.RLIM_INFINITY:
        limit = min(limit, ceiling)
    resource.setrlimit(kind, (min(soft, limit), limit))


def note_num_processes(num_processes: int) -> None:
    """Store how many threads and processes this cell may have, for the fork server to count."""
    lower_limit(_RLIMIT_LOCKS, num_processes)


def limit_cell(*, is_container: bool) -> None:
    """Set the limits that are the same for all calls of a cell."""
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 1024),
        (resource.RLIMIT_STACK, 8 << 20),
    ):
        try:
            lower_limit(kind, value)
        except ValueError:
            # gVisor cannot set these, and has neither cores nor message queues to limit.
            if not is_container or kind not in _GVISOR_LACKS:
                raise
