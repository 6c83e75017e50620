"""On-policy distillation: a teacher scores the tokens that the student sampled.

    rollouts --groups--> annotate (teacher) --groups--> trainer, with the advantage `distill`, or
                                                        with `TeacherDivergence` of the top tokens

The teacher's numbers are written into the trajectories, so that a run can be replayed without its
teacher.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from areal_gym.errors import ConfigError, TrainError
from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.policy_model import PolicyModel
from areal_gym.trainer.base import ReferenceTrainer, Teacher, TopScoringTrainer, TopTeacher
from areal_gym.trainer.batch.examples import TokenRow, placed_micro_batches
from areal_gym.trainer.batch.sequences import Sequence as TokenSequence
from areal_gym.trainer.batch.sequences import make_sequences
from areal_gym.trainer.chunked_logprobs import score_tokens, top_tokens
from areal_gym.trainer.teacher_divergence import IMPOSSIBLE
from areal_gym.trainer.update import TrainerThread
from areal_gym.types import Group, TokenSpan, TopTokens, Trajectory
from areal_gym.utils.packed_numbers import Floats

_T = TypeVar("_T")


class LocalTeacher:
    """A teacher model in this process, in its own thread with `num_threads` of torch's threads.

    `vocab_size` is the policy's. Where the teacher pads the same vocabulary to another size, its
    distributions are over the tokens that both have.
    """

    def __init__(
        self,
        model: PolicyModel,
        *,
        tokens_per_microbatch: int = 4096,
        num_threads: int = 1,
        vocab_size: int | None = None,
    ) -> None:
        self._model = model.requires_grad_(False)
        own_size = model.shape.vocab_size
        self._vocab_size = None if vocab_size in (None, own_size) else min(vocab_size, own_size)
        self._budget = tokens_per_microbatch
        self._thread = TrainerThread(num_threads, "teacher")

    async def score(self, rows: Sequence[TokenRow]) -> list[list[float]]:
        """Return the log-probabilities, at temperature 1, of the marked tokens of each row."""

        def score_batch(batch: PackedBatch, masks: list[Sequence[bool]]) -> list[list[float]]:
            scores = score_tokens(self._model, batch, masks, vocab_size=self._vocab_size)
            logprobs_T = scores.logprobs
            return [part.tolist() for part in torch.split(logprobs_T, list(map(sum, masks)))]

        return await self._thread.call(self._by_row, rows, score_batch)

    async def score_top(self, rows: Sequence[TokenRow], top_k: int) -> list[TopTokens]:
        """Return the `top_k` likeliest tokens at each row's marked tokens; see `TopTeacher`."""

        def score_batch(batch: PackedBatch, masks: list[Sequence[bool]]) -> list[TopTokens]:
            lengths = list(map(sum, masks))
            columns = top_tokens(self._model, batch, masks, top_k, vocab_size=self._vocab_size)
            ids, logprobs = (column.cpu().split(lengths) for column in columns)
            pairs = zip(ids, logprobs, strict=True)
            return [TopTokens.from_arrays(i.numpy(), p.numpy()) for i, p in pairs]

        return await self._thread.call(self._by_row, rows, score_batch)

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    @torch.no_grad()
    def _by_row(
        self,
        rows: Sequence[TokenRow],
        score_batch: Callable[[PackedBatch, list[Sequence[bool]]], list[_T]],
    ) -> list[_T]:
        """Return what `score_batch` computes of each row, micro-batch by micro-batch."""
        device = next(self._model.parameters()).device
        by_index: dict[int, _T] = {}
        examples = [(row,) for row in rows]
        for batch, indexes in placed_micro_batches(examples, self._budget, device):
            scores = score_batch(batch, [rows[i].mask for i in indexes])
            by_index.update(zip(indexes, scores, strict=True))
        return [by_index[i] for i in range(len(rows))]


