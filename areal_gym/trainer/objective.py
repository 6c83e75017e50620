"""Log-probabilities of chosen tokens, in chunks: never a whole [T, V] tensor of logits."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from areal_gym.modeling.decoder import Decoder
from areal_gym.trainer.packing import PackedBatch

__all__ = ["TokenScores", "score_tokens"]

_CHUNK_LOGITS = 2**22
"""Logits that are alive at once."""


class TokenScores(NamedTuple):
    """Of the trained tokens, in row order; both [T] and float32."""

    logprobs: Tensor
    entropy: Tensor
    """Of the distribution each token was drawn from; carries no gradient."""


def score_tokens(
    decoder: Decoder, batch: PackedBatch, masks: list[tuple[bool, ...]], temperature: float = 1.0
) -> TokenScores:
    """Log-probabilities of the tokens that `masks` marks, under softmax(logits / temperature).

    The first token of a row has no predecessor, and is never marked.
    """
    sources: list[int] = []
    targets: list[int] = []
    for index, mask in zip(batch.row_index, masks, strict=True):
        for t, is_trained in enumerate(mask):
            if is_trained:
                sources.append(index[t - 1])
                targets.append(index[t])
    device = batch.token_ids_N.device
    target_ids_T = batch.token_ids_N[torch.tensor(targets, dtype=torch.long, device=device)]
    hidden_NC = decoder(batch.token_ids_N, batch.positions_N, batch.attend)
    hidden_TC = hidden_NC[torch.tensor(sources, dtype=torch.long, device=device)]
    head_VC = decoder.lm_head_weight
    size = max(1, _CHUNK_LOGITS // head_VC.shape[0])
    if len(targets) <= size:
        return TokenScores(*_score_chunk(hidden_TC, head_VC, target_ids_T, temperature))
    parts = [
        cast(
            tuple[Tensor, Tensor],
            checkpoint(
                _score_chunk,
                hidden_TC[start : start + size],
                head_VC,
                target_ids_T[start : start + size],
                temperature,
                use_reentrant=False,
            ),
        )
        for start in range(0, len(targets), size)
    ]
    return TokenScores(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))


def _score_chunk(
    hidden_TC: Tensor, head_VC: Tensor, target_ids_T: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits_TV = (hidden_TC @ head_VC.T).float()
    if temperature != 1.0:
        logits_TV = logits_TV / temperature
    logprobs_TV = logits_TV.log_softmax(-1)
    with torch.no_grad():
        entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return logprobs_TV.gather(1, target_ids_T[:, None]).squeeze(1), entropy_T
