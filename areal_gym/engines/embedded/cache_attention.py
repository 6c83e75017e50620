"""Attention of one engine step to the cache of keys and values.

On a CPU with a C compiler, `areal_gym.models.tiny.kernels` computes it: each row reads its own
length, and siblings read their shared beginning from one of them. Otherwise torch does: rows are
masked up to the longest one, and prompts are padded to rectangles of similar length.

Axes: `N` tokens of the step, `R` cache rows that decode, `S` all cache rows, `H`, `K` query and key
heads, `G = H / K`, `D` head dimension, `P` positions of a cache row; `B` prompts of `T` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_gym.engines.embedded.cached_network import Prompt, Step
from areal_gym.models.tiny.attend import masked_softmax
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.models.tiny.kernels.attention_kernels import BLOCK, attend_cached

_MASKED = -1e30
"""Finite, because a row without any visible key would turn into NaN with -inf."""
_CACHE_ALIGNMENT = 16
"""Cached lengths are rounded up to a multiple of this, which suits matrix products."""


StepAttention = Callable[[Tensor, Tensor, int | None], Tensor]
"""The attention of one step, [N, H D]; scores are not scaled. It takes the queries of the decoding
rows, then of the prompts' tokens, [N, H, D]; keys and values of one layer, [2, S, K, P, D]; and a
window: a token attends only to itself and the `window - 1` tokens before it."""


def kernel_attention(step: Step, row_size: int) -> StepAttention:
    """Return attention by the C kernel for CPUs; `row_size` is K P, the tokens of a cache row."""
    positions, segments = step.positions_R.tolist(), []
    for family in step.families:
        # Whole blocks, so that the results of a row do not depend on its siblings.
        shared, first = family.num_shared // BLOCK * BLOCK, family.rows[0] * row_size
        for row in family.rows:
            start = row * row_size
            stop = start + positions[row] + 1
            segments.append((row, 1, first, first + shared, start + shared, stop))
    for prompt, tokens in step.placed_prompts:
        start = prompt.row * row_size
        segments.append((tokens.start, len(prompt), 0, 0, start, start + prompt.stop))
    segments_S6 = torch.tensor(segments)
    return lambda q_NHD, cache, window: attend_cached(q_NHD, cache, segments_S6, window)


class MaskedAttention:
    """Computes attention with torch.

    Args:
        step: the tokens.
        config: the model's configuration.
        num_positions: P.
        dtype: the type of the cache.
    """

    def __init__(
        self, step: Step, config: DecoderConfig, num_positions: int, dtype: torch.dtype
    ) -> None:
        self._dtype, self._config, self._device = dtype, config, step.positions_N.device
        self._num_decoding = step.num_decoding
        num_keys = -(-step.num_keys // _CACHE_ALIGNMENT) * _CACHE_ALIGNMENT
        self._num_keys = min(num_keys, num_positions)
        self._key_positions = torch.arange(num_positions, device=self._device)
        age_RK = step.positions_R[:, None] - self._key_positions[: self._num_keys]
        self._biases = {w: bias[:, None, None] for w, bias in self._biases_of(age_RK).items()}
        self._buckets = self._buckets_of(step.placed_prompts)

    def __call__(self, q_NHD: Tensor, cache: Tensor, window: int | None) -> Tensor:
        """Return the attention outputs; see `StepAttention`."""
        attended = self._attend_rows(q_NHD[: self._num_decoding], cache, window)
        if not self._buckets:
            return attended
        return torch.cat((attended, self._attend_prompts(q_NHD, cache, window)))

    def _biases_of(self, age: Tensor) -> dict[int | None, Tensor]:
        """Return the bias added to the scores, by window; `age` is query less key position."""
        biases: dict[int | None, Tensor] = {}
        for window in set(self._config.windows):
            is_hidden = age < 0
            if window is not None:
                is_hidden |= age >= window
            bias = torch.zeros(age.shape, dtype=self._dtype, device=self._device)
            biases[window] = bias.masked_fill_(is_hidden, _MASKED)
        return biases

    def _attend_rows(self, q_RHD: Tensor, cache: Tensor, window: int | None) -> Tensor:
        """Attend with one query per row to the row's cache: [R, H D]."""
        num_rows = len(q_RHD)
        if num_rows == 0:
            return q_RHD.flatten(1)
        keys, values = cache[:, :num_rows, :, : self._num_keys]
        q = q_RHD.unflatten(1, (keys.shape[1], -1))  # [R, K, G, D]
        bias, softcap = self._biases[window], self._config.attn_logit_softcapping
        if softcap is None and q.device.type == "cpu":
            # For single queries, two products beat torch's fused attention on CPUs.
            out: Tensor = (q @ keys.transpose(-2, -1)).add_(bias).softmax(-1) @ values
        else:
            bias = bias.expand(*q.shape[:3], -1)
            out = masked_softmax(q, keys, values, bias, softcap, scale=1.0)
        return out.reshape(num_rows, -1)

    def _attend_prompts(self, q_NHD: Tensor, cache: Tensor, window: int | None) -> Tensor:
        """Attend causally with the prompts' tokens to their rows' cache: [N - R, H D]."""
        out = torch.empty_like(q_NHD[self._num_decoding :])
        for bucket in self._buckets:
            keys, values = cache[:, bucket.rows_B, :, : bucket.num_keys]
            q = q_NHD[bucket.gather_BT].unflatten(2, (keys.shape[1], -1)).permute(0, 2, 3, 1, 4)
            bias, softcap = bucket.bias[window], self._config.attn_logit_softcapping
            attended = masked_softmax(q.flatten(2, 3), keys, values, bias, softcap, scale=1.0)
            attended = attended.view_as(q).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [B, T, H, D]
            out[bucket.flat_P] = attended[bucket.is_real_BT]
        return out.flatten(1)

    def _buckets_of(self, prompts: Sequence[tuple[Prompt, slice]]) -> list[_Bucket]:
        """Bucket prompts whose lengths differ by at most a factor of two."""
        buckets: list[list[tuple[Prompt, int]]] = []
        for prompt, tokens in sorted(prompts, key=lambda row: (-len(row[0]), row[0].row)):
            if not buckets or 2 * len(prompt) + 8 < len(buckets[-1][0][0]):
                buckets.append([])
            buckets[-1].append((prompt, tokens.start))
        return [self._bucket(members) for members in buckets]

    def _bucket(self, members: Sequence[tuple[Prompt, int]]) -> _Bucket:
        """Make a bucket of prompts, each with its first flat token; the first is the longest."""
        bounds = torch.tensor(
            [[prompt.start, prompt.stop, flat] for prompt, flat in members], device=self._device
        )
        starts, stops, flats = bounds.unbind(1)
        num_keys = max(prompt.stop for prompt, _ in members)
        offsets = torch.arange(len(members[0][0]), device=self._device)
        is_real = offsets < (stops - starts)[:, None]
        gather = torch.where(is_real, flats[:, None] + offsets, 0)
        age_BTK = (starts[:, None] + offsets)[..., None] - self._key_positions[:num_keys]
        group = self._config.num_attention_heads // self._config.num_key_value_heads
        return _Bucket(
            rows_B=torch.tensor([prompt.row for prompt, _ in members], device=self._device),
            num_keys=num_keys,
            gather_BT=gather,
            is_real_BT=is_real,
            flat_P=gather[is_real] - self._num_decoding,
            bias={
                window: bias.repeat(1, group, 1)[:, None]
                for window, bias in self._biases_of(age_BTK).items()
            },
        )


@dataclass(slots=True)
class _Bucket:
    """Prompts of similar length, whose attention is padded to a common length."""

    rows_B: Tensor
    num_keys: int
    gather_BT: Tensor
    """Flat token of each padded query; padding repeats token 0."""
    is_real_BT: Tensor
    flat_P: Tensor
    """Flat tokens of the bucket, in the order of the true entries of `is_real_BT`."""
    bias: dict[int | None, Tensor]
    """The bias added to the scores, by window: [B, 1, G T, num_keys]."""
