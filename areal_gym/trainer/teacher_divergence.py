"""Divergences from a teacher's distributions, instead of the sampled token's log-ratio."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from areal_gym.errors import TrainError
from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.policy_model import PolicyModel
from areal_gym.trainer.batch.sequences import Sequence as TokenSequence
from areal_gym.trainer.chunked_logprobs import chunk_tokens, places_before, with_known_ids

Direction = Literal["forward", "reverse"]
_LEAST_REST = 1e-5
"""The least probability of all other tokens by which is divided: float32 log-probabilities
determine it only to about 1e-6. A larger divisor makes the divergence smaller, so that it remains
a lower bound."""
MOST_PADDING = 1024
"""The most tokens that a served teacher's vocabulary may have beyond the policy's: padding, of
which none is ever likely."""
IMPOSSIBLE = -100.0
"""The log-probability of a token that cannot be: an infinite one has no gradient."""


def vocabulary_kl(
    logprobs_TV: Tensor, teacher_TV: Tensor, *, direction: Direction, top_k: int | None = None
) -> Tensor:
    """Compute the divergence of two distributions at each token, [T].

    forward   sum_v q (log q - log p) = KL(teacher || student): Agarwal et al. 2024 (2306.13649),
              section 2; the student covers all that the teacher may say
    reverse   sum_v p (log p - log q) = KL(student || teacher): Gu et al. 2024 (MiniLLM,
              2306.08543); the student avoids what the teacher would not say

    Args:
        logprobs_TV: log p, the student's log-probabilities, [T, V].
        teacher_TV: log q, the teacher's log-probabilities, [T, V].
        direction: "forward" or "reverse".
        top_k: compute `top_tokens_kl` of the teacher's k likeliest tokens; None sums over the
            whole vocabulary.
    """
    if top_k is not None and top_k < teacher_TV.shape[-1]:
        teacher_TK, ids_TK = teacher_TV.topk(top_k, dim=-1)
        return top_tokens_kl(logprobs_TV.gather(-1, ids_TK), teacher_TK, direction=direction)
    return _kl(logprobs_TV, teacher_TV, direction).sum(-1)


def top_tokens_kl(logprobs_TK: Tensor, teacher_TK: Tensor, *, direction: Direction) -> Tensor:
    """Compute the divergence over the teacher's likeliest tokens and one bucket of all others, [T].

    With S the teacher's k likeliest tokens, p(rest) = 1 - sum_S p and q(rest) = 1 - sum_S q:

    forward   sum_S q (log q - log p) + q(rest) (log q(rest) - log p(rest))
    reverse   sum_S p (log p - log q) + p(rest) (log p(rest) - log q(rest))

    It is the KL divergence after all tokens outside of S have become one. By the log-sum inequality
    (Cover and Thomas 2006, theorem 2.7.1) it is never above the divergence over the vocabulary,
    which it reaches with k = V. It is 0 where both agree on S and its rest. A sum over S alone, as
    verl's `forward_kl_topk`, can be negative, and is least where the student leaves no probability
    to other tokens.

    Args:
        logprobs_TK: log p, the student's log-probabilities of the teacher's tokens, [T, K].
        teacher_TK: log q, the teacher's log-probabilities of the same tokens, [T, K].
        direction: "forward" or "reverse".
    """
    rests = [1 - logs_TK.exp().sum(-1) for logs_TK in (logprobs_TK, teacher_TK)]
    weighing_T, other_T = rests if direction == "reverse" else rests[::-1]
    weighing_T = weighing_T.clamp_min(1e-12)  # rounding may leave a sum above 1
    rest_T = weighing_T * (weighing_T.log() - other_T.clamp_min(_LEAST_REST).log())
    return _kl(logprobs_TK, teacher_TK, direction).sum(-1) + rest_T


def _kl(logprobs_TV: Tensor, teacher_TV: Tensor, direction: Direction) -> Tensor:
    """Return the terms of the divergence, [T, V]."""
    if direction == "forward":
        return teacher_TV.exp() * (teacher_TV - logprobs_TV)
    return logprobs_TV.exp() * (logprobs_TV - teacher_TV)


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyTeacher:
    """A teacher whose distributions are learned, not only the sampled tokens."""

    directory: Path | None
    """The checkpoint of a teacher that the trainer runs; None if each batch has the teacher's
    likeliest tokens (`TokenSpan.teacher_top`)."""
    direction: Direction
    top_k: int | None = None


class TeacherDivergence:
    """Computes the divergence of the policy and a teacher on the policy's own tokens.

    `teacher` is a frozen model, or None if the rows have the teacher's likeliest tokens.
    """

    def __init__(
        self, teacher: PolicyModel | None, direction: Direction, top_k: int | None = None
    ) -> None:
        self._teacher = teacher
        self._direction: Direction = direction
        self._top_k = top_k

    def __call__(
        self,
        decoder: PolicyModel,
        batch: PackedBatch,
        rows: Sequence[TokenSequence],
        hidden_tC: Tensor,
    ) -> Tensor:
        """Return the divergence at each trained token, at temperature 1, [T].

        `hidden_tC` is the policy's output before those tokens (`TokenScores.hidden`). As in
        scoring, the logits exist in chunks only. Where the policy and the teacher pad their common
        vocabulary to different sizes, both distributions are over the tokens that both have.

        Raises:
            TrainError: the batch does not have the teacher's likeliest tokens, or has tokens that
                the policy does not know.
        """
        num_tokens = sum(row.num_trainable for row in rows)
        of_teacher = (
            self._recorded(decoder, rows, hidden_tC.device)
            if self._teacher is None
            else self._hidden(self._teacher, batch, rows, decoder.shape.vocab_size)
        )

        def diverge(hidden_TC: Tensor, *of_teacher: Tensor) -> Tensor:
            logits_TV = decoder.logits(hidden_TC)
            if self._teacher is None:
                ids_TK, teacher_TK = of_teacher
                last_id = logits_TV.shape[-1] - 1
                known_TK = ids_TK.clamp_max(last_id)
                logprobs_TK = logits_TV.float().log_softmax(-1).gather(-1, known_TK)
                logprobs_TK, teacher_TK = (  # both leave the padding of the teacher to the rest
                    part_TK.masked_fill(ids_TK > last_id, IMPOSSIBLE)
                    for part_TK in (logprobs_TK, teacher_TK)
                )
                return top_tokens_kl(logprobs_TK, teacher_TK, direction=self._direction)
            with torch.no_grad():
                teacher_TV = self._teacher.logits(*of_teacher)
            size = min(logits_TV.shape[-1], teacher_TV.shape[-1])
            logprobs_TV, teacher_TV = (
                part_TV[:, :size].float().log_softmax(-1) for part_TV in (logits_TV, teacher_TV)
            )
            return vocabulary_kl(
                logprobs_TV, teacher_TV, direction=self._direction, top_k=self._top_k
            )

        size = chunk_tokens(decoder.shape.vocab_size, hidden_tC.device)
        columns = (hidden_tC, *of_teacher)
        chunks = zip(*(column.split(size) for column in columns), strict=True)
        parts: Iterable[Tensor] = (checkpoint(diverge, *c, use_reentrant=False) for c in chunks)
        return decoder.context.whole(torch.cat(list(parts)), num_tokens)

    def _hidden(
        self,
        teacher: PolicyModel,
        batch: PackedBatch,
        rows: Sequence[TokenSequence],
        vocab_size: int,
    ) -> tuple[Tensor]:
        """Return the teacher's output before this rank's trained tokens, [t, C]."""
        sources, _ = places_before(batch, [row.loss_mask for row in rows])
        if teacher.shape.vocab_size < vocab_size:
            batch = with_known_ids(batch, teacher.shape.vocab_size)
        with torch.no_grad():
            sources_T = torch.tensor(sources, dtype=torch.long, device=batch.token_ids_N.device)
            return (teacher(batch, sources_T),)

    def _recorded(
        self, decoder: PolicyModel, rows: Sequence[TokenSequence], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the recorded ids and log-probabilities for this rank's tokens, both [t, K]."""
        tops = [row.teacher_top for row in rows]
        arrays = [top.arrays() for top in tops if top is not None]
        if len(arrays) != len(rows) or len({ids.shape[1] for ids, _ in arrays}) != 1:
            raise TrainError(
                "the batch does not have the teacher's likeliest tokens of every trained token",
                hints=["they are recorded by runs with teacher.top_k and the same teacher"],
            )
        ids_TK = np.concatenate([ids for ids, _ in arrays])
        if ids_TK.min() < 0 or ids_TK.max() >= decoder.shape.vocab_size + MOST_PADDING:
            raise TrainError(
                f"the teacher's likeliest tokens have ids from {ids_TK.min()} to {ids_TK.max()}, "
                f"and the policy's vocabulary has {decoder.shape.vocab_size} tokens",
                hints=["is its tokenizer the policy's?"],
            )
        logprobs_TK = np.concatenate([logprobs for _, logprobs in arrays])
        columns = torch.tensor(ids_TK).long(), torch.tensor(logprobs_TK)
        ids, logprobs = (decoder.context.own(column.to(device)) for column in columns)
        return ids, logprobs
