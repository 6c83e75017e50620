"""Root-mean-square normalisation; on a CPU with a backward pass of few sweeps over memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019); same shape."""
    if x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32:
        # Without a gradient, too: a policy that is scored twice gets the same numbers.
        out: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
        return out
    # Under autocast x may be bfloat16 and the weight float32, for which no fused kernel exists.
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


class _RmsNorm(torch.autograd.Function):
    """torch has no kernel for CPUs: what it is made of there takes more than twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        out: Tensor = (x * scale).mul_(weight)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        product = gradient * normed
        along = (product @ weight)[..., None].div_(x.shape[-1])
        into_x = (gradient * weight).addcmul_(normed, along, value=-1).mul_(scale)
        return into_x, product.flatten(0, -2).sum(0), None
