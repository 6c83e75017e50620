"""A decoder's weights as the engine wants them: fused, laid out for speed, filled in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from areal_gym.errors import EngineError
from areal_gym.modeling.config import DecoderConfig
from areal_gym.modeling.decoder import Decoder

__all__ = ["FusedWeights", "LayerWeights"]


@dataclass(slots=True)
class LayerWeights:
    """One layer; matrices are [in, out].

    A small product whose second matrix has to be turned loses a quarter of its time to that.
    """

    input_norm: Tensor
    qkv: Tensor
    """[C, (H + 2K) D]; queries carry the attention scale, pairs of rotation are neighbours."""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[H + K, D]"""
    out: Tensor
    out_norm: Tensor | None
    """Of what attention adds to the residual."""
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    down_norm: Tensor | None
    """Of what the MLP adds to the residual."""


class FusedWeights:
    """All weights of one policy. Norms multiply by what is here: centred ones have got their 1."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._shapes = {
            name: parameter.shape
            for name, parameter in Decoder(config, device="meta").named_parameters()
        }
        family = config.family
        hidden, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        heads, key_heads = config.num_attention_heads, config.num_key_value_heads

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.embedding = empty(config.vocab_size, hidden)
        self.head = (
            self.embedding if config.tie_word_embeddings else empty(config.vocab_size, hidden)
        )
        self.final_norm = empty(hidden)
        qkv_size = (heads + 2 * key_heads) * head_dim
        self.layers = [
            LayerWeights(
                input_norm=empty(hidden),
                qkv=empty(hidden, qkv_size),
                qkv_bias=empty(qkv_size) if family.has_qkv_bias else None,
                qk_norm=empty(heads + key_heads, head_dim) if family.has_qk_norm else None,
                out=empty(heads * head_dim, hidden),
                out_norm=empty(hidden) if family.has_output_norms else None,
                mlp_norm=empty(hidden),
                gate_up=empty(hidden, 2 * ffn),
                down=empty(ffn, hidden),
                down_norm=empty(hidden) if family.has_output_norms else None,
            )
            for _ in range(config.num_hidden_layers)
        ]

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy a full set of weights (Hugging Face names) in place; all or nothing.

        Raises:
            EngineError: a name is missing or unknown, or a shape is another.
        """
        self._check(weights)
        self.embedding.copy_(weights["model.embed_tokens.weight"])
        if not self._config.tie_word_embeddings:
            self.head.copy_(weights["lm_head.weight"])
        self.final_norm.copy_(self._norm(weights["model.norm.weight"]))
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            part = {
                name.removeprefix(prefix): tensor
                for name, tensor in weights.items()
                if name.startswith(prefix)
            }
            self._load_layer(layer, part)

    def load_from(self, other: FusedWeights) -> None:
        """Copy weights of the same shape, bit for bit."""
        for ours, theirs in zip(self._tensors(), other._tensors(), strict=True):
            ours.copy_(theirs)

    def _tensors(self) -> Iterator[Tensor]:
        yield from (self.embedding, self.head, self.final_norm)
        for layer in self.layers:
            found = (getattr(layer, name.name) for name in fields(layer))
            yield from (tensor for tensor in found if tensor is not None)

    def _load_layer(self, layer: LayerWeights, part: Mapping[str, Tensor]) -> None:
        scale = self._config.attention_scale
        layer.input_norm.copy_(self._norm(part["input_layernorm.weight"]))
        # Where outputs are normalised, the norm "post attention" is not the one before the MLP.
        after_attention = self._norm(part["post_attention_layernorm.weight"])
        if layer.out_norm is None or layer.down_norm is None:
            layer.mlp_norm.copy_(after_attention)
        else:
            layer.out_norm.copy_(after_attention)
            layer.mlp_norm.copy_(self._norm(part["pre_feedforward_layernorm.weight"]))
            layer.down_norm.copy_(self._norm(part["post_feedforward_layernorm.weight"]))
        layer.out.t().copy_(part["self_attn.o_proj.weight"])
        layer.down.t().copy_(part["mlp.down_proj.weight"])
        gate, up = layer.gate_up.t().chunk(2)
        gate.copy_(part["mlp.gate_proj.weight"])
        up.copy_(part["mlp.up_proj.weight"])
        if layer.qk_norm is not None:
            heads = self._config.num_attention_heads
            q_norm, k_norm = (self._norm(part[f"self_attn.{name}_norm.weight"]) for name in "qk")
            layer.qk_norm[:heads] = self._pairs(q_norm).float() * scale
            layer.qk_norm[heads:] = self._pairs(k_norm)
            scale = 1.0  # the norm would undo it
        for kind, target in (("weight", layer.qkv.t()), ("bias", layer.qkv_bias)):
            if target is not None:
                q, k, v = (part[f"self_attn.{name}_proj.{kind}"] for name in "qkv")
                target[: len(q)] = self._pairs(q).float() * scale
                target[len(q) : len(q) + len(k)] = self._pairs(k)
                target[len(q) + len(k) :] = v

    def _norm(self, weight: Tensor) -> Tensor:
        return 1 + weight.float() if self._config.family.has_centred_norms else weight

    def _pairs(self, x: Tensor) -> Tensor:
        """Bring dimensions i and i + D/2 of each head side by side: one complex number each.

        Scores do not change, for queries and keys are permuted alike.
        """
        halves = x.unflatten(0, (-1, 2, self._config.head_dim // 2))
        paired: Tensor = halves.transpose(1, 2).flatten(0, 2)
        return paired

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        names = set(weights)
        if self._config.tie_word_embeddings:
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
