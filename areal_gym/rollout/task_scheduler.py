"""Decides which group starts next: its number, and the options to draw its task with."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from areal_gym.recording import derive_seed
from areal_gym.rollout.curriculum import Curriculum

_CURRICULUM = 2
"""A stream of seeds; streams 0 and 1 belong to the runner."""


class TaskScheduler:
    """Numbers groups in order; unfinished groups of an interrupted run come first.

    A curriculum observes groups in the order of their start, whatever the order in which they
    finish. In a synchronous run, it chooses group i from the results of exactly the groups up to
    `i - lookback`, and waits for them if needed: at most `lookback` groups are running, so they
    have finished or soon will. Asynchronous runs do not wait.

    Args:
        seed: seeds the curriculum's choices.
        curriculum: chooses options; it is prepared already.
        lookback: see above; None does not wait.
        first: the number of the first group of a run without a `state`.
        state: what `state()` of an interrupted run returned.
    """

    def __init__(
        self,
        seed: int,
        curriculum: Curriculum | None,
        *,
        lookback: int | None,
        first: int,
        state: Mapping[str, Any],
    ) -> None:
        self._seed = seed
        self._curriculum = curriculum
        self._lookback = lookback
        self._next: int = state.get("next_group", first)
        self._again: deque[int] = deque(state.get("unfinished", ()))
        self._options: dict[int, Mapping[str, Any]] = {}
        self._num_observed: int = self._next
        self._to_observe: dict[int, tuple[Mapping[str, Any], Sequence[float] | None]] = {}
        learned = state.get("curriculum")
        if curriculum is not None and learned is not None:
            curriculum.restore(learned["state"])
            self._num_observed = learned["num_observed"]
            self._options = dict(learned["options"])
            self._to_observe = {
                index: (options, rewards_G) for index, options, rewards_G in learned["to_observe"]
            }

    def next(self) -> tuple[int, Mapping[str, Any]] | None:
        """Return the next group's number and options; None if another must finish first."""
        index = self._again[0] if self._again else self._next
        options = self._options_of(index)
        if options is None:
            return None
        if self._again:
            self._again.popleft()
        else:
            self._next += 1
        return index, options

    def finished(self, index: int, rewards_G: Sequence[float] | None) -> None:
        """Record the rewards of a finished group; None for a group that failed."""
        if self._curriculum is None:
            return
        if index >= self._num_observed:
            self._to_observe.setdefault(index, (self._options.get(index, {}), rewards_G))
        if self._lookback is None:
            self._observe_up_to(self._next)

    def options_of(self, index: int) -> Mapping[str, Any]:
        """Return the options to draw the task of a started group with."""
        return self._options.get(index, {})

    def forget(self, index: int) -> None:
        """Forget a group that was trained on or dropped, which will never start again."""
        self._options.pop(index, None)

    def unsettled(self, end: int) -> list[int]:
        """Return the groups below `end` that are not settled in the state, ascending."""
        return sorted({*self._again, *range(self._next, end)})

    def resume(
        self, options: Mapping[int, Mapping[str, Any]], again: Sequence[int], end: int
    ) -> None:
        """Continue after the groups of a journal.

        Args:
            options: the options of groups that had started.
            again: groups to start once more.
            end: the first number that was not used.
        """
        self._next = max(self._next, end)
        self._again = deque(again)
        if self._curriculum is not None:
            self._options.update(options)

    def state(self, unfinished: Iterable[int]) -> dict[str, Any]:
        """Return the state as JSON values. `unfinished` are started groups that are not settled."""
        waiting = sorted({*unfinished, *self._again})
        state: dict[str, Any] = {"next_group": self._next, "unfinished": waiting}
        if self._curriculum is not None:
            state["curriculum"] = {
                "state": self._curriculum.state(),
                "num_observed": self._num_observed,
                "to_observe": [[i, *self._to_observe[i]] for i in sorted(self._to_observe)],
                "options": [[i, self._options[i]] for i in waiting if i in self._options],
            }
        return state

    def _options_of(self, index: int) -> Mapping[str, Any] | None:
        if self._curriculum is None:
            return {}
        if index not in self._options:
            if self._lookback is not None:
                num_needed = index - self._lookback + 1
                self._observe_up_to(num_needed)
                if self._num_observed < num_needed:
                    return None
            rng = random.Random(derive_seed(self._seed, _CURRICULUM, index))
            self._options[index] = self._curriculum.choose(rng)
        return self._options[index]

    def _observe_up_to(self, end: int) -> None:
        while self._num_observed < end and self._num_observed in self._to_observe:
            options, rewards_G = self._to_observe.pop(self._num_observed)
            if rewards_G is not None and self._curriculum is not None:
                self._curriculum.observe(options, rewards_G)
            self._num_observed += 1
