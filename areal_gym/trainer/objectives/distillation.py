"""On-policy distillation: a teacher gives its log-probabilities for what the student has sampled.

    rollouts --groups--> annotate (teacher) --groups--> trainer, with the advantage `distill`

They are written into the trajectories, so that a record holds all that training took in: a run is
replayed without its teacher.
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


class PolicyTeacher:
    """The policy in training as a teacher: it scores with the weights that it has now.

    By itself it would teach nothing; what it knows more is in a hint (`annotate`).
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
    """Several teachers: log sum_i w_i p_i(y_t), the weights of a task's teachers adding up to 1.

    Each teacher comes with its weight and the environment whose tasks it teaches, None for all. A
    mixture of distributions is one, so that the advantage `distill` stays a divergence from it.
    """

    def __init__(self, teachers: Sequence[tuple[Teacher, float, str | None]]) -> None:
        self._teachers = teachers

    async def score_tasks(
        self, rows: Sequence[TokenRow], env_ids: Sequence[str]
    ) -> list[list[float]]:
        """Return the mixture's log-probabilities of the marked tokens of each row.

        Raises:
            ConfigError: an environment has no teacher.
        """
        parts: list[list[tuple[float, np.ndarray[Any, Any]]]] = [[] for _ in rows]

        async def ask(teacher: Teacher, weight: float, env: str | None) -> None:
            mine = [i for i, env_id in enumerate(env_ids) if env in (None, env_id)]
            for i, score in zip(mine, await teacher.score([rows[i] for i in mine]), strict=True):
                parts[i].append((weight, np.asarray(score)))

        await asyncio.gather(*(ask(*one) for one in self._teachers))
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
"""Returns the tokens of a trajectory's first prompt, and those of the prompt with a hint."""


async def annotate(
    groups: Sequence[Group], teacher: Teacher | TeacherMixture, prompts: Prompts | None = None
) -> list[Group]:
    """Return the groups with the teacher's log-probabilities in the policy's spans.

    `prompts` gives the teacher a privileged prompt: it scores the same tokens after a prompt that
    has a hint (on-policy self-distillation; Shenfeld et al. 2026, SDFT). Branches whose first
    prompt is another one, because the agent has rewritten the history, are scored as they are.

    Raises:
        ConfigError: the hint or the teachers do not fit the tasks.
        EngineError: a remote teacher could not be asked.
        TrainError: it gave numbers that are no log-probabilities.
    """
    played = [trajectory for group in groups for trajectory in group]
    made = (row for i, t in enumerate(played) for row in make_sequences(t, episode_id=i))
    sequences = [row for row in made if row.num_trainable]
    rows = [
        TokenRow(token_ids=row.token_ids, mask=row.loss_mask, num_shared=row.num_prompt_tokens)
        for row in sequences
    ]
    owners = [played[row.episode_id] for row in sequences]
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
    """Return the environment that the task is of, which in a mix is one of several."""
    return str(trajectory.task.data.get("env", trajectory.env_id))
