"""Log-probabilities of chosen tokens, in chunks: never a whole [T, V] tensor of logits."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from areal_gym.models.policy_model import PolicyModel
from areal_gym.trainer.batch.packing import PackedBatch

_CHUNK_LOGITS = 2**22
"""Logits that are alive at once."""


class TokenScores(NamedTuple):
    """Of the trained tokens, in row order, float32."""

    logprobs: Tensor
    """[T]"""
    entropy: Tensor
    """[T], of the distribution each token was drawn from."""
    is_likeliest: Tensor
    """[T], bool: no token was likelier."""
    hidden: Tensor
    """[T, C]: the decoder's output before each token, in its compute type."""


def places_before(batch: PackedBatch, masks: list[tuple[bool, ...]]) -> tuple[list[int], list[int]]:
    """Flat positions of the tokens before those that `masks` marks, and of the latter.

    The first token of a row has no predecessor, and is never marked.
    """
    sources: list[int] = []
    targets: list[int] = []
    for index, mask in zip(batch.row_index, masks, strict=True):
        for t, is_trained in enumerate(mask):
            if is_trained:
                sources.append(index[t - 1])
                targets.append(index[t])
    return sources, targets


def score_tokens(
    decoder: PolicyModel,
    batch: PackedBatch,
    masks: list[tuple[bool, ...]],
    temperature: float = 1.0,
    *,
    has_entropy_gradient: bool = False,
) -> TokenScores:
    """Log-probabilities of the tokens that `masks` marks, under softmax(logits / temperature)."""
    sources, targets = places_before(batch, masks)
    device = batch.token_ids_N.device
    target_ids_T = batch.token_ids_N[torch.tensor(targets, dtype=torch.long, device=device)]
    sources_T = torch.tensor(sources, dtype=torch.long, device=device)
    hidden_TC = decoder(batch, sources_T)
    size = max(1, _CHUNK_LOGITS // decoder.shape.vocab_size)
    if len(targets) <= size:
        scores = _score_chunk(decoder, hidden_TC, target_ids_T, temperature, has_entropy_gradient)
        return TokenScores(*scores, hidden_TC)
    parts = [
        cast(
            tuple[Tensor, Tensor, Tensor],
            checkpoint(
                _score_chunk,
                decoder,
                hidden_TC[start : start + size],
                target_ids_T[start : start + size],
                temperature,
                has_entropy_gradient,
                use_reentrant=False,
            ),
        )
        for start in range(0, len(targets), size)
    ]
    logprobs_T, entropy_T, likeliest_T = (torch.cat(part) for part in zip(*parts, strict=True))
    return TokenScores(logprobs_T, entropy_T, likeliest_T, hidden_TC)


def _score_chunk(
    decoder: PolicyModel,
    hidden_TC: Tensor,
    target_ids_T: Tensor,
    temperature: float,
    has_entropy_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    logits_TV = decoder.logits(hidden_TC).float()
    if temperature != 1.0:
        logits_TV = logits_TV / temperature
    logprobs_TV = logits_TV.log_softmax(-1)
    with torch.set_grad_enabled(has_entropy_gradient and torch.is_grad_enabled()):
        entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    chosen_T = logprobs_TV.gather(1, target_ids_T[:, None]).squeeze(1)
    return chosen_T, entropy_T, chosen_T.detach() >= logprobs_TV.detach().amax(-1)
