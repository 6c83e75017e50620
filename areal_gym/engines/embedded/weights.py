"""A decoder's weights for inference: fused, arranged for speed, and loaded in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_gym.engines.embedded.cached_network import require_same_names
from areal_gym.errors import EngineError
from areal_gym.models.tiny.decoder import Decoder
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.models.tiny.kernels import product_kernels as products


class Matrix:
    """A weight matrix: packed if there is a CPU kernel for it, otherwise [I, O].

    Transposing the second matrix of a small product would cost a quarter of its time.
    """

    def __init__(
        self, size_in: int, size_out: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._size_out = size_out
        like = torch.empty(0, size_in, dtype=dtype, device=device)
        self._is_packed = products.has_kernel(like)
        # Undefined until `load`, as all weights here.
        empty = products.panels if self._is_packed else like.new_empty
        self.tensor: Tensor = empty(size_in, size_out)

    def load(self, weight_OI: Tensor) -> None:
        """Load a matrix in the layout of Hugging Face."""
        if self._is_packed:
            products.packed(weight_OI.to(self.tensor), transposed=True, into=self.tensor)
        else:
            self.tensor.t().copy_(weight_OI)

    def columns(self, indexes_N: Tensor) -> Tensor:
        """Return some columns, [N, I]."""
        if self._is_packed:
            width = self.tensor.shape[2]
            return self.tensor[indexes_N // width, :, indexes_N % width]
        return self.tensor[:, indexes_N].t().contiguous()

    def product(self, x_NI: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product, [N, O]."""
        if self._is_packed:
            return products.multiply(x_NI, self.tensor, self._size_out, bias=bias)
        return x_NI @ self.tensor if bias is None else torch.addmm(bias, x_NI, self.tensor)

    def add_product(self, x_NI: Tensor, into_NO: Tensor) -> None:
        """Add the product to `into_NO` in place."""
        if self._is_packed:
            products.multiply(x_NI, self.tensor, self._size_out, into=into_NO)
        elif into_NO.device.type == "cpu":
            into_NO.addmm_(x_NI, self.tensor)
        else:
            # cuBLASLt refuses addmm_ into one row whose stride is 1 (seen with torch 2.11).
            into_NO += x_NI @ self.tensor


@dataclass(slots=True)
class LayerWeights:
    """The weights of one layer."""

    input_norm: Tensor
    qkv: Matrix
    """[C, (H + 2K) D]; queries include the attention scale; rotated pairs are adjacent."""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[H + K, D]"""
    out: Matrix
    out_norm: Tensor | None
    """Normalizes the output of attention."""
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    down_norm: Tensor | None
    """Normalizes the output of the MLP."""


class FusedWeights:
    """All weights of one policy. Norm weights are final factors: centred ones include their 1."""

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

        def matrix(size_in: int, size_out: int) -> Matrix:
            return Matrix(size_in, size_out, dtype=dtype, device=device)

        self.head = matrix(hidden, config.vocab_size)
        is_tied = config.tie_word_embeddings
        self._embedding = None if is_tied else empty(config.vocab_size, hidden)
        self.final_norm = empty(hidden)
        qkv_size = (heads + 2 * key_heads) * head_dim
        self.layers = [
            LayerWeights(
                input_norm=empty(hidden),
                qkv=matrix(hidden, qkv_size),
                qkv_bias=empty(qkv_size) if family.has_qkv_bias else None,
                qk_norm=empty(heads + key_heads, head_dim) if family.has_qk_norm else None,
                out=matrix(heads * head_dim, hidden),
                out_norm=empty(hidden) if family.has_output_norms else None,
                mlp_norm=empty(hidden),
                gate_up=matrix(hidden, 2 * ffn),
                down=matrix(ffn, hidden),
                down_norm=empty(hidden) if family.has_output_norms else None,
            )
            for _ in range(config.num_hidden_layers)
        ]

    def embed(self, token_ids_N: Tensor) -> Tensor:
        """Return the embeddings, [N, C]."""
        if self._embedding is None:
            return self.head.columns(token_ids_N)
        return F.embedding(token_ids_N, self._embedding)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy a full set of weights by Hugging Face names, in place; or copy nothing.

        Raises:
            EngineError: a name is missing or unknown, or a shape differs.
        """
        self._check(weights)
        embedding = weights["model.embed_tokens.weight"]
        if self._embedding is None:
            self.head.load(embedding)
        else:
            self._embedding.copy_(embedding)
            self.head.load(weights["lm_head.weight"])
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
        for tensor, source in zip(self._tensors(), other._tensors(), strict=True):
            tensor.copy_(source)

    def _tensors(self) -> Iterator[Tensor]:
        parts = [self.head, self._embedding, self.final_norm]
        for layer in self.layers:
            parts += (getattr(layer, field.name) for field in fields(layer))
        for part in parts:
            if part is not None:
                yield part.tensor if isinstance(part, Matrix) else part

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
        layer.out.load(part["self_attn.o_proj.weight"])
        layer.down.load(part["mlp.down_proj.weight"])
        layer.gate_up.load(torch.cat([part[f"mlp.{name}_proj.weight"] for name in ("gate", "up")]))
        if layer.qk_norm is not None:
            heads = self._config.num_attention_heads
            q_norm, k_norm = (self._norm(part[f"self_attn.{name}_norm.weight"]) for name in "qk")
            layer.qk_norm[:heads] = self._pairs(q_norm).float() * scale
            layer.qk_norm[heads:] = self._pairs(k_norm)
            scale = 1.0  # the norm would cancel it
        layer.qkv.load(self._qkv(part, "weight", scale))
        if layer.qkv_bias is not None:
            layer.qkv_bias.copy_(self._qkv(part, "bias", scale))

    def _qkv(self, part: Mapping[str, Tensor], kind: str, scale: float) -> Tensor:
        q, k, v = (part[f"self_attn.{name}_proj.{kind}"].float() for name in "qkv")
        return torch.cat([self._pairs(q) * scale, self._pairs(k), v])

    def _norm(self, weight: Tensor) -> Tensor:
        return 1 + weight.float() if self._config.family.has_centred_norms else weight

    def _pairs(self, x: Tensor) -> Tensor:
        """Make dimensions i and i + D/2 of each head adjacent, as one complex number each.

        Scores do not change, because queries and keys are permuted alike.
        """
        halves = x.unflatten(0, (-1, 2, self._config.head_dim // 2))
        paired: Tensor = halves.transpose(1, 2).flatten(0, 2)
        return paired

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        names = set(weights)
        if self._config.tie_word_embeddings:
            names.discard("lm_head.weight")
        require_same_names(self._shapes.keys() - names, names - self._shapes.keys())
        for name, shape in self._shapes.items():
            if weights[name].shape != shape:
                raise EngineError(
                    f"the published {name} has shape {tuple(weights[name].shape)}; "
                    f"the engine's is {tuple(shape)}"
                )
