"""A Llama-like decoder over a flat token axis, with Hugging Face's parameter names.

One network for all of `families.FAMILIES`: what differs between them is data.

Sequences are concatenated, not padded: everything but attention works per token, and attention
is handed in (`Attend`), so that one model serves padded, packed and prefix-tree batches.

Axes: `N` tokens of the batch, `H` query heads, `K` key/value heads, `D` head dimension,
`C` hidden size, `V` vocabulary.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from areal_gym.models.lora_weights import NetworkTensor, network_tensors
from areal_gym.models.policy_model import PolicyModel
from areal_gym.models.tiny.attend import Attend, softcapped
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.models.tiny.families import Activation
from areal_gym.models.tiny.hf_config import config_to_hf
from areal_gym.models.tiny.kernels import pointwise_kernels as pointwise
from areal_gym.models.tiny.kernels.kernel_library import reads
from areal_gym.models.tiny.kernels.product_kernels import linear
from areal_gym.models.tiny.rope import apply_rope, rope_amplitude, rope_frequencies, rope_tables

if TYPE_CHECKING:  # its attention is made of parts of this package
    from areal_gym.models.flat_batch import PackedBatch

Turns = tuple[Tensor, Tensor]
"""cos and sin of each token's angles, [N, D] each."""
See = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`Attend` of one layer, whose window and soft cap are known."""


class RMSNorm(nn.Module):
    """Computes x / rms(x) * weight (Zhang & Sennrich 2019); Gemma's factor is 1 + weight."""

    def __init__(self, size: int, config: DecoderConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = config.rms_norm_eps
        self.is_centred = config.family.has_centred_norms

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis; the shape stays."""
        weight = 1 + self.weight if self.is_centred else self.weight
        out = pointwise.rms_norm(x, weight, self.eps)
        if torch.is_autocast_enabled(x.device.type):
            # Once here, not once in each projection that reads it, and in their backward passes.
            out = out.to(torch.get_autocast_dtype(x.device.type))
        return out


class Linear(nn.Linear):
    """A projection; `projected` computes several of the same tokens at once."""

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        """Map [N, I] to [N, O]."""
        return linear(input, [self.weight], [self.bias])[0]


def projected(x_NC: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """Return the output of each layer for the same tokens; layers may be wrapped by adapters."""
    plain = [layer for layer in layers if type(layer) is Linear]
    if len(plain) < len(layers):
        return [layer(x_NC) for layer in layers]
    return linear(x_NC, [layer.weight for layer in plain], [layer.bias for layer in plain])


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; the caller decides what attends to what."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query, key = (
            heads * config.head_dim
            for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        bias = config.family.has_qkv_bias
        self.q_proj = Linear(config.hidden_size, query, bias=bias)
        self.k_proj = Linear(config.hidden_size, key, bias=bias)
        self.v_proj = Linear(config.hidden_size, key, bias=bias)
        self.o_proj = Linear(query, config.hidden_size, bias=False)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.family.has_qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config)
            self.k_norm = RMSNorm(config.head_dim, config)
        # `Attend` divides the scores by sqrt(D), whatever the model wants.
        wanted = config.query_pre_attn_scalar or config.head_dim
        self.query_scale = math.sqrt(config.head_dim / wanted)

    def forward(
        self, x_NC: Tensor, turns: Turns, see: See, wanted_M: Tensor | None = None
    ) -> Tensor:
        """Map [N, C] to [N, C], or to [M, C], for the tokens `wanted_M` only."""
        heads = (x_NC.shape[0], -1, self.head_dim)
        qkv = projected(x_NC, self.q_proj, self.k_proj, self.v_proj)
        q_NHD, k_NKD, v_NKD = (x.view(heads) for x in qkv)
        if self.q_norm is not None and self.k_norm is not None:
            q_NHD, k_NKD = self.q_norm(q_NHD), self.k_norm(k_NKD)
        q_NHD, k_NKD = apply_rope(q_NHD, *turns), apply_rope(k_NKD, *turns)
        if self.query_scale != 1.0:
            q_NHD = q_NHD * self.query_scale
        out_NHD = see(q_NHD, k_NKD, v_NKD)
        if wanted_M is not None:
            out_NHD = out_NHD.index_select(0, wanted_M)
        out: Tensor = self.o_proj(out_NHD.flatten(1))
        return out


class MLP(nn.Module):
    """SwiGLU or GeGLU (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = config.family.activation

    def forward(self, x_NC: Tensor) -> Tensor:
        """Map [N, C] to [N, C]."""
        gate_NF, up_NF = projected(x_NC, self.gate_proj, self.up_proj)
        gated_NF = gated(gate_NF, up_NF, self.activation)
        out: Tensor = self.down_proj(gated_NF)
        return out


class Layer(nn.Module):
    """Attention and MLP, each normalised first and added to the residual.

    Gemma 2 and 3 normalise what they add, too. In Hugging Face's names `post_attention_layernorm`
    is then that of attention's output; elsewhere it is that before the MLP.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config)
        self.mlp = MLP(config)
        self.has_output_norms = config.family.has_output_norms
        if self.has_output_norms:
            self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config)
            self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config)

    def forward(
        self, x_NC: Tensor, turns: Turns, see: See, wanted_M: Tensor | None = None
    ) -> Tensor:
        """Map [N, C] to [N, C], or to [M, C], for the tokens `wanted_M` only."""
        seen_NC = self.self_attn(self.input_layernorm(x_NC), turns, see, wanted_M)
        if wanted_M is not None:
            x_NC = x_NC.index_select(0, wanted_M)
        if not self.has_output_norms:
            x_NC = x_NC + seen_NC
            thought_NC = self.mlp(self.post_attention_layernorm(x_NC))
        else:
            x_NC = x_NC + self.post_attention_layernorm(seen_NC)
            thought_NC = self.mlp(self.pre_feedforward_layernorm(x_NC))
            thought_NC = self.post_feedforward_layernorm(thought_NC)
        out: Tensor = x_NC + thought_NC
        return out


class _Body(nn.Module):
    """The part that Hugging Face names `model.*`: all but the output projection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config)


class Decoder(PolicyModel):
    """The policy network. `build_decoder` draws new weights, `load_checkpoint` reads them.

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
        with torch.device("meta"):  # initial values are not needed, so do not compute them
            self.model = _Body(config)
            self.lm_head: nn.Linear | None = None
            if not config.tie_word_embeddings:
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.to(dtype)
        self.to_empty(device=device)
        # No buffers: `decoder.bfloat16()` would round the frequencies.
        size, local_theta = config.head_dim, config.rope_local_theta
        self._inv_freq = rope_frequencies(size, config.rope_theta, config.rope_scaling, device)
        self._local_inv_freq = self._inv_freq
        if local_theta is not None:
            self._local_inv_freq = rope_frequencies(size, local_theta, None, device)

    @property
    def lm_head_weight(self) -> Tensor:
        """The weights [V, C]: hidden states times these, transposed, are the logits."""
        head: Tensor = (self.lm_head or self.model.embed_tokens).weight
        return head

    @property
    def shape(self) -> DecoderConfig:
        """The sizes of the model."""
        return self.config

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return self.model.layers

    @property
    def network(self) -> nn.Module:  # type: ignore[override]
        """This module: its names are the checkpoint's."""
        return self

    def network_tensors(self) -> Iterator[NetworkTensor]:
        """Yield the tensors, which have the checkpoint's names."""
        return network_tensors(self)

    def duplicate_trunk(self) -> Decoder:
        """Return a copy in float32 that gives hidden states only."""
        trunk = copy.deepcopy(self, {id(self.lm_head): None})
        return trunk.float()

    def hf_config(self) -> dict[str, Any]:
        """Return the content of the checkpoint's `config.json`."""
        return config_to_hf(self.config)

    def forward(self, batch: PackedBatch, wanted_M: Tensor | None = None) -> Tensor:
        """Return hidden states of a flat batch, [N, C], or [M, C]; see `PolicyModel.forward`."""
        context = self.context
        if context.size == 1:
            return self.hidden_states(batch.token_ids_N, batch.positions_N, batch.attend, wanted_M)
        num_tokens = len(batch.token_ids_N)

        def attend(
            q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, window: int | None, softcap: float | None
        ) -> Tensor:
            inner = functools.partial(batch.attend, window=window, softcap=softcap)
            return context.attend(inner, q_NHD, k_NKD, v_NKD, num_tokens)

        hidden_nC = self.hidden_states(
            context.own(batch.token_ids_N), context.own(batch.positions_N), attend
        )
        return hidden_nC if wanted_M is None else context.wanted(hidden_nC, wanted_M, num_tokens)

    def hidden_states(
        self,
        token_ids_N: Tensor,
        positions_N: Tensor,
        attend: Attend,
        wanted_M: Tensor | None = None,
    ) -> Tensor:
        """Compute hidden states after the final norm, [N, C]; `logits` maps them to scores.

        With `wanted_M`, places on the flat axis, those of these tokens only, [M, C]: the last layer
        computes keys and values of all, and the rest for them.
        """
        config = self.config
        x_NC = self.model.embed_tokens(token_ids_N)
        if config.embedding_scale != 1.0:
            x_NC = x_NC * config.embedding_scale
        if self._inv_freq.device != x_NC.device:
            self._inv_freq = self._inv_freq.to(x_NC.device)
            self._local_inv_freq = self._local_inv_freq.to(x_NC.device)
        amplitude = rope_amplitude(config.rope_scaling)
        tables = rope_tables(self._inv_freq, positions_N, x_NC.dtype, amplitude)
        local_tables = tables
        if config.rope_local_theta is not None:
            local_tables = rope_tables(self._local_inv_freq, positions_N, x_NC.dtype)
        cap = config.attn_logit_softcapping
        for layer, window in zip(self.model.layers, config.windows, strict=True):
            wanted = wanted_M if layer is self.model.layers[-1] else None
            see = functools.partial(attend, window=window, softcap=cap)
            inputs = (x_NC, tables if window is None else local_tables, see, wanted)
            if self.recomputes_layers and torch.is_grad_enabled():
                x_NC = checkpoint(layer, *inputs, use_reentrant=False)
            else:
                x_NC = layer(*inputs)
        out: Tensor = self.model.norm(x_NC)
        return out

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """Map [N, C] to [N, V]."""
        (logits_NV,) = linear(hidden_NC, [self.lm_head_weight], [None])
        return softcapped(logits_NV, self.config.final_logit_softcapping)


def build_decoder(
    config: DecoderConfig, *, seed: int, device: torch.device | str = "cpu"
) -> Decoder:
    """Make a decoder with new float32 weights, which depend on `seed` only.

    Normal with `initializer_range`; what writes to the residual stream is scaled down by
    sqrt(2 layers), so that its variance does not grow with depth (Radford et al. 2019).
    """
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(config)
    std = config.initializer_range
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(0.0 if config.family.has_centred_norms else 1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                residual_std = std / math.sqrt(2 * config.num_hidden_layers)
                parameter.normal_(0.0, residual_std, generator=generator)
            else:
                parameter.normal_(0.0, std, generator=generator)
    return decoder.to(device)


def gated(gate_NF: Tensor, up_NF: Tensor, activation: Activation) -> Tensor:
    """Combine the two projections of a gated MLP: activation(gate) * up, [N, F]."""
    if activation != "silu":
        return F.gelu(gate_NF, approximate="tanh") * up_NF
    if reads(gate_NF, up_NF):
        return pointwise.swiglu(gate_NF, up_NF)
    return F.silu(gate_NF) * up_NF
