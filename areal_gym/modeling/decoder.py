"""A Llama/Qwen2/Qwen3 decoder over a flat token axis, with Hugging Face's parameter names.

Sequences are concatenated, not padded: everything but attention works per token, and attention
is handed in (`Attend`), so that one model serves padded, packed and prefix-tree batches.

Axes: `N` tokens of the batch, `H` query heads, `K` key/value heads, `D` head dimension,
`C` hidden size, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from areal_gym.modeling.config import DecoderConfig

__all__ = [
    "Attend",
    "Decoder",
    "apply_rope",
    "build_decoder",
    "causal_attend",
    "rope_frequencies",
    "rope_tables",
]


class Attend(Protocol):
    """Who sees whom: the attention of one layer; called once per layer, in order."""

    def __call__(self, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, /) -> Tensor:
        """Softmax attention, scale 1/sqrt(D), query head h reading key head h // (H // K).

        Returns:
            [N, H, D]
        """
        ...


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape; the last axis is normalised."""
        # Under autocast x may be bfloat16 and the weight float32, for which no fused kernel exists.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; who sees whom is the caller's."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query, key = (
            heads * config.head_dim
            for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        bias = config.has_qkv_bias
        self.q_proj = nn.Linear(config.hidden_size, query, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, key, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, key, bias=bias)
        self.o_proj = nn.Linear(query, config.hidden_size, bias=False)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.has_qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x_NC: Tensor, cos_ND: Tensor, sin_ND: Tensor, attend: Attend) -> Tensor:
        """[N, C] -> [N, C]."""
        heads = (x_NC.shape[0], -1, self.head_dim)
        q_NHD, k_NKD = self.q_proj(x_NC).view(heads), self.k_proj(x_NC).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_NHD, k_NKD = self.q_norm(q_NHD), self.k_norm(k_NKD)
        q_NHD, k_NKD = apply_rope(q_NHD, cos_ND, sin_ND), apply_rope(k_NKD, cos_ND, sin_ND)
        out_NHD = attend(q_NHD, k_NKD, self.v_proj(x_NC).view(heads))
        out: Tensor = self.o_proj(out_NHD.flatten(1))
        return out


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_NC: Tensor) -> Tensor:
        """[N, C] -> [N, C]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_NC)) * self.up_proj(x_NC))
        return out


class Layer(nn.Module):
    """Attention and MLP, each normalised first and added to the residual."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_NC: Tensor, cos_ND: Tensor, sin_ND: Tensor, attend: Attend) -> Tensor:
        """[N, C] -> [N, C]."""
        x_NC = x_NC + self.self_attn(self.input_layernorm(x_NC), cos_ND, sin_ND, attend)
        out: Tensor = x_NC + self.mlp(self.post_attention_layernorm(x_NC))
        return out


class _Body(nn.Module):
    """What Hugging Face names `model.*`: all but the output projection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """The policy network. `build_decoder` draws fresh weights, `load_checkpoint` reads them.

    `state_dict()` has the names of a Hugging Face checkpoint; with tied embeddings there is no
    `lm_head.weight`, as in the files. The constructor leaves the weights undefined.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):  # no time lost on initial values that nobody wants
            self.model = _Body(config)
            self.lm_head: nn.Linear | None = None
            if not config.tie_word_embeddings:
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.to(dtype)
        self.to_empty(device=device)
        self.recomputes_layers = False
        """Whether the backward pass computes a layer's inner values again instead of keeping them:
        a third more work for a fraction of the memory."""
        # No buffer: `decoder.bfloat16()` would round the frequencies.
        self._inv_freq = rope_frequencies(config, device)

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, C]: hidden states times this, transposed, are the logits."""
        head: Tensor = (self.lm_head or self.model.embed_tokens).weight
        return head

    def forward(self, token_ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the final norm, [N, C]; logits are these @ `lm_head_weight.T`."""
        x_NC = self.model.embed_tokens(token_ids_N)
        if self._inv_freq.device != x_NC.device:
            self._inv_freq = self._inv_freq.to(x_NC.device)
        cos_ND, sin_ND = rope_tables(self._inv_freq, positions_N, x_NC.dtype)
        for layer in self.model.layers:
            if self.recomputes_layers and torch.is_grad_enabled():
                x_NC = checkpoint(layer, x_NC, cos_ND, sin_ND, attend, use_reentrant=False)
            else:
                x_NC = layer(x_NC, cos_ND, sin_ND, attend)
        out: Tensor = self.model.norm(x_NC)
        return out


def build_decoder(
    config: DecoderConfig, *, seed: int, device: torch.device | str = "cpu"
) -> Decoder:
    """Fresh float32 weights that depend on `seed` only, not on the device or global state.

    Normal with `initializer_range`; what writes to the residual stream is scaled down by
    sqrt(2 layers), so that its variance does not grow with depth (Radford et al. 2019).
    """
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(config)
    std = config.initializer_range
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                residual_std = std / math.sqrt(2 * config.num_hidden_layers)
                parameter.normal_(0.0, residual_std, generator=generator)
            else:
                parameter.normal_(0.0, std, generator=generator)
    return decoder.to(device)


def rope_frequencies(config: DecoderConfig, device: torch.device | str = "cpu") -> Tensor:
    """[D / 2] float32 angular frequencies (Su et al. 2021), stretched as Llama 3.1 does."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is not None:
        # Turns within the original context: few are stretched, many are kept, between is mixed.
        num_turns = scaling.original_max_position_embeddings * inv_freq / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((num_turns - low) / (high - low)).clamp(0.0, 1.0)
        inv_freq = kept * inv_freq + (1 - kept) * inv_freq / scaling.factor
    return inv_freq.to(device)


def rope_tables(
    inv_freq: Tensor, positions_N: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """cos and sin, each [N, D]; the angles are computed in float32."""
    angles = positions_N[:, None].float() * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
    """Rotate each pair (i, i + D/2) of each head by its angle."""
    first, second = x_NHD.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return x_NHD * cos_ND[:, None] + turned * sin_ND[:, None]


def causal_attend(lengths: Sequence[int]) -> Attend:
    """Each of the concatenated sequences attends to itself, causally. Simple, not the fastest.

    Example: `decoder(ids_N, positions_N, causal_attend([5, 3]))`
    """
    sizes = list(lengths)

    def attend(q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, /) -> Tensor:
        rows = []
        for q, k, v in zip(*(torch.split(x, sizes) for x in (q_NHD, k_NKD, v_NKD)), strict=True):
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, T, D]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            rows.append(out[0].transpose(0, 1))
        return torch.cat(rows)

    return attend
