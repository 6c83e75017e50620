"""Log-probabilities of chosen tokens, in chunks, without a tensor of all logits [T, V]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.policy_model import PolicyModel

_CHUNK_LOGITS = 2**22
"""Logits that exist at once on a CPU, whose caches are small."""
_ACCELERATOR_TOKENS = (1024, 4096)
"""The fewest and most tokens of a chunk on an accelerator. Each chunk reads the whole output
projection, which takes longer than the products if the chunk is smaller."""
_ACCELERATOR_LOGITS = 2**27
"""Logits of a chunk between those two bounds: 0.5 GB in float32."""


class TokenScores(NamedTuple):
    """Scores of the trained tokens, in row order, float32."""

    logprobs: Tensor
    """[T]"""
    entropy: Tensor
    """[T]: the entropy of the distribution that each token was drawn from."""
    is_likeliest: Tensor
    """[T], bool: whether no token was likelier."""
    hidden: Tensor
    """[T, C]: the decoder's output before each token, in its compute type.

    If several ranks share the tokens, each has its part only (`PolicyModel.context`).
    """


def chunk_tokens(vocab_size: int, device: torch.device) -> int:
    """Return how many tokens have logits at once."""
    if device.type == "cpu":
        return max(1, _CHUNK_LOGITS // vocab_size)
    least, most = _ACCELERATOR_TOKENS
    return min(most, max(least, _ACCELERATOR_LOGITS // vocab_size))


def places_before(
    batch: PackedBatch, masks: Sequence[Sequence[bool]]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the flat positions before the tokens that `masks` marks, and those of the tokens.

    Both are [T]. A row's first token has no predecessor and is never marked.
    """
    sources, targets = [np.arange(0)], [np.arange(0)]
    for index, mask in zip(batch.row_index, masks, strict=True):
        is_marked = np.asarray(mask, dtype=bool)[1:]
        sources.append(index[:-1][is_marked])
        targets.append(index[1:][is_marked])
    return np.concatenate(sources), np.concatenate(targets)


def with_known_ids(batch: PackedBatch, vocab_size: int) -> PackedBatch:
    """Return the batch with the last token in place of ids that a vocabulary does not have.

    Models of one family pad the same vocabulary to different sizes, and another one may have
    sampled a token of its padding.
    """
    return replace(batch, token_ids_N=batch.token_ids_N.clamp_max(vocab_size - 1))


def score_tokens(
    decoder: PolicyModel,
    batch: PackedBatch,
    masks: Sequence[Sequence[bool]],
    temperature: float = 1.0,
    *,
    has_entropy_gradient: bool = False,
    vocab_size: int | None = None,
) -> TokenScores:
    """Score the tokens that `masks` marks under softmax(logits / temperature).

    With a `vocab_size`, the distribution is over the first so many tokens, and any other token
    counts as the unlikeliest of them.

    Ranks that share the batch's tokens score a part each, and all get all scores.
    """
    sources, targets = places_before(batch, masks)
    device = batch.token_ids_N.device
    target_ids_T = batch.token_ids_N[torch.tensor(targets, dtype=torch.long, device=device)]
    sources_T = torch.tensor(sources, dtype=torch.long, device=device)
    context = decoder.context
    known = batch if vocab_size is None else with_known_ids(batch, decoder.shape.vocab_size)
    hidden_tC, target_ids_t = decoder(known, sources_T), context.own(target_ids_T)
    size = chunk_tokens(decoder.shape.vocab_size, device)

    def score(hidden_TC: Tensor, target_ids_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TV = decoder.logits(hidden_TC)[:, :vocab_size].float()
        if temperature != 1.0:
            logits_TV = logits_TV / temperature
        logprobs_TV = logits_TV.log_softmax(-1)
        with torch.set_grad_enabled(has_entropy_gradient and torch.is_grad_enabled()):
            entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
        if vocab_size is not None:
            unlikeliest_T = logprobs_TV.argmin(-1)
            target_ids_T = torch.where(target_ids_T < vocab_size, target_ids_T, unlikeliest_T)
        chosen_T = logprobs_TV.gather(1, target_ids_T[:, None]).squeeze(1)
        return chosen_T, entropy_T, chosen_T.detach() >= logprobs_TV.detach().amax(-1)

    if len(target_ids_t) <= size:
        scores: Iterable[Tensor] = score(hidden_tC, target_ids_t)
    else:
        chunks = zip(hidden_tC.split(size), target_ids_t.split(size), strict=True)
        parts = [checkpoint(score, *chunk, use_reentrant=False) for chunk in chunks]
        scores = (torch.cat(part) for part in zip(*parts, strict=True))
    logprobs_T, entropy_T, likeliest_T = (context.whole(part, len(targets)) for part in scores)
    return TokenScores(logprobs_T, entropy_T, likeliest_T, hidden_tC)


@torch.no_grad()
def top_tokens(
    decoder: PolicyModel,
    batch: PackedBatch,
    masks: Sequence[Sequence[bool]],
    top_k: int,
    *,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens, at temperature 1, in the places that `masks` marks.

    With a `vocab_size`, the distribution is over the first so many tokens.

    Returns:
        Their ids and log-probabilities, both [T, K] and likeliest first; K is `top_k`, or the
        vocabulary's size if that is less.
    """
    sources, targets = places_before(batch, masks)
    device = batch.token_ids_N.device
    known = batch if vocab_size is None else with_known_ids(batch, decoder.shape.vocab_size)
    hidden_tC = decoder(known, torch.tensor(sources, dtype=torch.long, device=device))
    parts = []
    for hidden_TC in hidden_tC.split(chunk_tokens(decoder.shape.vocab_size, device)):
        logprobs_TV = decoder.logits(hidden_TC)[:, :vocab_size].float().log_softmax(-1)
        parts.append(logprobs_TV.topk(min(top_k, logprobs_TV.shape[-1]), dim=-1))
    logprobs_tK, ids_tK = (torch.cat(part) for part in zip(*parts, strict=True))
    whole = decoder.context.whole
    return whole(ids_tK, len(targets)), whole(logprobs_tK, len(targets))
