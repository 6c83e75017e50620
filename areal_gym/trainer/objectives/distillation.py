"""On-policy distillation: a teacher scores the tokens that the student sampled.

    rollouts --groups--> annotate (teacher) --groups--> trainer, with the advantage `distill`

The log-probabilities are written into the trajectories, so that a run can be replayed without its
teacher.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any, Protocol

import numpy as np
import torch

from areal_gym.errors import ConfigError, EngineError, TrainError
from areal_gym.models.policy_model import PolicyModel
from areal_gym.trainer.base import ReferenceTrainer, Teacher
from areal_gym.trainer.batch.examples import TokenRow, placed_micro_batches
from areal_gym.trainer.batch.sequences import Sequence as TokenSequence
from areal_gym.trainer.batch.sequences import make_sequences
from areal_gym.trainer.chunked_logprobs import score_tokens
from areal_gym.trainer.update import TrainerThread
from areal_gym.types import Group, TokenSpan, Trajectory
from areal_gym.utils.packed_numbers import Floats

_MAX_IN_FLIGHT = 64
_MAX_TRIES = 3


class Scorer(Protocol):
    """An engine that can score given tokens, such as `SGLangEngine`."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities of `token_ids[1:]`, each given those before, at temp. 1."""


class LocalTeacher:
    """A teacher model in this process, in its own thread with `num_threads` of torch's threads."""

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
        by_index: dict[int, list[float]] = {}
        examples = [(row,) for row in rows]
        for batch, indexes in placed_micro_batches(examples, self._budget, device):
            masks = [rows[i].mask for i in indexes]
            logprobs_T = score_tokens(self._model, batch, masks).logprobs
            parts = torch.split(logprobs_T, [sum(mask) for mask in masks])
            by_index.update(zip(indexes, (part.tolist() for part in parts), strict=True))
        return [by_index[i] for i in range(len(rows))]


class RemoteTeacher:
    """A teacher model on servers; a request that fails is repeated a few times."""

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


class PolicyTeacher:
    """The policy in training as its own teacher, with its current weights.

    It can teach only what a hint in its prompt adds (`annotate`).
    """

    def __init__(self, trainer: ReferenceTrainer) -> None:
        self._trainer = trainer

    async def score(self, rows: Sequence[TokenRow]) -> list[list[float]]:
        """Return the log-probabilities, at temperature 1, of the marked tokens of each row."""
        sequences = [
            TokenSequence(
                token_ids=row.token_ids,
                loss_mask=row.mask,
                old_logprobs=[0.0] * len(row.token_ids),
                versions=[0] * len(row.token_ids),
                num_prompt_tokens=row.num_shared,
            )
            for row in rows
        ]
        scores = await asyncio.to_thread(self._trainer.score_at, sequences, 1.0)
        return [score.tolist() for score in scores]


class TeacherMixture:
    """Several teachers as one: log sum_i w_i p_i(y_t), with weights that add up to 1 for each task.

    Each teacher comes with its weight and the environment whose tasks it teaches; None means all. A
    mixture of distributions is a distribution, so the advantage `distill` remains a divergence.
    """

    def __init__(self, teachers: Sequence[tuple[Teacher, float, str | None]]) -> None:
        self._teachers = teachers

    async def score_tasks(
        self, rows: Sequence[TokenRow], env_ids: Sequence[str]
    ) -> list[list[float]]:
        """Return the mixture's log-probabilities of each row's marked tokens.

        Raises:
            ConfigError: an environment has no teacher.
        """
        parts: list[list[tuple[float, np.ndarray[Any, Any]]]] = [[] for _ in rows]

        async def score_with(teacher: Teacher, weight: float, env: str | None) -> None:
            own = [i for i, env_id in enumerate(env_ids) if env in (None, env_id)]
            for i, score in zip(own, await teacher.score([rows[i] for i in own]), strict=True):
                parts[i].append((weight, np.asarray(score)))

        await asyncio.gather(*(score_with(*teacher) for teacher in self._teachers))
        for env_id, scores in zip(env_ids, parts, strict=True):
            if not scores:
                raise ConfigError(
                    f"no teacher teaches the tasks of {env_id!r}",
                    hints=["a teacher without env teaches all of them"],
                )
        return [_log_mixture(scores) for scores in parts]


