"""The decoder for inference: fused weights and a preallocated key/value cache.

`checkpoint_network` makes the network that a checkpoint needs: this one, or transformers' own.

One `forward` computes one step of the engine: the decoding rows, one token each, and the new
prompts, all on one flat token axis, so that they share every matrix product.

Axes: `N` tokens of the step, `R` cache rows that decode, `B` prompts, `S` all cache rows, `L`
layers, `H`, `K` query and key heads, `D` head dimension, `P` positions of a cache row, `C` hidden,
`V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_gym.engines.embedded.cache_attention import (
    MaskedAttention,
    StepAttention,
    kernel_attention,
)
from areal_gym.engines.embedded.cached_network import CachedNetwork, CacheLayout, Step
from areal_gym.engines.embedded.weights import FusedWeights, LayerWeights
from areal_gym.models.backend import AUTO, ModelLoader, tiny_knows
from areal_gym.models.tiny.attend import softcapped
from areal_gym.models.tiny.checkpoint_files import read_checkpoint, read_config
from areal_gym.models.tiny.decoder import gated
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.models.tiny.kernels import pointwise_kernels as pointwise
from areal_gym.models.tiny.kernels.attention_kernels import has_kernel
from areal_gym.models.tiny.rope import RopeScaling, rope_amplitude, rope_frequencies

_CPU_BLOCK = 256
"""Tokens whose feed-forward activations stay in a core's cache."""