class PolicyTeacher:
    """The policy in training as its own teacher, with its current weights.

    It can teach only what a hint in its prompt adds (`annotate`).
    """

    def __init__(self, trainer: ReferenceTrainer) -> None:
        self._trainer = trainer

    async def score(self, rows: Sequence[TokenRow]) -> list[list[float]]:
        """Return the log-probabilities, at temperature 1, of the marked tokens of each row."""
        sequences = list(map(_sequence_of, rows))
        scores = await asyncio.to_thread(self._trainer.score_at, sequences, 1.0)
        return [score.tolist() for score in scores]

    async def score_top(self, rows: Sequence[TokenRow], top_k: int) -> list[TopTokens]:
        """Return the `top_k` likeliest tokens at each row's marked tokens; see `TopTeacher`."""
        trainer = self._trainer
        assert isinstance(trainer, TopScoringTrainer)  # `open_teacher` checks it
        return await asyncio.to_thread(trainer.score_top, list(map(_sequence_of, rows)), top_k)


def _sequence_of(row: TokenRow) -> TokenSequence:
    return TokenSequence(
        token_ids=row.token_ids,
        loss_mask=row.mask,
        old_logprobs=[0.0] * len(row.token_ids),
        versions=[0] * len(row.token_ids),
        num_prompt_tokens=row.num_shared,
    )


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
        every_part = await self._parts(rows, env_ids, lambda teacher, own: teacher.score(own))
        return [_log_mixture([(w, np.asarray(score)) for w, score in p]) for p in every_part]

    async def score_top_tasks(
        self, rows: Sequence[TokenRow], env_ids: Sequence[str], top_k: int
    ) -> list[TopTokens]:
        """Return the mixture's likeliest tokens at each row's marked tokens.

        Where a teacher does not list a token, its share of that token counts as 0: it is a part of
        what the teacher leaves to all other tokens.

        Raises:
            ConfigError: an environment has no teacher.
        """

        async def score(teacher: Teacher, own: list[TokenRow]) -> list[TopTokens]:
            assert isinstance(teacher, TopTeacher)
            return await teacher.score_top(own, top_k)

        return [_top_mixture(parts) for parts in await self._parts(rows, env_ids, score)]

    async def _parts(
        self,
        rows: Sequence[TokenRow],
        env_ids: Sequence[str],
        score: Callable[[Teacher, list[TokenRow]], Awaitable[list[_T]]],
    ) -> list[list[tuple[float, _T]]]:
        """Return the weights and scores of each row's teachers."""
        parts: list[list[tuple[float, _T]]] = [[] for _ in rows]

        async def score_with(teacher: Teacher, weight: float, env: str | None) -> None:
            own = [i for i, env_id in enumerate(env_ids) if env in (None, env_id)]
            for i, scores in zip(own, await score(teacher, [rows[i] for i in own]), strict=True):
                parts[i].append((weight, scores))

        await asyncio.gather(*(score_with(*teacher) for teacher in self._teachers))
        for env_id, scores in zip(env_ids, parts, strict=True):
            if not scores:
                raise ConfigError(
                    f"no teacher teaches the tasks of {env_id!r}",
                    hints=["a teacher without env teaches all of them"],
                )
        return parts


def _log_mixture(scores: Sequence[tuple[float, np.ndarray[Any, Any]]]) -> list[float]:
    total = sum(weight for weight, _ in scores)
    logs = [math.log(weight / total) + score for weight, score in scores]
    mixed: list[float] = np.logaddexp.reduce(logs).tolist()
    return mixed


def _top_mixture(parts: Sequence[tuple[float, TopTokens]]) -> TopTokens:
    """Return the likeliest tokens of the mixture, as many as a teacher lists."""
    if len(parts) == 1:
        return parts[0][1]
    total = sum(weight for weight, _ in parts)
    arrays = [(weight / total, *top.arrays()) for weight, top in parts]
    ids_TM = np.concatenate([ids for _, ids, _ in arrays], axis=1)
    probs_TM = np.concatenate([weight * np.exp(p.astype("f8")) for weight, _, p in arrays], axis=1)
    order_TM = ids_TM.argsort(axis=1)
    ids_TM = np.take_along_axis(ids_TM, order_TM, axis=1)
    probs_TM = np.take_along_axis(probs_TM, order_TM, axis=1)
    is_new_TM = np.diff(ids_TM, axis=1, prepend=-1) != 0
    sums_TM = np.zeros_like(probs_TM)  # each token's sum is where it is listed first
    first_TM = np.maximum.accumulate(np.where(is_new_TM, np.arange(ids_TM.shape[1]), 0), axis=1)
    np.add.at(sums_TM, (np.arange(len(ids_TM))[:, None], first_TM), probs_TM)
    best_TK = (-sums_TM).argsort(axis=1, kind="stable")[:, : parts[0][1].top_k]
    with np.errstate(divide="ignore"):
        logprobs_TK = np.log(np.take_along_axis(sums_TM, best_TK, axis=1))
    return TopTokens.from_arrays(np.take_along_axis(ids_TM, best_TK, axis=1), logprobs_TK)


