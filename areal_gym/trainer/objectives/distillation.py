"""On-policy distillation: a teacher gives its log-probabilities for what the student has sampled.

    rollouts --groups--> annotate (teacher) --groups--> trainer, with the advantage `distill`

They are written into the trajectories, so that a record holds all that training took in: a run is
replayed without its teacher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import torch

from areal_gym.errors import EngineError, TrainError
from areal_gym.models.tiny.decoder import Decoder
from areal_gym.trainer.base import Teacher
from areal_gym.trainer.batch.examples import TokenRow, placed_micro_batches
from areal_gym.trainer.batch.sequences import make_sequences
from areal_gym.trainer.chunked_logprobs import score_tokens
from areal_gym.types import Group, TokenSpan, Trajectory

_MAX_IN_FLIGHT = 64
_MAX_TRIES = 3


class Scorer(Protocol):
    """The engines that can score, such as `SGLangEngine`."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of `token_ids[1:]`, each given those before it, at temperature 1."""
        ...


class LocalTeacher:
    """A decoder in this process, in a thread of its own.

    Args:
        decoder: the teacher.
        tokens_per_microbatch: how many tokens it looks at at once.
        num_threads: of torch.
    """

    def __init__(
        self, decoder: Decoder, *, tokens_per_microbatch: int = 4096, num_threads: int = 1
    ) -> None:
        self._decoder = decoder.requires_grad_(False)
        self._budget = tokens_per_microbatch
        self._thread = ThreadPoolExecutor(
            1,
            thread_name_prefix="areal-gym-teacher",
            initializer=torch.set_num_threads,
            initargs=(num_threads,),
        )

    async def score(self, rows: Sequence[TokenRow]) -> list[list[float]]:
        """See `Teacher.score`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._score, rows)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    @torch.no_grad()
    def _score(self, rows: Sequence[TokenRow]) -> list[list[float]]:
        device = next(self._decoder.parameters()).device
        found: dict[int, list[float]] = {}
        examples = [(row,) for row in rows]
        for batch, places in placed_micro_batches(examples, self._budget, device):
            masks = [rows[place].mask for place in places]
            logprobs_T = score_tokens(self._decoder, batch, masks).logprobs
            lengths = [sum(mask) for mask in masks]
            parts = [values.tolist() for values in torch.split(logprobs_T, lengths)]
            found.update(zip(places, parts, strict=True))
        return [found[place] for place in range(len(rows))]


class RemoteTeacher:
    """An engine that scores. A request that fails is sent again, a few times."""

    def __init__(self, engine: Scorer) -> None:
        self._engine = engine
        self._slots = asyncio.Semaphore(_MAX_IN_FLIGHT)

    async def score(self, rows: Sequence[TokenRow]) -> list[list[float]]:
        """See `Teacher.score`.

        Raises:
            EngineError: no server could say.
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
        return [scores[t - 1] for t, is_marked in enumerate(row.mask) if is_marked]


async def annotate(groups: Sequence[Group], teacher: Teacher) -> list[Group]:
    """The groups, with the teacher's log-probabilities in the policy's spans.

    Raises:
        EngineError: a remote teacher could not be asked.
        TrainError: it gave numbers that are none: it cannot be the policy's like.
    """
    rows: list[TokenRow] = []
    for group in groups:
        for trajectory in group:
            rows += [
                TokenRow(
                    token_ids=row.token_ids,
                    mask=row.loss_mask,
                    num_shared=row.num_prompt_tokens,
                )
                for row in make_sequences(trajectory)
                if row.num_trainable
            ]
    scores = [value for values in await teacher.score(rows) for value in values]
    if not all(-1e6 < value <= 1e-3 for value in scores):
        raise TrainError(
            "the teacher gives log-probabilities that are none, of tokens that the policy samples",
            hints=["is its tokenizer the policy's?"],
        )
    given = iter(scores)

    def taught(span: TokenSpan) -> TokenSpan:
        if span.origin != "policy":
            return span
        return replace(span, teacher_logprobs=tuple(next(given) for _ in span.token_ids))

    def taught_all(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, spans=tuple(taught(span) for span in trajectory.spans))

    return [replace(g, trajectories=tuple(taught_all(t) for t in g)) for g in groups]
