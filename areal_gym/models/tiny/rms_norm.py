"""Root-mean-square normalisation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from areal_gym.models.tiny.kernels import pointwise_kernels as pointwise


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019)."""
    if pointwise.has_kernel(x, weight):
        return pointwise.rms_norm(x, weight, eps)
    # Under autocast x may be bfloat16 and the weight float32, for which no fused kernel exists.
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