Prompts = Callable[[Trajectory], tuple[Sequence[int], Sequence[int]]]
"""Returns the token ids of a trajectory's first prompt, and of the same prompt with a hint."""


async def annotate(
    groups: Sequence[Group],
    teacher: Teacher | TeacherMixture,
    prompts: Prompts | None = None,
    *,
    top_k: int | None = None,
) -> list[Group]:
    """Return the groups with the teacher's numbers in the policy's spans.

    Args:
        groups: the groups of a batch.
        teacher: scores the policy's tokens.
        prompts: gives the teacher a privileged prompt: it scores the same tokens after a prompt
            with a hint (on-policy self-distillation; Shenfeld et al. 2026, SDFT). Branches with
            another first prompt, because the agent rewrote the history, are scored unchanged.
        top_k: record this many of the teacher's likeliest tokens (`TokenSpan.teacher_top`), of
            which a divergence is computed; None records the log-probabilities of the sampled ones.

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
    env_ids = [_env_of(trajectory) for trajectory in owners]
    if top_k is None:
        answers = (
            await teacher.score_tasks(rows, env_ids)
            if isinstance(teacher, TeacherMixture)
            else await teacher.score(rows)
        )
        scores = _checked(np.concatenate([np.zeros(0), *map(np.asarray, answers)]))
        return _with_records(groups, "teacher_logprobs", lambda own: Floats.from_array(scores[own]))
    if isinstance(teacher, TeacherMixture):
        tops = await teacher.score_top_tasks(rows, env_ids, top_k)
    else:
        assert isinstance(teacher, TopTeacher)
        tops = await teacher.score_top(rows, top_k)
    top = TopTokens.joined(map(_checked_top, tops))
    return _with_records(groups, "teacher_top", lambda own: top and top[own])


def _checked(scores: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if not ((scores > -1e6) & (scores <= 1e-3)).all():
        raise TrainError(
            "the teacher's values for the policy's tokens are not log-probabilities",
            hints=["is its tokenizer the policy's?"],
        )
    return scores


def _checked_top(top: TopTokens) -> TopTokens:
    """Require log-probabilities of one distribution; tokens that cannot be get a finite one."""
    ids_TK, logprobs_TK = top.arrays()
    logprobs_TK = _checked(np.where(np.isneginf(logprobs_TK), IMPOSSIBLE, logprobs_TK))
    if (np.exp(logprobs_TK.astype("f8")).sum(axis=1) > 1 + 1e-2).any():
        raise TrainError(
            "the probabilities of a teacher's likeliest tokens add up to more than 1",
            hints=["a token that it lists twice is counted twice"],
        )
    return TopTokens.from_arrays(ids_TK, logprobs_TK)


def _with_records(
    groups: Sequence[Group], name: str, record_of: Callable[[slice], object]
) -> list[Group]:
    """Return the groups with `record_of` each span's place among the policy's tokens."""
    num_recorded = 0

    def with_record(span: TokenSpan) -> TokenSpan:
        if span.origin != "policy":
            return span
        nonlocal num_recorded
        start, num_recorded = num_recorded, num_recorded + len(span)
        record: dict[str, Any] = {name: record_of(slice(start, num_recorded))}
        return replace(span, **record)

    def annotated(trajectory: Trajectory) -> Trajectory:
        return replace(trajectory, spans=tuple(map(with_record, trajectory.spans)))

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
