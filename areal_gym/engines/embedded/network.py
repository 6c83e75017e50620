"""The decoder as the engine runs it: fused weights and a preallocated key/value cache.

One `forward` serves one step of the engine: the rows that decode, one token each, and the
prompts that enter, all on one flat token axis, so that every matrix product is shared.

Axes: `N` tokens of the step, `R` cache rows that decode, `S` all cache rows, `L` layers,
`H`, `K` query and key heads, `G = H / K`, `D` head dimension, `C` hidden, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_gym.errors import EngineError
from areal_gym.modeling.config import DecoderConfig
from areal_gym.modeling.decoder import Decoder, rope_frequencies

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
class _LayerWeights:
    """One layer, laid out for speed: matrices are [in, out].

    A small product whose second matrix has to be turned loses a quarter of its time to that.
    """

    input_norm: Tensor
    qkv: Tensor
    """[C, (H + 2K) D]; queries carry the attention scale, pairs of rotation are neighbours."""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[H + K, D]"""
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(slots=True)
class _Bucket:
    """Prompts of similar length, whose attention is padded to a common length and computed."""

    rows_B: Tensor
    num_keys: int
    gather_BT: Tensor
    """Flat token of each padded query; padding repeats token 0."""
    is_real_BT: Tensor
    flat_P: Tensor
    """Flat tokens of the bucket, in the order of the true entries of `is_real_BT`."""
    bias: Tensor
    """[B, 1, G T, num_keys], added to the scores."""


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
        inv_freq = rope_frequencies(config)
        angles = torch.arange(self._num_positions, dtype=torch.float32)[:, None] * inv_freq
        self._rotations = torch.polar(torch.ones_like(angles), angles)[:, None].to(device)
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
        self._shapes = {
            name: parameter.shape for name, parameter in _meta(config).named_parameters()
        }
        self._allocate()

    def _allocate(self) -> None:
        config = self.config
        hidden, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=self.dtype, device=self.device)

        self._embedding = empty(config.vocab_size, hidden)
        self._head = (
            self._embedding if config.tie_word_embeddings else empty(config.vocab_size, hidden)
        )
        self._final_norm = empty(hidden)
        qkv_size = (heads + 2 * key_heads) * head_dim
        self._layers = [
            _LayerWeights(
                input_norm=empty(hidden),
                qkv=empty(hidden, qkv_size),
                qkv_bias=empty(qkv_size) if config.has_qkv_bias else None,
                qk_norm=empty(heads + key_heads, head_dim) if config.has_qk_norm else None,
                out=empty(heads * head_dim, hidden),
                post_norm=empty(hidden),
                gate_up=empty(hidden, 2 * ffn),
                down=empty(ffn, hidden),
            )
            for _ in range(config.num_hidden_layers)
        ]

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy a full set of weights (Hugging Face names) in place; all or nothing.

        Raises:
            EngineError: a name is missing or unknown, or a shape is another.
        """
        self._check(weights)
        self._embedding.copy_(weights["model.embed_tokens.weight"])
        if not self.config.tie_word_embeddings:
            self._head.copy_(weights["lm_head.weight"])
        self._final_norm.copy_(weights["model.norm.weight"])
        for index, layer in enumerate(self._layers):
            prefix = f"model.layers.{index}."
            part = {
                name.removeprefix(prefix): tensor
                for name, tensor in weights.items()
                if name.startswith(prefix)
            }
            self._load_layer(layer, part)

    def load_from(self, other: CachedDecoder) -> None:
        """Copy the weights of a network of the same shape, bit for bit."""
        for ours, theirs in zip(self._tensors(), other._tensors(), strict=True):
            ours.copy_(theirs)

    def _tensors(self) -> Iterator[Tensor]:
        yield from (self._embedding, self._head, self._final_norm)
        for layer in self._layers:
            found = (getattr(layer, name.name) for name in fields(layer))
            yield from (tensor for tensor in found if tensor is not None)

    def _load_layer(self, layer: _LayerWeights, part: Mapping[str, Tensor]) -> None:
        config = self.config
        scale = config.head_dim**-0.5
        layer.input_norm.copy_(part["input_layernorm.weight"])
        layer.post_norm.copy_(part["post_attention_layernorm.weight"])
        layer.out.t().copy_(part["self_attn.o_proj.weight"])
        layer.down.t().copy_(part["mlp.down_proj.weight"])
        gate, up = layer.gate_up.t().chunk(2)
        gate.copy_(part["mlp.gate_proj.weight"])
        up.copy_(part["mlp.up_proj.weight"])
        if layer.qk_norm is not None:
            heads = config.num_attention_heads
            layer.qk_norm[:heads] = self._pairs(part["self_attn.q_norm.weight"]) * scale
            layer.qk_norm[heads:] = self._pairs(part["self_attn.k_norm.weight"])
            scale = 1.0  # the norm would undo it
        for kind, target in (("weight", layer.qkv.t()), ("bias", layer.qkv_bias)):
            if target is not None:
                q, k, v = (part[f"self_attn.{name}_proj.{kind}"] for name in "qkv")
                target[: len(q)] = self._pairs(q) * scale
                target[len(q) : len(q) + len(k)] = self._pairs(k)
                target[len(q) + len(k) :] = v

    def _pairs(self, x: Tensor) -> Tensor:
        """Bring dimensions i and i + D/2 of each head side by side: one complex number each.

        Scores do not change, for queries and keys are permuted alike.
        """
        halves = x.unflatten(0, (-1, 2, self.config.head_dim // 2))
        paired: Tensor = halves.transpose(1, 2).flatten(0, 2)
        return paired

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        names = set(weights)
        if self.config.tie_word_embeddings:
            names.discard("lm_head.weight")
        missing, unknown = sorted(self._shapes.keys() - names), sorted(names - self._shapes.keys())
        if missing or unknown:
            raise EngineError(
                f"the published weights are of another model: {len(missing)} tensors are missing "
                f"{missing[:3]}, {len(unknown)} are unknown {unknown[:3]}"
            )
        for name, shape in self._shapes.items():
            if weights[name].shape != shape:
                raise EngineError(
                    f"the published {name} has shape {tuple(weights[name].shape)}; "
                    f"the engine's is {tuple(shape)}"
                )

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

        Returns:
            float32 logits, [R + len(prompts), V]: of the decoding rows, then of the last token
            of each prompt.
        """
        eps, num_heads = self.config.rms_norm_eps, self.config.num_attention_heads
        hidden, head_dim = (self.config.hidden_size,), self.config.head_dim
        num_qk = num_heads + self.config.num_key_value_heads
        num_tokens = len(token_ids_N)
        rotations = self._rotations[positions_N]
        heads_N = rows_N[:, None] * self.config.num_key_value_heads + self._head_offsets
        slots = (heads_N * self._num_positions + positions_N[:, None]).flatten()
        num_keys = min(-(-num_keys // _CACHE_ALIGNMENT) * _CACHE_ALIGNMENT, self._num_positions)
        is_hidden = self._key_positions[:num_keys] > positions_N[:num_decoding, None]
        bias = torch.zeros(is_hidden.shape, dtype=self.cache_dtype, device=self.device)
        bias = bias.masked_fill_(is_hidden, _MASKED)[:, None, None]
        buckets = self._buckets(prompts, num_decoding)
        ends = [Prompt(prompt.row, prompt.stop - 1, prompt.stop) for prompt in prompts]

        x = F.embedding(token_ids_N, self._embedding)
        for layer, cache in zip(self._layers, self._cache, strict=True):
            h = F.rms_norm(x, hidden, layer.input_norm, eps)
            qkv = _affine(h, layer.qkv, layer.qkv_bias).view(num_tokens, -1, head_dim)
            if self.dtype != torch.float32:
                qkv = qkv.float()
            qk = qkv[:, :num_qk]
            if layer.qk_norm is not None:
                qk.copy_(F.rms_norm(qk, (head_dim,), None, eps).mul_(layer.qk_norm))
            torch.view_as_complex(qk.unflatten(-1, (-1, 2))).mul_(rotations)
            if qkv.dtype != self.cache_dtype:
                qkv = qkv.to(self.cache_dtype)
            new = qkv[:, num_heads:].reshape(-1, head_dim)
            cache.view(-1, head_dim).index_copy_(0, slots, new)
            q = qkv[:, :num_heads]
            if prompts and layer is self._layers[-1]:
                # The last layer owes its keys to later steps, and its output to the last tokens.
                last = self._last_tokens(prompts, num_decoding)
                x, q, buckets = x[last], q[last], self._buckets(ends, num_decoding)
            seen = self._attend_rows(q[:num_decoding], cache, num_keys, bias)
            if buckets:
                seen = torch.cat((seen, self._attend_prompts(q, num_decoding, cache, buckets)))
            x = torch.addmm(x, seen.to(self.dtype), layer.out)
            self._feed_forward(x, layer)
        return F.linear(F.rms_norm(x, hidden, self._final_norm, eps), self._head).float()

    def _feed_forward(self, x_NC: Tensor, layer: _LayerWeights) -> None:
        """Add the gated feed-forward to `x_NC`, in place."""
        eps, ffn = self.config.rms_norm_eps, self.config.intermediate_size
        on_cpu = self.device.type == "cpu"
        for part in torch.split(x_NC, _CPU_BLOCK) if on_cpu else (x_NC,):
            h = F.rms_norm(part, layer.post_norm.shape, layer.post_norm, eps)
            gate_up = h @ layer.gate_up
            part.addmm_(F.silu(gate_up[:, :ffn]).mul_(gate_up[:, ffn:]), layer.down)

    def _attend_rows(self, q_RHD: Tensor, cache: Tensor, num_keys: int, bias: Tensor) -> Tensor:
        """One query per row against the row's cache: [R, H D]."""
        num_rows = len(q_RHD)
        if num_rows == 0:
            return q_RHD.flatten(1)
        keys, values = cache[:, :num_rows, :, :num_keys]
        q = q_RHD.unflatten(1, (keys.shape[1], -1))  # [R, K, G, D]
        if self.cache_dtype != torch.float32:
            out = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=bias.expand(*q.shape[:3], -1), scale=1.0
            )
            return out.reshape(num_rows, -1)
        # For single queries two batched products beat fused attention on CPUs.
        scores = torch.bmm(q.reshape(-1, *q.shape[2:]), keys.flatten(0, 1).transpose(1, 2))
        scores.view(*q.shape[:3], -1).add_(bias)
        return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(num_rows, -1)

    def _attend_prompts(
        self, q_NHD: Tensor, num_decoding: int, cache: Tensor, buckets: Sequence[_Bucket]
    ) -> Tensor:
        """Causal attention of the prompts' tokens to their rows' cache: [N - R, H D]."""
        out = torch.empty_like(q_NHD[num_decoding:])
        for bucket in buckets:
            keys, values = cache[:, bucket.rows_B, :, : bucket.num_keys]
            q = q_NHD[bucket.gather_BT].unflatten(2, (keys.shape[1], -1))  # [B, T, K, G, D]
            num_queries = q.shape[1]
            q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)
            seen = F.scaled_dot_product_attention(q, keys, values, attn_mask=bucket.bias, scale=1.0)
            seen = seen.unflatten(2, (-1, num_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)
            out[bucket.flat_P] = seen[bucket.is_real_BT]
        return out.flatten(1)

    def _buckets(self, prompts: Sequence[Prompt], num_decoding: int) -> list[_Bucket]:
        """Prompts within a factor of two of each other's length share a padded product."""
        flat_starts, flat = [], num_decoding
        for prompt in prompts:
            flat_starts.append(flat)
            flat += prompt.stop - prompt.start
        order = sorted(range(len(prompts)), key=lambda i: prompts[i].start - prompts[i].stop)
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
            [[prompts[i].row, prompts[i].start, prompts[i].stop, flat_starts[i]] for i in members],
            device=self.device,
        )
        rows, starts, stops, flats = facts.unbind(1)
        num_keys = max(prompts[i].stop for i in members)
        num_queries = max(prompts[i].stop - prompts[i].start for i in members)
        offsets = torch.arange(num_queries, device=self.device)
        is_real = offsets < (stops - starts)[:, None]
        gather = torch.where(is_real, flats[:, None] + offsets, 0)
        is_hidden = self._key_positions[:num_keys] > (starts[:, None] + offsets)[..., None]
        bias = torch.zeros(is_hidden.shape, dtype=self.cache_dtype, device=self.device)
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        return _Bucket(
            rows_B=rows,
            num_keys=num_keys,
            gather_BT=gather,
            is_real_BT=is_real,
            flat_P=gather[is_real] - num_decoding,
            bias=bias.masked_fill_(is_hidden, _MASKED).repeat(1, group, 1)[:, None],
        )

    def _last_tokens(self, prompts: Sequence[Prompt], num_decoding: int) -> Tensor:
        lengths = torch.tensor([prompt.stop - prompt.start for prompt in prompts])
        decoding = torch.arange(num_decoding)
        last = torch.cat((decoding, num_decoding - 1 + lengths.cumsum(0)))
        return last.to(self.device)


def _affine(x_NC: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return x_NC @ matrix if bias is None else torch.addmm(bias, x_NC, matrix)


def _meta(config: DecoderConfig) -> Decoder:
    return Decoder(config, device="meta")
