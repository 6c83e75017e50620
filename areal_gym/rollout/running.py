"""A group that is being played: its members so far, and how often it began anew."""

from __future__ import annotations

import asyncio
from typing import Any

from areal_gym.types import Task, Trajectory


class RunningGroup:
    """One group between its start and its end; the runner keeps it up to date.

    Args:
        index: its number.
        task: that all members play.
        size: how many members there are.
    """

    __slots__ = (
        "index",
        "is_void",
        "members",
        "num_ended_before",
        "num_open",
        "num_replays",
        "round",
        "size",
        "task",
        "tasks",
    )

    def __init__(self, index: int, task: Task, size: int) -> None:
        self.index = index
        self.task = task
        self.size = size
        self.is_void = False
        """Whether none of its members may be trained on: a reward was no finite number."""
        self.num_open = size
        """Members that still play, or wait for a slot."""
        self.members: list[tuple[int, Trajectory]] = []
        """Members that came through, by number."""
        self.round = 0
        """How often it was played again, whole; results of earlier rounds do not count."""
        self.num_replays = 0
        """Of these, how often while others came through."""
        self.num_ended_before = 0
        """Episodes of the runner that had come through when this round began."""
        self.tasks: set[asyncio.Task[Any]] = set()
        """Members that play."""

    @property
    def id(self) -> str:
        """Its name in files."""
        return f"g{self.index:06d}"

    @property
    def has_begun(self) -> bool:
        """Whether any member plays or has ended."""
        return bool(self.tasks) or self.num_open < self.size

    def trajectory_id(self, member: int, attempt: int) -> str:
        """Names one attempt of a member; each has a name of its own."""
        replay = f"-replay{self.round}" if self.round else ""
        retry = f"-retry{attempt}" if attempt else ""
        return f"{self.id}-{member}{replay}{retry}"

    def add(self, task: asyncio.Task[Any]) -> None:
        """One of its members plays."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def begin_again(self) -> None:
        """Forget what came through, and end what plays."""
        self.round += 1
        self.is_void = False
        self.num_open = self.size
        self.members.clear()
        current = asyncio.current_task()
        for task in self.tasks:
            if task is not current:
                task.cancel()
        self.tasks = set()
