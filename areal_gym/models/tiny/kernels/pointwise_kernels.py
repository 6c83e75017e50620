"""Token-wise computations of the decoder, and sampling, by `pointwise.c`: in float32.

What these are made of in torch takes two to five times as many sweeps over memory.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_gym.models.tiny.kernels.kernel_library import reads, run

_ENOUGH = 1 << 16
"""The number of elements from which on another thread pays."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019).

    Torch computes it where there is no kernel.
    """
    if not reads(x, weight):
        # Under autocast x may be bfloat16 and the weight float32: no fused kernel takes both.
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    return _applied(_RmsNorm, x.contiguous(), weight, eps)


def turned(x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor, sign: int) -> Tensor:
    """Rotate pairs (i, i + D/2) of each head by their angles, or back (-1); no gradient."""
    x = x_NHD.contiguous()
    out, (num_tokens, heads, dim) = torch.empty_like(x), x.shape
    _by_rows("turn", num_tokens, dim, heads, float(sign), x, cos_ND, sin_ND, out)
    return out


def place(
    qkv_NHD: Tensor, angles_N: Tensor, rows_N: Tensor, positions_N: Tensor, cache: Tensor
) -> None:
    """Rotate queries and keys by their angles, in place, and copy keys and values to the cache.

    Args:
        qkv_NHD: of each token its queries, keys and values; pairs (2i, 2i + 1) are turned.
        angles_N: complex, [N, 1, D / 2].
        rows_N: the cache row of each token.
        positions_N: the place of each token in its row.
        cache: keys and values, [2, rows, K, positions, D].
    """
    num_tokens, num_heads, dim = qkv_NHD.shape
    _, _, key_heads, num_positions, _ = cache.shape
    sizes = num_heads - 2 * key_heads, key_heads, num_positions
    arrays = rows_N, positions_N, angles_N, qkv_NHD, cache[0], cache[1]
    _by_rows("place", num_tokens, dim, *sizes, *arrays)


def sample(logits_BV: Tensor, temperature_B: Tensor, u_B: Tensor) -> tuple[Tensor, Tensor]:
    """Sample token ids; return them and their log-probabilities, both [B]; all float32 on a CPU."""
    num_rows, size = logits_BV.shape
    ids, logprobs = torch.empty(num_rows, dtype=torch.long), torch.empty(num_rows)
    _by_rows("sample", num_rows, size, logits_BV.contiguous(), temperature_B, u_B, ids, logprobs)
    return ids, logprobs


def swiglu(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """Compute silu(gate) * up (Shazeer 2020), [N, F]; both may be halves of one array."""
    return _applied(_Swiglu, gate_NF, up_NF)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scales, size = torch.empty_like(x), x.new_empty(x.shape[:-1]), x.shape[-1]
        ctx.save_for_backward(x, weight, scales)
        _by_rows("rms_norm", scales.numel(), size, float(eps), x, weight, out, scales)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scales = ctx.saved_tensors
        into_x, into_weight = torch.empty_like(x), torch.zeros_like(weight)
        arrays = (gradients[0].contiguous(), x, weight, scales, into_x, into_weight)
        # On one thread: all rows add to the weight's gradient.
        rows = scales.numel()
        run("rms_norm_backward", rows, x.shape[-1], *arrays, least=max(1, rows))
        return into_x, into_weight, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if gate.stride() != up.stride() or gate.stride(1) != 1:
            gate, up = gate.contiguous(), up.contiguous()
        out = gate.new_empty(gate.shape)
        _by_rows("swiglu", *gate.shape, gate.stride(0), gate, up, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (x.contiguous() for x in ctx.saved_tensors)
        into_gate, into_up = torch.empty_like(gate), torch.empty_like(up)
        arrays = (gradients[0].contiguous(), gate, up, into_gate, into_up)
        _by_rows("swiglu_backward", *gate.shape, *arrays)
        return into_gate, into_up


def _applied(function: type[Any], *arguments: Any) -> Tensor:
    """Return its output, without torch's 20 us for gradients where none is wanted."""
    if torch.is_grad_enabled():
        out: Tensor = function.apply(*arguments)
    else:
        out = function.forward(SimpleNamespace(save_for_backward=lambda *_: None), *arguments)
    return out


def _by_rows(name: str, rows: int, size: int, *others: Any) -> None:
    run(name, rows, size, *others, least=_ENOUGH // size + 1)
