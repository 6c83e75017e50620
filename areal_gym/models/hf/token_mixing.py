"""Attention and recurrence of transformers' models, registered there as "areal_packed".

    model.forward -> each layer -> packed_attention(q, k, v)  -> TokenMixing.attend
                                   a recurrent layer's forward -> TokenMixing.recur
                     which one? `current_mixing`, set around the forward pass by `mixing_with`

transformers has a registry of attention functions and one of mask functions. Ours builds no mask:
who sees whom is the caller's business, so that a group's prompt is forwarded once, and no model has
to find the borders of packed sequences by itself. (Seven of 29 architectures do that wrongly,
silently, by 1.3 to 4.8 nats, when positions start anew; measured with transformers 5.23.)

What a recurrent layer (gated delta rule, short convolution, Mamba) keeps of earlier tokens must not
flow from one sequence into the next. Their kernels take borders on GPUs only; called once for each
sequence, any of them is exact, on any device, at the price of shorter calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "areal_packed"
"""The `attn_implementation` of models that mix tokens as we say."""
RECURRENT = ("linear_attn", "conv", "mamba", "short_conv", "mixer")
"""Names of a decoder layer's parts that are recurrent, if they convolve and have no queries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRules:
    """The rules by which a layer turns queries and keys into attention weights."""

    scale: float
    """What products are multiplied by."""
    window: int | None = None
    """A token sees itself and the `window - 1` before it."""
    chunk: int | None = None
    """Tokens whose positions lie in one chunk see each other only (Llama 4)."""
    softcap: float | None = None
    """Scores s become c tanh(s / c) (Gemma 2)."""
    sinks_H: Tensor | None = None
    """A logit per head that takes part in the softmax without a value (gpt-oss)."""


class TokenMixing(Protocol):
    """Decides which tokens see each other in one forward pass over a flat axis of `N` tokens.

    And by which experts they are computed.
    """

    def attend(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKE: Tensor, rules: ScoreRules
    ) -> Tensor:
        """Return [N, H, E]; values may have another width `E` than keys."""
        ...

    def recur(
        self, forward: Callable[..., Tensor], hidden_1NC: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        """Return what a recurrent part's own `forward` makes of each sequence, [1, N, C]."""
        ...

    def route(self, layer: int, own_NK: Tensor, num_experts: int) -> Tensor:
        """Return the experts of each token, [N, K], where a layer's router chose `own_NK`."""
        ...


_MIXING: ContextVar[TokenMixing] = ContextVar("areal_gym_token_mixing")


@contextmanager
def mixing_with(mixing: TokenMixing) -> Iterator[None]:
    """Make `mixing` the one that attention and recurrent layers ask, in this context."""
    token = _MIXING.set(mixing)
    try:
        yield
    finally:
        _MIXING.reset(token)


def current_mixing() -> TokenMixing:
    """Return what the forward pass under way mixes tokens with.

    Raises:
        RuntimeError: the model was called outside of `mixing_with`.
    """
    mixing = _MIXING.get(None)
    if mixing is None:
        raise RuntimeError(f"a model with attn_implementation={NAME!r} runs inside HFPolicy only")
    return mixing


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions do, [1, H, N, D] -> [1, N, H, E].

    `module` is the attention layer; its config says of which kind it is. The mask is not used.
    """
    q_NHD, k_NKD, v_NKE = (x[0].transpose(0, 1) for x in (query, key, value))
    kinds = getattr(module.config, "layer_types", None)
    kind = None if kinds is None else kinds[module.layer_idx]
    rules = ScoreRules(
        scale=q_NHD.shape[-1] ** -0.5 if scaling is None else scaling,
        window=None if kind == "full_attention" else sliding_window,
        chunk=module.config.attention_chunk_size if kind == "chunked_attention" else None,
        softcap=softcap,
        sinks_H=s_aux,
    )
    return current_mixing().attend(module.layer_idx, q_NHD, k_NKD, v_NKE, rules)[None], None


def masked_attention(
    q_BQHD: Tensor,
    k_BKHD: Tensor,
    v_BKHE: Tensor,
    mask_B1QK: Tensor,
    age_BQK: Tensor,
    query_position_BQ: Tensor,
    rules: ScoreRules,
    is_seen_BQK: Tensor | None = None,
) -> Tensor:
    """Attend in rectangles with everything that fused kernels lack.

    Args:
        q_BQHD: queries.
        k_BKHD: keys, with as many heads as queries or a divisor of that.
        v_BKHE: values.
        mask_B1QK: 0 where a query may look, -inf elsewhere.
        age_BQK: how many tokens each key lies before each query.
        query_position_BQ: where in its sequence each query stands.
        rules: the layer's.
        is_seen_BQK: keys that queries see whatever mask and rules say: of their own picture.

    Returns:
        [B, Q, H, E]. A query that sees nothing gets zeros.
    """
    num_groups = q_BQHD.shape[2] // k_BKHD.shape[2]
    q_BHQD = q_BQHD.transpose(1, 2)
    k_BHKD, v_BHKE = (
        x.transpose(1, 2).repeat_interleave(num_groups, dim=1) for x in (k_BKHD, v_BKHE)
    )
    mask_B1QK = mask_B1QK.to(q_BHQD.dtype)
    if rules.window is not None:
        mask_B1QK = mask_B1QK.masked_fill((age_BQK >= rules.window)[:, None], -torch.inf)
    if rules.chunk is not None:
        is_before_BQK = age_BQK > query_position_BQ[:, :, None] % rules.chunk
        mask_B1QK = mask_B1QK.masked_fill(is_before_BQK[:, None], -torch.inf)
    if is_seen_BQK is not None:
        mask_B1QK = mask_B1QK.masked_fill(is_seen_BQK[:, None], 0.0)
    scores = q_BHQD @ k_BHKD.transpose(-1, -2) * rules.scale
    if rules.softcap is not None:
        scores = rules.softcap * torch.tanh(scores / rules.softcap)
    scores = scores + mask_B1QK
    if rules.sinks_H is not None:
        sinks = rules.sinks_H.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks.to(scores.dtype)), dim=-1)
    shares = scores.float().softmax(-1).nan_to_num(0.0)[..., : v_BHKE.shape[2]]
    return (shares.to(v_BHKE.dtype) @ v_BHKE).transpose(1, 2)


def recurrent_parts(layers: nn.ModuleList) -> list[nn.Module]:
    """Return the recurrent parts of decoder layers, in order."""
    parts = []
    for layer in layers:
        for name in RECURRENT:
            part = getattr(layer, name, None)
            if isinstance(part, nn.Module) and _is_recurrent(part):
                parts.append(part)
    return parts


def let_mixing_decide(part: nn.Module) -> None:
    """Let the current `TokenMixing` call a recurrent part's forward, sequence by sequence."""
    part.__class__ = _mixed_class(type(part))


def _mixed_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass whose forward asks the current mixing; copies of a part keep it."""

    def forward(self: nn.Module, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        return current_mixing().recur(functools.partial(kind.forward, self), hidden_states, kwargs)

    return type(f"Mixed{kind.__name__}", (kind,), {"forward": forward})


def _is_recurrent(part: nn.Module) -> bool:
    """Attention has queries; an MLP convolves nothing."""
    names = {name.rpartition(".")[2] for name, _ in part.named_modules()}
    return not names & {"q_proj", "qkv_proj"} and any(
        isinstance(module, nn.Conv1d) for module in part.modules()
    )


def _no_mask(**_: Any) -> None:
    """Build no mask: [N, N] of a packed batch would be its largest tensor."""


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _no_mask)
