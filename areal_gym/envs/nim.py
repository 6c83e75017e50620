"""`nim`: two roles take stones in turn, and the last stone wins; best play is known exactly."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from areal_gym.envs.base import Response, TextEnv
from areal_gym.errors import UsageError
from areal_gym.tasks.base import TaskSource, asked_for
from areal_gym.types import Message, Task, text_of


def best_move(stones: int, most_taken: int) -> int:
    """Return how many stones to take to win, 0 if best play loses (Bouton 1901).

    Who leaves a multiple of `most_taken` + 1 wins: the other one can never leave such a number.
    """
    return stones % (most_taken + 1)


class PileTasks(TaskSource):
    """One task per size of the pile: each third size is held out."""

    def __init__(self, most_stones: int) -> None:
        sizes = range(2, most_stones + 1)
        self._sizes = {
            "train": [size for size in sizes if size % 3],
            "test": [size for size in sizes if size % 3 == 0],
        }

    def num_tasks(self, split: str) -> int:
        """Return the number of sizes."""
        return len(self._sizes[asked_for({"split": split})[0]])

    def draw(self, rng: np.random.Generator, split: str) -> Task:
        """Return a random task."""
        return self.at(int(rng.integers(self.num_tasks(split))), split)

    def at(self, index: int, split: str) -> Task:
        """Return the task with the index-th size; raise UsageError beyond the last."""
        if index >= self.num_tasks(split):
            raise UsageError(f"index {index} of split {split!r}: it has {self.num_tasks(split)}")
        stones = self._sizes[split][index]
        return Task(id=f"pile/{stones}", data={"stones": stones}, split=split)


class NimEnv(TextEnv):
    """Two roles take stones from a pile in turn; who takes the last one wins.

    Task: "7 stones are left. Take 1, 2 or 3."; piles have 2 to `most_stones` stones.
    Tools: none.
    Observation: each role reads how many stones are left when it is its turn.
    Action: an assistant message whose first number says how many stones are taken.
    Reward: 1 for the role that wins, 0 for the other. A message without a legal number loses.
    Episode end: terminated by the last stone, or by an illegal move.
    Splits: `test` has the piles that 3 divides, `train` the others; games from larger piles pass
        through all sizes.
    Metrics: `mistakes`, moves that gave a won position away; `illegal`, illegal moves.
    Data: generated. History: v0.

    Roles: `first` and `second`. With best play `first` wins unless the pile is a multiple of
    `most_taken` + 1 (`best_move`), so that a trained policy can be compared with the solution.

    Args:
        most_stones: the largest pile, 3 to 99.
        most_taken: how many stones a role may take at once, 2 to 9.
    """

    roles = ("first", "second")

    def __init__(
        self, *, most_stones: int = 12, most_taken: int = 3, render_mode: str | None = None
    ) -> None:
        for name, value, least, most in (
            ("most_stones", most_stones, 3, 99),
            ("most_taken", most_taken, 2, 9),
        ):
            if not least <= value <= most:
                raise UsageError(f"{name} = {value!r}: it is {least} to {most}")
        super().__init__(tasks=PileTasks(most_stones), render_mode=render_mode)
        self.most_taken = most_taken
        self.max_turns = most_stones
        self.stones = 0
        """Stones that are left."""

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Return the question to the first role."""
        self.stones = task.data["stones"]
        return [self._question()]

    async def respond(self, message: Message) -> Response:
        """Take the stones; the other role goes on, unless the game is over."""
        before = self.stones
        digits = re.search(r"\d+", text_of(message["content"])[:200])
        taken = int(digits[0][:9]) if digits else 0
        other = self.roles[1 - self.roles.index(self.role or "")]
        if not 1 <= taken <= min(before, self.most_taken):
            has_other_moved = self.num_turns > 1
            return Response(
                role_rewards={other: 1.0} if has_other_moved else {},
                is_terminated=True,
                metrics={"illegal": 1, "mistakes": float(best_move(before, self.most_taken) > 0)},
                state_key=str(before),
            )
        self.stones -= taken
        gave_away = best_move(before, self.most_taken) not in (0, taken)
        return Response(
            messages=[self._question()] if self.stones else [],
            reward=0.0 if self.stones else 1.0,
            role=other if self.stones else None,
            is_terminated=not self.stones,
            metrics={"illegal": 0, "mistakes": float(gave_away)},
            state_key=str(before),
        )

    def gold_action(self) -> str:
        """Return the best move; where all moves lose, take one stone."""
        return self.move(best_move(self.stones, self.most_taken) or 1)

    def move(self, taken: int) -> str:
        """Return the message that takes so many stones."""
        return f"{taken} stone{'' if taken == 1 else 's'}"

    def _question(self) -> Message:
        *others, last = map(str, range(1, self.most_taken + 1))
        text = f"{self.stones} stones are left. Take {', '.join(others)} or {last}."
        return {"role": "user", "content": text}
