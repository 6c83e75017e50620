"""Divergences from a teacher over the vocabulary, instead of the sampled token's log-ratio."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.policy_model import PolicyModel
from areal_gym.trainer.chunked_logprobs import chunk_tokens, places_before

Direction = Literal["forward", "reverse"]


def vocabulary_kl(
    logprobs_TV: Tensor, teacher_TV: Tensor, *, direction: Direction, top_k: int | None = None
) -> Tensor:
    """Compute the divergence of two distributions at each token, [T].

    forward   sum_v q (log q - log p) = KL(teacher || student): Agarwal et al. 2024 (2306.13649),
              section 2; the student covers all that the teacher may say
    reverse   sum_v p (log p - log q) = KL(student || teacher): Gu et al. 2024 (MiniLLM,
              2306.08543); the student avoids what the teacher would not say

    With `top_k`, the sum runs over the k likeliest tokens of the distribution that weighs them (q
    or p), without renormalising: verl's forward_kl_topk.

    Args:
        logprobs_TV: log p, the student's log-probabilities, [T, V].
        teacher_TV: log q, the teacher's log-probabilities, [T, V].
        direction: "forward" or "reverse".
        top_k: see above; None sums over the whole vocabulary.
    """
    weighing_TV, other_TV = (
        (teacher_TV, logprobs_TV) if direction == "forward" else (logprobs_TV, teacher_TV)
    )
    if top_k is not None and top_k < weighing_TV.shape[-1]:
        ids_TK = weighing_TV.detach().topk(top_k, dim=-1).indices
        weighing_TV, other_TV = weighing_TV.gather(-1, ids_TK), other_TV.gather(-1, ids_TK)
    return (weighing_TV.exp() * (weighing_TV - other_TV)).sum(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyTeacher:
    """A teacher whose whole distributions are learned, not only the sampled tokens."""

    directory: Path
    """The teacher's checkpoint."""
    direction: Direction
    top_k: int | None = None


class TeacherDivergence:
    """Computes `vocabulary_kl` of the policy and a frozen teacher on the policy's own tokens."""

    def __init__(
        self, teacher: PolicyModel, direction: Direction, top_k: int | None = None
    ) -> None:
        self._teacher = teacher
        self._direction: Direction = direction
        self._top_k = top_k

    def __call__(
        self,
        decoder: PolicyModel,
        batch: PackedBatch,
        masks: Sequence[Sequence[bool]],
        hidden_tC: Tensor,
    ) -> Tensor:
        """Return the divergence at each token that `masks` marks, at temperature 1, [T].

        `hidden_tC` is the policy's output before those tokens (`TokenScores.hidden`). As in
        scoring, the logits exist in chunks only.
        """
        device = batch.token_ids_N.device
        sources, targets = places_before(batch, masks)
        with torch.no_grad():
            sources_T = torch.tensor(sources, dtype=torch.long, device=device)
            teacher_tC = self._teacher(batch, sources_T)

        def diverge(hidden_TC: Tensor, teacher_TC: Tensor) -> Tensor:
            logprobs_TV = decoder.logits(hidden_TC).float().log_softmax(-1)
            with torch.no_grad():
                teacher_TV = self._teacher.logits(teacher_TC).float().log_softmax(-1)
            return vocabulary_kl(
                logprobs_TV, teacher_TV, direction=self._direction, top_k=self._top_k
            )

        size = chunk_tokens(decoder.shape.vocab_size, device)
        chunks = zip(hidden_tC.split(size), teacher_tC.split(size), strict=True)
        parts: Iterable[Tensor] = (checkpoint(diverge, *c, use_reentrant=False) for c in chunks)
        return decoder.context.whole(torch.cat(list(parts)), len(targets))
