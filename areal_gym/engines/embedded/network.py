"""The decoder as the engine runs it: fused weights and a preallocated key/value cache.

One `forward` serves one step of the engine: the rows that decode, one token each, and the
prompts that enter, all on one flat token axis, so that every matrix product is shared.

Axes: `N` tokens of the step, `R` cache rows that decode, `S` all cache rows, `L` layers,
`H`, `K` query and key heads, `G = H / K`, `D` head dimension, `C` hidden, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_gym.engines.embedded.siblings import Families, Siblings, index_of
from areal_gym.engines.embedded.weights import FusedWeights, LayerWeights
from areal_gym.modeling.config import DecoderConfig
from areal_gym.modeling.decoder import activate, capped_attention, softcapped
from areal_gym.modeling.rope import RopeScaling, rope_amplitude, rope_frequencies

__all__ = ["CachedDecoder", "Prompt"]

_MASKED = -1e30
"""Finite, because a row without any visible key would otherwise turn into NaN."""
_CACHE_ALIGNMENT = 16
"""Cached lengths are rounded up to this: matrix products like it, and the mask is there anyway."""
_CPU_BLOCK = 256
"""Tokens whose feed-forward activations stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The uncached end of one sequence: tokens [start, stop) of cache row `row`."""

    row: int
    start: int
    stop: int


@dataclass(slots=True)
class _Bucket:
    """Prompts of similar length, whose attention is padded to a common length and computed."""

    rows_B: slice | Tensor
    num_keys: int
    gather_BT: Tensor
    """Flat token of each padded query; padding repeats token 0."""
    is_real_BT: Tensor
    flat_P: Tensor
    """Flat tokens of the bucket, in the order of the true entries of `is_real_BT`."""
    bias: dict[int | None, Tensor]
    """By window: [B, 1, G T, num_keys], added to the scores."""


class CachedDecoder:
    """Weights and cache of one policy on one device; used from one thread."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        num_rows: int,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        # CPUs multiply small bfloat16 batches slower than float32 ones; rotation needs float32.
        self.cache_dtype = torch.float32 if device.type == "cpu" else dtype
        self.scratch = max_context
        """A position that no sequence has: rows that do not take part write there."""
        self._num_positions = max_context + 1
        self._rotations = self._rotations_of(config.rope_theta, config.rope_scaling)
        self._local_rotations: Tensor | None = None
        if config.rope_local_theta is not None:
            self._local_rotations = self._rotations_of(config.rope_local_theta, None)
        key_heads, head_dim = config.num_key_value_heads, config.head_dim
        # Zeros, not empty: a masked NaN is still a NaN.
        self._cache = torch.zeros(
            (config.num_hidden_layers, 2, num_rows, key_heads, self._num_positions, head_dim),
            dtype=self.cache_dtype,
            device=device,
        )
        head_starts = torch.arange(2 * key_heads, device=device)
        # Keys of row r start at r K, values at (S + r) K, in units of one head's positions.
        self._head_offsets = torch.where(
            head_starts < key_heads, head_starts, head_starts + (num_rows - 1) * key_heads
        )
        self._key_positions = torch.arange(self._num_positions, device=device)
        self.weights = FusedWeights(config, dtype=dtype, device=device)
        self._siblings: Siblings | None = None
        self._last_families: tuple[Families, int] | None = None

    def _rotations_of(self, theta: float, scaling: RopeScaling | None) -> Tensor:
        """Of each position and pair: the complex number that turns it."""
        inv_freq = rope_frequencies(self.config.head_dim, theta, scaling)
        angles = torch.arange(self._num_positions, dtype=torch.float32)[:, None] * inv_freq
        amplitudes = torch.full_like(angles, rope_amplitude(scaling))
        return torch.polar(amplitudes, angles)[:, None].to(self.device)

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        """Give `target` the first cached tokens of `source`."""
        self._cache[:, :, target, :, :num_tokens].copy_(self._cache[:, :, source, :, :num_tokens])

    def swap_rows(self, a: int, b: int, num_tokens: int) -> None:
        """Exchange the first cached tokens of two rows."""
        kept = self._cache[:, :, a, :, :num_tokens].clone()
        self.copy_row(b, a, num_tokens)
        self._cache[:, :, b, :, :num_tokens].copy_(kept)

    def clear(self) -> None:
        """Zero the cache: what a broken model left in it would poison later sequences."""
        self._cache.zero_()

    def forward(
        self,
        token_ids_N: Tensor,
        positions_N: Tensor,
        rows_N: Tensor,
        *,
        num_decoding: int,
        num_keys: int,
        prompts: Sequence[Prompt],
        families: Families,
    ) -> Tensor:
        """One step. The first `num_decoding` tokens belong to the cache rows 0, 1, 2, ...

        The tokens of `prompts` follow, one prompt after the other.

        Args:
            token_ids_N: the tokens.
            positions_N: where in its sequence each one stands.
            rows_N: the cache row of each.
            num_decoding: R.
            num_keys: all decoding rows that matter see positions below this only.
            prompts: what enters the cache in this step.
            families: which of the decoding rows begin alike.

        Returns:
            float32 logits, [R + len(prompts), V]: of the decoding rows, then of the last token
            of each prompt.
        """
        config, weights = self.config, self.weights
        eps, num_heads = config.rms_norm_eps, config.num_attention_heads
        hidden, head_dim = (config.hidden_size,), config.head_dim
        num_qk = num_heads + config.num_key_value_heads
        num_tokens = len(token_ids_N)
        rotations = self._rotations[positions_N]
        local_rotations = rotations
        if self._local_rotations is not None:
            local_rotations = self._local_rotations[positions_N]
        heads_N = rows_N[:, None] * config.num_key_value_heads + self._head_offsets
        slots = (heads_N * self._num_positions + positions_N[:, None]).flatten()
        num_keys = min(-(-num_keys // _CACHE_ALIGNMENT) * _CACHE_ALIGNMENT, self._num_positions)
        age_RK = positions_N[:num_decoding, None] - self._key_positions[:num_keys]
        biases = {window: bias[:, None, None] for window, bias in self._biases(age_RK).items()}
        siblings = self._siblings_of(families, num_decoding)
        buckets = self._buckets(prompts, num_decoding)
        ends = [Prompt(prompt.row, prompt.stop - 1, prompt.stop) for prompt in prompts]

        x = F.embedding(token_ids_N, weights.embedding)
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        layers = zip(weights.layers, self._cache, config.windows, strict=True)
        for layer, cache, window in layers:
            h = F.rms_norm(x, hidden, layer.input_norm, eps)
            qkv = _affine(h, layer.qkv, layer.qkv_bias).view(num_tokens, -1, head_dim)
            if self.dtype != torch.float32:
                qkv = qkv.float()
            qk = qkv[:, :num_qk]
            if layer.qk_norm is not None:
                qk.copy_(F.rms_norm(qk, (head_dim,), None, eps).mul_(layer.qk_norm))
            turns = rotations if window is None else local_rotations
            torch.view_as_complex(qk.unflatten(-1, (-1, 2))).mul_(turns)
            if qkv.dtype != self.cache_dtype:
                qkv = qkv.to(self.cache_dtype)
            new = qkv[:, num_heads:].reshape(-1, head_dim)
            cache.view(-1, head_dim).index_copy_(0, slots, new)
            q = qkv[:, :num_heads]
            if prompts and layer is weights.layers[-1]:
                # The last layer owes its keys to later steps, and its output to the last tokens.
                last = self._last_tokens(prompts, num_decoding)
                x, q, buckets = x[last], q[last], self._buckets(ends, num_decoding)
            seen = self._attend_rows(q[:num_decoding], cache, num_keys, biases[window], siblings)
            if buckets:
                others = self._attend_prompts(q, num_decoding, cache, buckets, window)
                seen = torch.cat((seen, others))
            if layer.out_norm is None:
                x = torch.addmm(x, seen.to(self.dtype), layer.out)
            else:
                x = x + F.rms_norm(seen.to(self.dtype) @ layer.out, hidden, layer.out_norm, eps)
            self._feed_forward(x, layer)
        logits = F.linear(F.rms_norm(x, hidden, weights.final_norm, eps), weights.head).float()
        return softcapped(logits, config.final_logit_softcapping)

    def _biases(self, age: Tensor) -> dict[int | None, Tensor]:
        """By window: what is added to scores of keys so many tokens older than their queries."""
        biases: dict[int | None, Tensor] = {}
        for window in set(self.config.windows):
            is_hidden = age < 0
            if window is not None:
                is_hidden |= age >= window
            bias = torch.zeros(age.shape, dtype=self.cache_dtype, device=self.device)
            biases[window] = bias.masked_fill_(is_hidden, _MASKED)
        return biases

    def _feed_forward(self, x_NC: Tensor, layer: LayerWeights) -> None:
        """Add the gated feed-forward to `x_NC`, in place."""
        eps, ffn = self.config.rms_norm_eps, self.config.intermediate_size
        size, activation = layer.mlp_norm.shape, self.config.family.activation
        on_cpu = self.device.type == "cpu"
        for part in torch.split(x_NC, _CPU_BLOCK) if on_cpu else (x_NC,):
            h = F.rms_norm(part, size, layer.mlp_norm, eps)
            gate_up = h @ layer.gate_up
            gated = activate(gate_up[:, :ffn], activation).mul_(gate_up[:, ffn:])
            if layer.down_norm is None:
                part.addmm_(gated, layer.down)
            else:
                part.add_(F.rms_norm(gated @ layer.down, size, layer.down_norm, eps))

    def _siblings_of(self, families: Families, num_rows: int) -> Siblings | None:
        """How to read what families share; None where that does not pay."""
        if self.cache_dtype != torch.float32 or self.config.attn_logit_softcapping is not None:
            return None
        if (families, num_rows) != self._last_families:
            self._last_families = families, num_rows
            key_heads = self.config.num_key_value_heads
            heads = key_heads, self.config.num_attention_heads // key_heads
            self._siblings = None
            if families.is_worthwhile:
                self._siblings = Siblings(families, num_rows, heads, self.device)
        return self._siblings

    def _attend_rows(
        self,
        q_RHD: Tensor,
        cache: Tensor,
        num_keys: int,
        bias: Tensor,
        siblings: Siblings | None,
    ) -> Tensor:
        """One query per row against the row's cache: [R, H D]."""
        num_rows = len(q_RHD)
        if num_rows == 0:
            return q_RHD.flatten(1)
        keys, values = cache[:, :num_rows, :, :num_keys]
        q = q_RHD.unflatten(1, (keys.shape[1], -1))  # [R, K, G, D]
        softcap = self.config.attn_logit_softcapping
        if softcap is not None:
            out = capped_attention(q, keys, values, bias, scale=1.0, softcap=softcap)
            return out.reshape(num_rows, -1)
        if self.cache_dtype != torch.float32:
            out = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=bias.expand(*q.shape[:3], -1), scale=1.0
            )
            return out.reshape(num_rows, -1)
        # For single queries two batched products beat fused attention on CPUs.
        q_BGD = q.reshape(-1, *q.shape[2:])
        start = siblings.num_tokens if siblings else 0
        own_keys, own_values = (x[:, :, start:].flatten(0, 1) for x in (keys, values))
        scores_BGK = torch.bmm(q_BGD, own_keys.transpose(1, 2))
        if siblings:
            shared = siblings.scores(q_BGD.flatten(0, 1), keys).view(*q_BGD.shape[:2], -1)
            scores_BGK = torch.cat((shared, scores_BGK), dim=-1)
        scores_BGK.view(*q.shape[:3], -1).add_(bias)
        probs_BGK = scores_BGK.softmax(-1)
        out_BGD = torch.bmm(probs_BGK[:, :, start:], own_values)
        if siblings:
            out_BGD += siblings.mix(probs_BGK[:, :, :start].flatten(0, 1), values).view_as(out_BGD)
        return out_BGD.view(num_rows, -1)

    def _attend_prompts(
        self,
        q_NHD: Tensor,
        num_decoding: int,
        cache: Tensor,
        buckets: Sequence[_Bucket],
        window: int | None,
    ) -> Tensor:
        """Causal attention of the prompts' tokens to their rows' cache: [N - R, H D]."""
        out = torch.empty_like(q_NHD[num_decoding:])
        for bucket in buckets:
            keys, values = cache[:, bucket.rows_B, :, : bucket.num_keys]
            q = q_NHD[bucket.gather_BT].unflatten(2, (keys.shape[1], -1))  # [B, T, K, G, D]
            num_queries = q.shape[1]
            q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)
            bias, softcap = bucket.bias[window], self.config.attn_logit_softcapping
            if softcap is None:
                seen = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=1.0)
            else:
                seen = capped_attention(q, keys, values, bias, scale=1.0, softcap=softcap)
            seen = seen.unflatten(2, (-1, num_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)
            out[bucket.flat_P] = seen[bucket.is_real_BT]
        return out.flatten(1)

    def _buckets(self, prompts: Sequence[Prompt], num_decoding: int) -> list[_Bucket]:
        """Prompts within a factor of two of each other's length share a padded product."""
        flat_starts, flat = [], num_decoding
        for prompt in prompts:
            flat_starts.append(flat)
            flat += prompt.stop - prompt.start
        order = sorted(
            range(len(prompts)), key=lambda i: (prompts[i].start - prompts[i].stop, prompts[i].row)
        )
        buckets: list[_Bucket] = []
        members: list[int] = []
        for i in order:
            length = prompts[i].stop - prompts[i].start
            if members:
                longest = prompts[members[0]].stop - prompts[members[0]].start
                if 2 * length + 8 < longest:
                    buckets.append(self._bucket(prompts, flat_starts, members, num_decoding))
                    members = []
            members.append(i)
        if members:
            buckets.append(self._bucket(prompts, flat_starts, members, num_decoding))
        return buckets

    def _bucket(
        self,
        prompts: Sequence[Prompt],
        flat_starts: Sequence[int],
        members: Sequence[int],
        num_decoding: int,
    ) -> _Bucket:
        facts = torch.tensor(
            [[prompts[i].start, prompts[i].stop, flat_starts[i]] for i in members],
            device=self.device,
        )
        starts, stops, flats = facts.unbind(1)
        num_keys = max(prompts[i].stop for i in members)
        num_queries = max(prompts[i].stop - prompts[i].start for i in members)
        offsets = torch.arange(num_queries, device=self.device)
        is_real = offsets < (stops - starts)[:, None]
        gather = torch.where(is_real, flats[:, None] + offsets, 0)
        age_BTK = (starts[:, None] + offsets)[..., None] - self._key_positions[:num_keys]
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        return _Bucket(
            rows_B=index_of([prompts[i].row for i in members], self.device),
            num_keys=num_keys,
            gather_BT=gather,
            is_real_BT=is_real,
            flat_P=gather[is_real] - num_decoding,
            bias={
                window: bias.repeat(1, group, 1)[:, None]
                for window, bias in self._biases(age_BTK).items()
            },
        )

    def _last_tokens(self, prompts: Sequence[Prompt], num_decoding: int) -> Tensor:
        lengths = torch.tensor([prompt.stop - prompt.start for prompt in prompts])
        decoding = torch.arange(num_decoding)
        last = torch.cat((decoding, num_decoding - 1 + lengths.cumsum(0)))
        return last.to(self.device)


def _affine(x_NC: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return x_NC @ matrix if bias is None else torch.addmm(bias, x_NC, matrix)