def _log_mixture(scores: Sequence[tuple[float, np.ndarray[Any, Any]]]) -> list[float]:
    total = sum(weight for weight, _ in scores)
    logs = [math.log(weight / total) + score for weight, score in scores]
    mixed: list[float] = np.logaddexp.reduce(logs).tolist()
    return mixed


Prompts = Callable[[Trajectory], tuple[Sequence[int], Sequence[int]]]
"""Returns the token ids of a trajectory's first prompt, and of the same prompt with a hint."""


async def annotate(
    groups: Sequence[Group], teacher: Teacher | TeacherMixture, prompts: Prompts | None = None
) -> list[Group]:
    """Return the groups with the teacher's log-probabilities in the policy's spans.

    Args:
        groups: the groups of a batch.
        teacher: scores the policy's tokens.
        prompts: gives the teacher a privileged prompt: it scores the same tokens after a prompt
            with a hint (on-policy self-distillation; Shenfeld et al. 2026, SDFT). Branches with
            another first prompt, because the agent rewrote the history, are scored unchanged.

    Raises:
        ConfigError: the hint or the teachers do not fit the tasks.
        EngineError: a remote teacher did not answer.
        TrainError: the teacher returned values that are not log-probabilities.
    """
    trajectories = [trajectory for group in groups for trajectory in group]
    every_row = (row for i, t in enumerate(trajectories) for row in make_sequences(t, episode_id=i))
    sequences = [row for row in every_row if row.num_trainable]
    rows = [
        TokenRow(token_ids=row.token_ids, mask=row.loss_mask, num_shared=row.num_prompt_tokens)
        for row in sequences
    ]
    owners = [trajectories[row.episode_id] for row in sequences]
    if prompts is not None:
        plain = rows
        rows = [_with_hint(row, *prompts(t)) for row, t in zip(rows, owners, strict=True)]
        if plain and all(a is b for a, b in zip(plain, rows, strict=True)):
            raise ConfigError(
                "the teacher's hint fits no prompt of the batch: the agent writes other first "
                "messages than the episode records",
                hints=["self-distillation with teacher.hint is for agent.id=chat"],
            )
    answers = (
        await teacher.score_tasks(rows, [_env_of(trajectory) for trajectory in owners])
        if isinstance(teacher, TeacherMixture)
        else await teacher.score(rows)
    )
    scores = np.concatenate([np.zeros(0), *map(np.asarray, answers)])
    if not ((scores > -1e6) & (scores <= 1e-3)).all():
        raise TrainError(
            "the teacher's values for the policy's tokens are not log-probabilities",
            hints=["is its tokenizer the policy's?"],
        )
    num_scored = 0

    def with_teacher(span: TokenSpan) -> TokenSpan:
        if span.origin != "policy":
            return span
        nonlocal num_scored
        start, num_scored = num_scored, num_scored + len(span)
        return replace(span, teacher_logprobs=Floats.from_array(scores[start:num_scored]))

    def annotated(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, spans=tuple(map(with_teacher, trajectory.spans)))

    return [replace(g, trajectories=tuple(map(annotated, g))) for g in groups]


def _with_hint(row: TokenRow, prompt: Sequence[int], hinted: Sequence[int]) -> TokenRow:
    """Return the row with the hinted prompt, if it begins with the plain one."""
    size = len(prompt)
    if list(row.token_ids[:size]) != list(prompt) or any(row.mask[:size]):
        return row
    return TokenRow(
        token_ids=[*hinted, *row.token_ids[size:]],
        mask=[*(False,) * len(hinted), *row.mask[size:]],
        num_shared=len(hinted) if row.num_shared == size else 0,
    )


def _env_of(trajectory: Trajectory) -> str:
    """Return the id of the task's environment, which in a mix is one of several."""
    return str(trajectory.task.data.get("env", trajectory.env_id))
