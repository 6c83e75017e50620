"""Computes the probability of the known answer before each turn, for the advantage `igpo`.

    rollouts --groups--> with_answer_probs --groups--> trainer

The probabilities are written into the trajectories (`Turn.answer_prob`), so that a run can be
replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, starmap
from typing import NamedTuple

from areal_gym.errors import ConfigError
from areal_gym.trainer.base import Teacher
from areal_gym.trainer.batch.examples import TokenRow
from areal_gym.types import Group, Task, Trajectory


class KnownAnswer(NamedTuple):
    """The tokens of a task's known answer, as the policy would begin a turn with it."""

    lead_ids: Sequence[int]
    """Tokens before the answer that are not scored, such as those of "The answer is "."""
    token_ids: Sequence[int]


async def with_answer_probs(
    groups: Sequence[Group], scorer: Teacher, answer_of: Callable[[Task], KnownAnswer]
) -> list[Group]:
    """Return the groups with `Turn.answer_prob` set in all turns that the policy sampled.

    The probability is exp(mean_j log p(a_j | prompt of the turn, a_<j)), where the prompt is the
    engine's, token by token (Wang et al. 2025, 2510.14967, eq. 2). Each turn costs a pass over its
    prompt.

    Args:
        groups: the groups of a batch.
        scorer: returns the log-probabilities of the marked tokens of rows.
        answer_of: returns the known answer of a task.

    Raises:
        ConfigError: an answer is empty, or a prompt has images.
    """
    trajectories = [trajectory for group in groups for trajectory in group]
    rows, places = [], []
    for i, trajectory in enumerate(trajectories):
        answer = answer_of(trajectory.task)
        if not answer.token_ids:
            raise ConfigError(
                f"the known answer of the task {trajectory.task.id} has no tokens",
                hints=["trainer.advantage_kwargs.answer names a field of the task's data"],
            )
        for turn, prompt in _prompts_of(trajectory):
            lead = [*prompt, *answer.lead_ids]
            mask = [*(False,) * len(lead), *(True,) * len(answer.token_ids)]
            rows.append(TokenRow(token_ids=[*lead, *answer.token_ids], mask=mask, num_shared=0))
            places.append((i, turn))
    probs: dict[tuple[int, int], float] = {}
    for place, logprobs in zip(places, await scorer.score(rows), strict=True):
        probs[place] = math.exp(sum(logprobs) / len(logprobs))

    def with_probs(i: int, trajectory: Trajectory) -> Trajectory:
        turns = (replace(t, answer_prob=probs.get((i, k))) for k, t in enumerate(trajectory.turns))
        return replace(trajectory, turns=tuple(turns))

    scored = starmap(with_probs, enumerate(trajectories))
    return [replace(group, trajectories=tuple(islice(scored, len(group)))) for group in groups]


def _prompts_of(trajectory: Trajectory) -> Iterator[tuple[int, list[int]]]:
    """Yield each sampled turn's number, and its branch's tokens before the first sampled one."""
    for spans in trajectory.branches:
        before: list[int] = []
        seen: set[int] = set()
        for span in spans:
            if span.images:
                raise ConfigError(
                    "trainer.advantage=igpo scores texts only, and the prompts have pictures",
                    hints=["trainer.algorithm=grpo"],
                )
            if span.origin == "policy" and span.turn not in seen:
                seen.add(span.turn)
                yield span.turn, before.copy()
            before += span.token_ids
