"""Episodes that wait for a program outside: one offers, the other claims."""

from __future__ import annotations

from areal_gym.gateway.error_replies import ApiError
from areal_gym.gateway.session import Session

_MAX_NAMED = 4096


class SessionQueue:
    """Brings sessions of one task into one group.

    A run compares the siblings of a group with each other. Who opens sessions names the task that
    they try (any text), so that sessions with the same name become siblings. Those without a name
    share groups in the order in which they come.
    """

    def __init__(self) -> None:
        self._offers: list[Session] = []
        self._tasks: dict[str, str | None] = {}
        """What the members of a group try, once one was claimed."""

    def __len__(self) -> int:
        return len(self._offers)

    def offer(self, session: Session) -> None:
        """It may be claimed."""
        self._offers.append(session)

    def withdraw(self, session: Session) -> None:
        """It may not, or was."""
        if session in self._offers:
            self._offers.remove(session)

    def claim(self, task: str | None) -> Session:
        """A session of a group that tries this task, or of one that has not begun.

        Raises:
            ApiError: there is none now.
        """
        found = None
        for session in self._offers:
            if session.group_id not in self._tasks:
                found = found or session
            elif self._tasks[session.group_id] == task:
                found = session
                break
        if found is None:
            raise ApiError(
                429,
                "no episode is free: all are being played, or training has to catch up first",
                retry_after_s=1,
            )
        self._offers.remove(found)
        self._tasks[found.group_id] = task
        if len(self._tasks) > _MAX_NAMED:
            del self._tasks[next(iter(self._tasks))]
        found.claim()
        return found
