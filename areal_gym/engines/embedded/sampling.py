"""Samples tokens from logits by inverting the CDF, with random numbers per request.

The random number of a token is a hash of (seed, position), so that the samples of a request do not
depend on the rest of the batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_gym.models.tiny.kernels import pointwise_kernels as pointwise
from areal_gym.models.tiny.kernels.kernel_library import is_there

_WORD = (1 << 64) - 1


def uniforms(seed: int, start: int, stop: int) -> npt.NDArray[np.float32]:
    """Return a number in [0, 1) per position start..stop, by SplitMix64 (Steele et al. 2014)."""
    # One round mixes the seed first: the streams of adjacent seeds must not overlap.
    origin = int(_mix(np.array([seed & _WORD], dtype=np.uint64))[0])
    counters = np.arange(start + 1, stop + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = _mix(counters + np.uint64(origin))
    # A float32 below 1 holds 24 bits.
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample(logits_BV: Tensor, temperature_B: Tensor, u_B: Tensor) -> tuple[Tensor, Tensor]:
    """Sample token ids; return them and their log-probabilities, both [B].

    Args:
        logits_BV: float32; -inf where a token is excluded.
        temperature_B: 0 is greedy, whose log-probabilities are those of temperature 1.
        u_B: numbers in [0, 1).
    """
    if logits_BV.is_cpu and is_there():
        return pointwise.sample(logits_BV, temperature_B, u_B)
    greedy_B = temperature_B == 0
    logprobs_BV = (logits_BV / torch.where(greedy_B, 1.0, temperature_B)[:, None]).log_softmax(-1)
    cdf_BV = logprobs_BV.exp().cumsum(-1)
    # right=True: the first entry *above* the target, whose own probability is then positive.
    ids_B1 = torch.searchsorted(cdf_BV, u_B[:, None] * cdf_BV[:, -1:], right=True)
    ids_B1.clamp_(max=logits_BV.shape[-1] - 1)
    if greedy_B.any():
        best_B1 = logits_BV.argmax(-1, keepdim=True)
        ids_B1 = torch.where(greedy_B[:, None], best_B1, ids_B1)
    return ids_B1[:, 0], logprobs_BV.gather(-1, ids_B1)[:, 0]


def filter_logits(
    logits_BV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor
) -> Tensor:
    """Set logits to -inf outside the `top_k` likeliest tokens (0 is off) and the nucleus `top_p`.

    The nucleus is the smallest set of the likeliest tokens with probability of at least `top_p`
    at this temperature (Holtzman et al. 2020); the likeliest token always stays.
    """
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_BV.shape[-1], device=logits_BV.device)
    is_out = (top_k_B[:, None] > 0) & (rank_V >= top_k_B[:, None])
    sorted_BV = sorted_BV.masked_fill(is_out, -torch.inf)
    heat_B1 = torch.where(temperature_B == 0, 1.0, temperature_B)[:, None]
    probs_BV = (sorted_BV / heat_B1).softmax(-1)
    is_out = (probs_BV.cumsum(-1) - probs_BV >= top_p_B[:, None]) & (rank_V > 0)
    sorted_BV = sorted_BV.masked_fill(is_out, -torch.inf)
    return torch.empty_like(logits_BV).scatter_(-1, order_BV, sorted_BV)
