"""Episodes that wait for an external program: the agent offers them, programs claim them."""

from __future__ import annotations

from areal_gym.gateway.error_replies import ApiError
from areal_gym.gateway.session import Session

_MAX_NAMED = 4096


class SessionQueue:
    """Brings sessions of one task into one group.

    A run compares the siblings of a group with each other. A program that opens sessions names the
    task that they try (any text); sessions with the same name become siblings. Those without a name
    share groups in the order in which they are opened.
    """

    def __init__(self) -> None:
        self._offers: list[Session] = []
        self._tasks: dict[str, str | None] = {}
        """The task of each group of which a session was claimed."""

    def __len__(self) -> int:
        return len(self._offers)

    def offer(self, session: Session) -> None:
        """Let programs claim a session."""
        self._offers.append(session)

    def withdraw(self, session: Session) -> None:
        """Remove a session, unless it was claimed."""
        if session in self._offers:
            self._offers.remove(session)

    def claim(self, task: str | None) -> Session:
        """Claim a session of a group that tries this task, or of a group that has not begun.

        Raises:
            ApiError: there is none now.
        """
        claimed = None
        for session in self._offers:
            if session.group_id not in self._tasks:
                claimed = claimed or session
            elif self._tasks[session.group_id] == task:
                claimed = session
                break
        if claimed is None:
            raise ApiError(
                429,
                "no episode is free: all are being played, or training has to catch up first",
                retry_after_s=1,
            )
        self._offers.remove(claimed)
        self._tasks[claimed.group_id] = task
        if len(self._tasks) > _MAX_NAMED:
            del self._tasks[next(iter(self._tasks))]
        claimed.claim()
        return claimed
