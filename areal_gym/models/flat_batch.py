"""A batch on one flat axis of N tokens, without padding in matrix products, and its attention.

Rows that begin with the same prompt share its tokens (a prefix tree of depth one): every
continuation attends to it and to itself. On GPUs, in 16 bits, torch's variable-length kernel does
that (FlashAttention-2, Dao 2023), on CPUs our own (`areal_gym.models.tiny.kernels`). Where neither
can (soft caps, other types, a CPU without a compiler), tokens are gathered into small rectangles,
attended with a mask, and scattered.

    flat axis   [prompt A][prompt B] ... [cont. A1][cont. A2][cont. B1] ...
    rectangles  prompts: q = k = the prompt, causal
                continuations: q = the continuation, k = its prompt (right-aligned) + itself
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from areal_gym.message_types import ImageRef
from areal_gym.models.device import has_varlen_attention
from areal_gym.models.tiny.attend import Attend, masked_softmax
from areal_gym.models.tiny.kernels.attention_kernels import attend, has_kernel

_MAX_HEAD_DIM = 256
"""The limit of the variable-length kernel."""
_MAX_ROWS = 64
"""The limit of rows in one rectangle."""


@dataclass(frozen=True, slots=True)
class Block:
    """One rectangle of attention: `B` rows, `Q` queries, `K` keys."""

    query_index_BQ: Tensor
    """Flat positions of the queries; padding has arbitrary ones."""
    key_index_BK: Tensor
    mask_B1QK: Tensor
    """0 where a query attends, -inf elsewhere; every query attends to at least one key."""
    query_position_BQ: Tensor
    """The position of each query in its sequence."""
    key_position_BK: Tensor
    longest: int
    """An upper bound of the distance between two tokens."""
    is_real_BK: Tensor
    """Whether a key is no padding."""
    _windowed: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def mask(self, window: int | None) -> Tensor:
        """Return `mask_B1QK` without keys that are `window` tokens old or older; computed once."""
        if window is None or window >= self.longest:
            return self.mask_B1QK
        if window not in self._windowed:
            age_BQK = self.query_position_BQ[:, :, None] - self.key_position_BK[:, None]
            is_too_old = (age_BQK >= window)[:, None]
            self._windowed[window] = self.mask_B1QK.masked_fill(is_too_old, -torch.inf)
        return self._windowed[window]


Segment = tuple[range, range]
"""Flat positions of a prompt (or none), and of the tokens that attend to it and to themselves."""


class VarlenPlan(NamedTuple):
    """The positions of each segment's queries and keys, in the order of the kernel's arguments."""

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
        window: int | None,
        kernel: Callable[..., Any] | None = None,
    ) -> Tensor:
        """Compute attention as `Attend` does, [N, H, D]; `kernel` is torch's by default."""
        kernel = kernel or _kernel()
        assert kernel is not None
        # Rotation is in float32 even if autocast computes the rest in bfloat16.
        k_PKD, v_PKD = k_NKD.to(v_NKD.dtype)[self.key_index_P], v_NKD[self.key_index_P]
        known = _parameters_of(kernel)
        options: dict[str, Any] = {"enable_gqa": True}
        if "enable_gqa" not in known:  # before torch 2.12: as many heads of keys as of queries
            options = {}
            k_PKD, v_PKD = (
                x.repeat_interleave(q_NHD.shape[1] // x.shape[1], dim=1) for x in (k_PKD, v_PKD)
            )
        if "window_size" in known:
            options["window_size"] = (-1 if window is None else window - 1, 0)
        else:
            options["is_causal"] = True
        out_NHD: Tensor = kernel(q_NHD.to(v_NKD.dtype), k_PKD, v_PKD, *self[1:], **options)
        return out_NHD


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch on the flat axis."""

    token_ids_N: Tensor
    positions_N: Tensor
    segments: tuple[Segment, ...]
    """Prompts first, then siblings side by side; the second ranges cover the flat axis."""
    row_index: tuple[np.ndarray[Any, Any], ...]
    """For each row, as int64, the flat position of each of its tokens (shared ones included)."""
    images: tuple[tuple[ImageRef, ...], ...] | None = None
    """The pictures of each row, `start` within it; None in an update without pictures on any rank,
    empty for rows that only keep pace with ranks whose rows have some."""
    routed_experts_NLK: Tensor | None = None
    """The experts that an engine recorded, int16; -1 for tokens without a record."""

    def attend(
        self, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, window: int | None, softcap: float | None
    ) -> Tensor:
        """Compute the attention of this batch; see `Attend`."""
        if fits_kernel(v_NKD, softcap, window):
            return self.varlen_plan.attend(q_NHD, k_NKD, v_NKD, window)
        if softcap is None and has_kernel(q_NHD, k_NKD, v_NKD):
            return attend(q_NHD, k_NKD, v_NKD, self.segments_S6, window)
        return attend_blocks(*self.rectangles, q_NHD, k_NKD, v_NKD, window, softcap)

    @property
    def num_query_slots(self) -> int:
        """The number of attention queries, including the padding of rectangles if there are any."""
        if "rectangles" in vars(self):
            return sum(block.query_index_BQ.numel() for block in self.rectangles[0])
        return len(self.token_ids_N)

    @cached_property
    def varlen_plan(self) -> VarlenPlan:
        """The arguments of one call of the variable-length kernel for this batch."""
        ordered = sorted(self.segments, key=lambda pair: pair[1].start)
        parts = [np.arange(part.start, part.stop) for pair in ordered for part in pair]
        num_keys = [len(prompt) + len(mine) for prompt, mine in ordered]
        tensor = partial(torch.tensor, device=self.token_ids_N.device)
        return VarlenPlan(
            key_index_P=tensor(np.concatenate([np.arange(0), *parts])),
            query_ends=tensor([0, *(mine.stop for _, mine in ordered)], dtype=torch.int32),
            key_ends=tensor([0, *accumulate(num_keys)], dtype=torch.int32),
            most_queries=max((len(mine) for _, mine in ordered), default=0),
            most_keys=max(num_keys, default=0),
        )

    @cached_property
    def segments_S6(self) -> Tensor:
        """The segments in the form of the CPU kernel."""
        bounds = [
            (own.start, len(own), p.start, p.stop, own.start, own.stop) for p, own in self.segments
        ]
        return torch.tensor(bounds, dtype=torch.long)

    @cached_property
    def rectangles(self) -> tuple[tuple[Block, ...], Tensor]:
        """The blocks, and the index of each flat token in their concatenated, padded outputs."""
        device = self.token_ids_N.device
        inverse = torch.empty(len(self.token_ids_N), dtype=torch.long)
        blocks = []
        start = 0
        for chunk in _similar(self.segments):
            width = max(len(own) for _, own in chunk)
            for _, own in chunk:
                inverse[own.start : own.stop] = torch.arange(start, start + len(own))
                start += width
            blocks.append(_block(chunk, device))
        return tuple(blocks), inverse.to(device)


def attend_blocks(
    blocks: Iterable[Block],
    inverse_N: Tensor,
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Compute the attention of each rectangle; [N, H, D] in, [N, H, D] out; differentiable."""
    num_groups = q_NHD.shape[1] // k_NKD.shape[1]
    outputs = []
    for block in blocks:
        q = q_NHD[block.query_index_BQ].transpose(1, 2)  # [B, H, Q, D]
        k = k_NKD[block.key_index_BK].transpose(1, 2)
        v = v_NKD[block.key_index_BK].transpose(1, 2)
        if num_groups > 1:
            k = k.repeat_interleave(num_groups, dim=1)
            v = v.repeat_interleave(num_groups, dim=1)
        mask = block.mask(window).to(q.dtype)
        out = masked_softmax(q, k, v, mask, softcap)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[inverse_N]


def _similar(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    """Yield the segments in chunks of one kind and of similar length."""
    chunk: list[Segment] = []
    ordered = sorted(segments, key=lambda pair: (bool(pair[0]), len(pair[1]), len(pair[0])))
    for prompt, mine in ordered:
        if chunk and (
            len(chunk) == _MAX_ROWS
            or bool(prompt) != bool(chunk[0][0])
            or len(mine) > 1.3 * len(chunk[0][1]) + 4
        ):
            yield chunk
            chunk = []
        chunk.append((prompt, mine))
    if chunk:
        yield chunk


def _block(chunk: list[Segment], device: torch.device | str) -> Block:
    bounds = [(prompt.start, len(prompt), own.start, len(own)) for prompt, own in chunk]
    # Each [B, 1].
    prompt_starts, prompt_lengths, own_starts, own_lengths = torch.tensor(bounds).split(1, dim=1)
    num_prompt, num_own = int(prompt_lengths.max()), int(own_lengths.max())
    steps_Q = torch.arange(num_own)
    query_BQ = own_starts + steps_Q.minimum(own_lengths - 1)
    # Prompts are right-aligned, so that query i sees keys up to num_prompt + i in every row.
    prompt_steps = torch.arange(num_prompt) - (num_prompt - prompt_lengths)
    prompt_BK = prompt_starts + prompt_steps.clamp(min=0)
    is_hidden_B1K = torch.cat((prompt_steps < 0, steps_Q >= own_lengths), dim=1)[:, None]
    is_later_1QK = (
        torch.arange(num_prompt + num_own)[None, None] > num_prompt + steps_Q[None, :, None]
    )
    is_padding_BQ1 = (steps_Q >= own_lengths)[:, :, None]
    is_masked = (is_hidden_B1K & ~is_padding_BQ1) | is_later_1QK
    mask = torch.zeros(is_masked.shape).masked_fill_(is_masked, -torch.inf)
    position_BQ = prompt_lengths + steps_Q
    return Block(
        query_index_BQ=query_BQ.to(device),
        key_index_BK=torch.cat((prompt_BK, query_BQ), dim=1).to(device),
        mask_B1QK=mask[:, None].to(device),
        query_position_BQ=position_BQ.to(device),
        key_position_BK=torch.cat((prompt_steps, position_BQ), dim=1).to(device),
        longest=num_prompt + num_own,
        is_real_BK=~is_hidden_B1K[:, 0].to(device),
    )


def causal_attend(lengths: Sequence[int]) -> Attend:
    """Return the causal attention of concatenated sequences, as in `causal_attend([5, 3])`."""
    ends = [0, *accumulate(lengths)]
    segments = tuple((range(0), range(*pair)) for pair in pairwise(ends))

    def attend(
        q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, window: int | None, softcap: float | None
    ) -> Tensor:
        places_N = torch.arange(ends[-1], device=q_NHD.device)
        batch = PackedBatch(places_N, places_N, segments, row_index=())
        return batch.attend(q_NHD, k_NKD, v_NKD, window, softcap)

    return attend


def fits_kernel(v_NKD: Tensor, softcap: float | None, window: int | None = None) -> bool:
    """Return whether the kernel supports these: on a GPU, in 16 bits, without soft caps."""
    return bool(
        v_NKD.dtype in (torch.float16, torch.bfloat16)
        and softcap is None
        and v_NKD.shape[-1] <= _MAX_HEAD_DIM
        and has_varlen_attention(v_NKD.device)
        and (kernel := _kernel()) is not None
        and (window is None or "window_size" in _parameters_of(kernel))
    )


@functools.cache
def _kernel() -> Callable[..., Any] | None:
    """Return the kernel; None if torch is older than it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


@functools.cache
def _parameters_of(kernel: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a kernel's arguments, which differ between versions of torch."""
    return frozenset(inspect.signature(kernel).parameters)
