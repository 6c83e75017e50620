"""Token-wise computations of the decoder, and sampling, by `pointwise.c`: in float32.

What these are made of in torch takes two to five times as many sweeps over memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from areal_gym.models.tiny.kernels.kernel_library import address, function, reads, share_out

_ENOUGH = 1 << 16
"""The number of elements that is worth a thread."""


def has_kernel(*tensors: Tensor) -> bool:
    """Return whether the functions here support these: float32 on a CPU, rows of 16 n."""
    return reads((torch.float32,), tensors)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019)."""
    if not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        return _rms_norm(x.contiguous(), weight, eps, None)
    out: Tensor = _RmsNorm.apply(x.contiguous(), weight, eps)  # type: ignore[no-untyped-call]
    return out


def turned(x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor, sign: int) -> Tensor:
    """Rotate pairs (i, i + D/2) of each head by their angles, or back (-1); no gradient."""
    x = x_NHD.contiguous()
    out, (num_tokens, heads, dim) = torch.empty_like(x), x.shape
    kernel = function("turn", "nnnnfpppp")
    _by_rows(kernel, num_tokens, dim, heads, sign, *map(address, (x, cos_ND, sin_ND, out)))
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
    kernel = function("place", "nnnnnn" + "p" * 6)
    sizes = dim, num_heads - 2 * key_heads, key_heads, num_positions
    arrays = rows_N, positions_N, angles_N, qkv_NHD, cache[0], cache[1]
    _by_rows(kernel, num_tokens, *sizes, *map(address, arrays))


def sample(logits_BV: Tensor, temperature_B: Tensor, u_B: Tensor) -> tuple[Tensor, Tensor]:
    """Sample token ids; return them and their log-probabilities, both [B]; all float32 on a CPU."""
    logits, (num_rows, size) = logits_BV.contiguous(), logits_BV.shape
    ids, logprobs = torch.empty(num_rows, dtype=torch.long), torch.empty(num_rows)
    kernel = function("sample", "nnnppppp")
    addresses = [address(x) for x in (logits, temperature_B, u_B, ids, logprobs)]

    def compute(row: int, end: int) -> None:
        if kernel(row, end, size, *addresses):
            raise MemoryError(f"no memory for a row of {size} logits")

    share_out(compute, num_rows, least=_ENOUGH // size + 1)
    return ids, logprobs


def swiglu(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """Compute silu(gate) * up (Shazeer 2020), [N, F]; both may be halves of one array."""
    if not (torch.is_grad_enabled() and gate_NF.requires_grad):
        return _swiglu(gate_NF, up_NF)
    out: Tensor = _Swiglu.apply(gate_NF, up_NF)  # type: ignore[no-untyped-call]
    return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scales = x.new_empty(x.shape[:-1])
        ctx.save_for_backward(x, weight, scales)
        return _rms_norm(x, weight, eps, scales)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scales = ctx.saved_tensors
        into_x, into_weight = torch.empty_like(x), torch.zeros_like(weight)
        arrays = (gradients[0].contiguous(), x, weight, scales, into_x, into_weight)
        # On one thread: all rows add to the weight's gradient.
        kernel = function("rms_norm_backward", "nnnpppppp")
        kernel(0, scales.numel(), x.shape[-1], *map(address, arrays))
        return into_x, into_weight, None


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = (x.contiguous() for x in ctx.saved_tensors)
        into_gate, into_up = torch.empty_like(gate), torch.empty_like(up)
        arrays = (gradients[0].contiguous(), gate, up, into_gate, into_up)
        kernel = function("swiglu_backward", "nnnppppp")
        _by_rows(kernel, *gate.shape, *map(address, arrays))
        return into_gate, into_up


def _rms_norm(x: Tensor, weight: Tensor, eps: float, scales: Tensor | None) -> Tensor:
    out, size = torch.empty_like(x), x.shape[-1]
    kernel = function("rms_norm", "nnnfpppp")
    _by_rows(kernel, x.numel() // size, size, eps, *map(address, (x, weight, out, scales)))
    return out


def _swiglu(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    if gate_NF.stride() != up_NF.stride() or gate_NF.stride(1) != 1:
        gate_NF, up_NF = gate_NF.contiguous(), up_NF.contiguous()
    out = gate_NF.new_empty(gate_NF.shape)
    kernel = function("swiglu", "nnnnppp")
    _by_rows(kernel, *gate_NF.shape, gate_NF.stride(0), *map(address, (gate_NF, up_NF, out)))
    return out


def _by_rows(kernel: Callable[..., int], rows: int, size: int, *others: Any) -> None:
    """Call the C function on several threads, each with some rows."""

    def compute(row: int, end: int) -> None:
        kernel(row, end, size, *others)

    share_out(compute, rows, least=_ENOUGH // size + 1)
