"""On-policy distillation: a teacher gives its log-probabilities for what the student has sampled.

    rollouts --groups--> annotate (teacher) --groups--> trainer, with the advantage `distill`

They are written into the trajectories, so that a record holds all that training took in: a run is
replayed without its teacher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import Protocol

import numpy as np
import torch

from areal_gym.errors import EngineError, TrainError
from areal_gym.models.policy_model import PolicyModel
from areal_gym.trainer.base import Teacher
from areal_gym.trainer.batch.examples import TokenRow, placed_micro_batches
from areal_gym.trainer.batch.sequences import sequences_of
from areal_gym.trainer.chunked_logprobs import score_tokens
from areal_gym.trainer.update import TrainerThread
from areal_gym.types import Group, TokenSpan, Trajectory
from areal_gym.utils.packed_numbers import Floats

_MAX_IN_FLIGHT = 64
_MAX_TRIES = 3


class Scorer(Protocol):
    """The engines that can score, such as `SGLangEngine`."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return log-probabilities of `token_ids[1:]`, given those before, at temperature 1."""


class LocalTeacher:
    """A model in this process, in a thread of its own; `num_threads` are torch's."""

    def __init__(
        self, model: PolicyModel, *, tokens_per_microbatch: int = 4096, num_threads: int = 1
    ) -> None:
        self._model = model.requires_grad_(False)
        self._budget = tokens_per_microbatch
        self._thread = TrainerThread(num_threads, "teacher")

    async def score(self, rows: Sequence[TokenRow]) -> list[list[float]]:
        """Return the log-probabilities, at temperature 1, of the marked tokens of each row."""
        return await self._thread.call(self._score, rows)

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    @torch.no_grad()
    def _score(self, rows: Sequence[TokenRow]) -> list[list[float]]:
        device = next(self._model.parameters()).device
        by_place: dict[int, list[float]] = {}
        examples = [(row,) for row in rows]
        for batch, places in placed_micro_batches(examples, self._budget, device):
            masks = [rows[place].mask for place in places]
            logprobs_T = score_tokens(self._model, batch, masks).logprobs
            parts = torch.split(logprobs_T, [sum(mask) for mask in masks])
            by_place.update(zip(places, (part.tolist() for part in parts), strict=True))
        return [by_place[place] for place in range(len(rows))]


class RemoteTeacher:
    """An engine that scores. A request that fails is sent again, a few times."""

    def __init__(self, engine: Scorer) -> None:
        self._engine = engine
        self._slots = asyncio.Semaphore(_MAX_IN_FLIGHT)

    async def score(self, rows: Sequence[TokenRow]) -> list[list[float]]:
        """Return the log-probabilities, at temperature 1, of the marked tokens of each row.

        Raises:
            EngineError: no server answered.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._score(row)) for row in rows]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _score(self, row: TokenRow) -> list[float]:
        async with self._slots:
            for tries in range(1, _MAX_TRIES + 1):
                try:
                    scores = await self._engine.score(row.token_ids)
                    break
                except EngineError:
                    if tries == _MAX_TRIES:
                        raise
                    await asyncio.sleep(0.25 * 2**tries)
        return list(compress(scores, row.mask[1:]))


async def annotate(groups: Sequence[Group], teacher: Teacher) -> list[Group]:
    """Return the groups with the teacher's log-probabilities in the policy's spans.

    Raises:
        EngineError: a remote teacher could not be asked.
        TrainError: it gave numbers that are no log-probabilities.
    """
    rows = [
        TokenRow(token_ids=row.token_ids, mask=row.loss_mask, num_shared=row.num_prompt_tokens)
        for row in sequences_of(groups)
        if row.num_trainable
    ]
    scores = np.concatenate([np.zeros(0), *map(np.asarray, await teacher.score(rows))])
    if not ((scores > -1e6) & (scores <= 1e-3)).all():
        raise TrainError(
            "the teacher gives log-probabilities that are none, of tokens that the policy samples",
            hints=["is its tokenizer the policy's?"],
        )
    num_given = 0

    def with_teacher(span: TokenSpan) -> TokenSpan:
        if span.origin != "policy":
            return span
        nonlocal num_given
        start, num_given = num_given, num_given + len(span)
        return replace(span, teacher_logprobs=Floats.from_array(scores[start:num_given]))

    def annotated(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, spans=tuple(map(with_teacher, trajectory.spans)))

    return [replace(g, trajectories=tuple(map(annotated, g))) for g in groups]
