"""Attention of a packed micro-batch by torch's variable-length kernel: no rectangle, no mask.

`torch.nn.attention.varlen` (FlashAttention-2, Dao 2023) works on GPUs of the Ampere generation or
newer, in float16 and bfloat16. Each prompt and each continuation is a segment: its queries are a
run of the flat axis, its keys are gathered, the prompt's and its own, and the last query attends to
all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

_MAX_HEAD_DIM = 256
"""The kernel's limit."""


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """The positions of each segment's queries and keys."""

    key_index_P: Tensor
    """Flat positions of all segments' keys, one segment after the other."""
    query_ends: Tensor
    """[segments + 1], int32: 0, and the end of each segment's queries on the flat axis."""
    key_ends: Tensor
    """[segments + 1], int32: the same for the keys, in `key_index_P`."""
    most_queries: int
    most_keys: int

    def attend(
        self,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        *,
        window: int | None = None,
        kernel: Callable[..., Any] | None = None,
    ) -> Tensor:
        """Compute attention as `Attend` does, [N, H, D]; `kernel` is torch's by default."""
        kernel = kernel or _kernel()
        assert kernel is not None
        out_NHD: Tensor = kernel(
            # Rotation is in float32 even if autocast computes the rest in bfloat16.
            q_NHD.to(v_NKD.dtype),
            k_NKD.to(v_NKD.dtype)[self.key_index_P],
            v_NKD[self.key_index_P],
            self.query_ends,
            self.key_ends,
            self.most_queries,
            self.most_keys,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=True,
        )
        return out_NHD


def plan_varlen(segments: Sequence[tuple[range, range]], device: torch.device | str) -> VarlenPlan:
    """Make the plan of some segments.

    Args:
        segments: (flat positions of a prompt, of its continuation) per segment; the continuation
            attends to both. A prompt itself is a segment without a prompt. The second ranges cover
            the flat axis.
        device: the device of the tensors.
    """
    ordered = sorted(segments, key=lambda pair: pair[1].start)
    keys = [[*prompt, *mine] for prompt, mine in ordered]
    key_ends = [0, *accumulate(len(part) for part in keys)]
    query_ends = [0, *(mine.stop for _, mine in ordered)]
    return VarlenPlan(
        key_index_P=torch.tensor([i for part in keys for i in part], device=device),
        query_ends=torch.tensor(query_ends, dtype=torch.int32, device=device),
        key_ends=torch.tensor(key_ends, dtype=torch.int32, device=device),
        most_queries=max((len(mine) for _, mine in ordered), default=0),
        most_keys=max(map(len, keys), default=0),
    )


def fits_kernel(v_NKD: Tensor, softcap: float | None) -> bool:
    """Return whether the kernel supports these: on a GPU, in 16 bits, without soft caps."""
    return bool(
        v_NKD.is_cuda
        and v_NKD.dtype in (torch.float16, torch.bfloat16)
        and softcap is None
        and v_NKD.shape[-1] <= _MAX_HEAD_DIM
        and torch.cuda.get_device_capability(v_NKD.device) >= (8, 0)
        and _kernel()
    )


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    """Return the kernel; None if torch is older than it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "enable_gqa" in inspect.signature(varlen_attn).parameters else None