class CachedDecoder:
    """Weights and cache of one policy on one device; used from one thread."""

    def __init__(self, config: DecoderConfig, layout: CacheLayout) -> None:
        self.config = config
        self.can_cut = True
        self.routed_experts: Tensor | None = None
        self._layout = layout
        dtype, device = self.dtype, self.device = layout.dtype, layout.device
        # CPUs multiply small bfloat16 batches slower than float32 ones; rotation needs float32.
        self.cache_dtype = torch.float32 if device.type == "cpu" else dtype
        self.scratch = layout.max_context
        self._num_positions = layout.max_context + 1
        self._rotations = self._rotations_of(config.rope_theta, config.rope_scaling)
        self._local_rotations = self._rotations
        if config.rope_local_theta is not None:
            self._local_rotations = self._rotations_of(config.rope_local_theta, None)
        of_row = (config.num_key_value_heads, self._num_positions, config.head_dim)
        # Zeros, not empty: a masked NaN is still a NaN.
        self._cache = torch.zeros(
            (config.num_hidden_layers, 2, layout.num_rows, *of_row),
            dtype=self.cache_dtype,
            device=device,
        )
        self._has_kernel = has_kernel(self._cache)
        self.weights = FusedWeights(config, dtype=dtype, device=device)

    def _rotations_of(self, theta: float, scaling: RopeScaling | None) -> Tensor:
        """Return the complex rotation of each position and pair."""
        inv_freq = rope_frequencies(self.config.head_dim, theta, scaling)
        angles = torch.arange(self._num_positions, dtype=torch.float32)[:, None] * inv_freq
        amplitudes = torch.full_like(angles, rope_amplitude(scaling))
        return torch.polar(amplitudes, angles)[:, None].to(self.device)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy a full set of weights, by the checkpoint's names; all or nothing."""
        self.weights.load(weights)

    def copy(self) -> CachedDecoder:
        """Return another network with a copy of the weights and an empty cache."""
        other = CachedDecoder(self.config, self._layout)
        other.weights.load_from(self.weights)
        return other

    def copy_row(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first cached tokens of `source` to `target`."""
        self._cache[:, :, target, :, :num_tokens].copy_(self._cache[:, :, source, :, :num_tokens])

    def swap_rows(self, a: int, b: int, num_tokens: int) -> None:
        """Exchange the first cached tokens of two rows."""
        kept = self._cache[:, :, a, :, :num_tokens].clone()
        self.copy_row(b, a, num_tokens)
        self._cache[:, :, b, :, :num_tokens].copy_(kept)

    def clear(self) -> None:
        """Zero the cache: NaNs of a diverged model would spread to later sequences."""
        self._cache.zero_()

    def forward(self, step: Step) -> Tensor:
        """Return float32 logits, [R + B, V]; see `CachedNetwork.forward`."""
        config, weights = self.config, self.weights
        eps, head_dim = config.rms_norm_eps, config.head_dim
        num_qk = config.num_attention_heads + config.num_key_value_heads
        rotations = self._rotations[step.positions_N]
        local_rotations = self._local_rotations[step.positions_N]
        attend = self._attention(step)

        x = weights.embed(step.token_ids_N)
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        layers = zip(weights.layers, self._cache, config.windows, strict=True)
        for layer, cache, window in layers:
            h = pointwise.rms_norm(x, layer.input_norm, eps)
            qkv = layer.qkv.product(h, layer.qkv_bias).view(len(x), -1, head_dim)
            if self.dtype != torch.float32:
                qkv = qkv.float()
            if layer.qk_norm is not None:
                qk = qkv[:, :num_qk]
                qk.copy_(F.rms_norm(qk, (head_dim,), None, eps).mul_(layer.qk_norm))
            turns = rotations if window is None else local_rotations
            q = self._place(qkv, turns, step, cache)
            if step.prompts and layer is weights.layers[-1] and not step.scores_all:
                # Only the last tokens need the output of the last layer.
                last = step.last_tokens
                ends = [replace(prompt, start=prompt.stop - 1) for prompt in step.prompts]
                x, q, attend = x[last], q[last], self._attention(replace(step, prompts=ends))
            attended = attend(q, cache, window)
            if layer.out_norm is None:
                layer.out.add_product(attended.to(self.dtype), x)
            else:
                x += pointwise.rms_norm(
                    layer.out.product(attended.to(self.dtype)), layer.out_norm, eps
                )
            self._feed_forward(x, layer)
        logits = weights.head.product(pointwise.rms_norm(x, weights.final_norm, eps)).float()
        return softcapped(logits, config.final_logit_softcapping)

    def _place(self, qkv: Tensor, turns: Tensor, step: Step, cache: Tensor) -> Tensor:
        """Rotate queries and keys, cache keys and values, and return the queries."""
        num_heads, key_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        if self._has_kernel:
            pointwise.place(qkv, turns, step.rows_N, step.positions_N, cache)
            return qkv[:, :num_heads]
        qk = qkv[:, : num_heads + key_heads]
        torch.view_as_complex(qk.unflatten(-1, (-1, 2))).mul_(turns)
        qkv = qkv.to(self.cache_dtype)
        cache[:, step.rows_N, :, step.positions_N] = qkv[:, num_heads:].unflatten(1, (2, key_heads))
        return qkv[:, :num_heads]

    def _attention(self, step: Step) -> StepAttention:
        if self.config.attn_logit_softcapping is None and self._has_kernel:
            return kernel_attention(step, self.config.num_key_value_heads * self._num_positions)
        return MaskedAttention(step, self.config, self._num_positions, self.cache_dtype)

    def _feed_forward(self, x_NC: Tensor, layer: LayerWeights) -> None:
        """Add the gated feed-forward to `x_NC`, in place."""
        eps, ffn = self.config.rms_norm_eps, self.config.intermediate_size
        activation = self.config.family.activation
        is_cut = self.device.type == "cpu" and len(x_NC) > _CPU_BLOCK
        for part in torch.split(x_NC, _CPU_BLOCK) if is_cut else (x_NC,):
            h = pointwise.rms_norm(part, layer.mlp_norm, eps)
            gate_up = layer.gate_up.product(h)
            inner = gated(gate_up[:, :ffn], gate_up[:, ffn:], activation)
            if layer.down_norm is None:
                layer.down.add_product(inner, part)
            else:
                part.add_(pointwise.rms_norm(layer.down.product(inner), layer.down_norm, eps))


def decoder_network(
    config: DecoderConfig, weights: Mapping[str, Tensor], layout: CacheLayout
) -> CachedNetwork:
    """Make the network of a tiny decoder with these weights."""
    max_context = min(layout.max_context, config.max_positions)
    network = CachedDecoder(config, replace(layout, max_context=max_context))
    network.load(weights)
    return network


def checkpoint_network(
    directory: Path, layout: CacheLayout, loader: ModelLoader = AUTO
) -> CachedNetwork:
    """Make the network of a checkpoint: a tiny decoder of any size, or transformers' own.

    Raises:
        ConfigError: the checkpoint cannot be read.
    """
    is_known = loader.backend == "auto" and tiny_knows(read_config(directory))
    if is_known or not loader.uses_transformers(directory):
        return decoder_network(*read_checkpoint(directory), layout)
    from areal_gym.engines.embedded.hf_network import CachedHFPolicy
    from areal_gym.models.hf.hf_loading import load_policy

    policy = load_policy(
        directory, device=layout.device, dtype=layout.dtype, trusts_code=loader.trusts_code
    )
    longest = getattr(policy.network.config.get_text_config(), "max_position_embeddings", None)
    max_context = min(layout.max_context, longest or layout.max_context)
    return CachedHFPolicy(policy, num_rows=layout.num_rows, max_context=max_context)
