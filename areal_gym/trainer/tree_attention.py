"""Attention of a packed micro-batch on a CPU: without masks, a group's prompt read once.

A token sees its group's prompt and its own row up to itself. The first part is a plain product of
all siblings' queries with the prompt's keys, the second is causal, so that neither needs a mask:
what pads a row comes after all of its queries. Softmax over both is the mean of the parts, weighted
with their sums of exponentials:

    out = sum_i exp(lse_i - lse) out_i        lse = log sum_i exp(lse_i)

Given `out` and `lse` of the whole, the backward pass of each part is its own kernel's (Liu et al.
2023, Ring Attention).

All of it is computed in float32, whatever the type: the kernel's backward pass takes twice as long
in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["TreePlan", "fits_tree", "plan_tree"]

_MAX_ROWS = 64
"""Rows of one rectangle."""
_ENOUGH = 512
"""Tokens that are worth a rectangle of their own."""
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""What `F.scaled_dot_product_attention` calls on CPUs; it has no way to `lse` itself."""


class Rectangle:
    """Rows of similar length, side by side: `B` rows of `T` tokens, padded with their last ones."""

    def __init__(self, rows: Sequence[range]) -> None:
        self.shape = len(rows), max(map(len, rows))
        self._span: slice | None = None
        ends = [rows[0].start, *(row.stop for row in rows)]
        if all(len(row) == self.shape[1] for row in rows) and ends[:-1] == [r.start for r in rows]:
            self._span = slice(ends[0], ends[-1])  # they lie there already
            return
        starts, lengths = (
            torch.tensor(numbers)[:, None]
            for numbers in ([row.start for row in rows], [len(row) for row in rows])
        )
        steps_T = torch.arange(self.shape[1])
        self._index_BT = starts + steps_T.minimum(lengths - 1)
        self._is_real_BT = steps_T < lengths
        self._flat_P = self._index_BT[self._is_real_BT]

    def take(self, x_N: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...]"""
        found: Tensor
        if self._span is not None:
            found = x_N[self._span].unflatten(0, self.shape)
        else:
            found = x_N[self._index_BT]
        return found

    def take_gradient(self, x_N: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...]; padding has none."""
        found = self.room(x_N)
        if self._span is None:
            found[self._is_real_BT] = x_N[self._flat_P]
        return found

    def room(self, target_N: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...]: where to write what `put` then brings there."""
        if self._span is not None:
            return self.take(target_N)
        return target_N.new_zeros(*self.shape, *target_N.shape[1:])

    def put(self, room_BT: Tensor, target_N: Tensor) -> None:
        """[B, T, ...] into [N, ...]"""
        if self._span is None:
            target_N[self._flat_P] = room_BT[self._is_real_BT]


@dataclass(frozen=True, slots=True)
class TreePlan:
    """Who attends to whom."""

    rectangles: tuple[Rectangle, ...]
    """All prompts and all continuations, each of which sees itself."""
    families: tuple[tuple[slice, slice], ...]
    """Flat positions of a prompt, and of all the continuations that see it."""

    @property
    def num_slots(self) -> int:
        """Queries of the rectangles, padding included."""
        return sum(rows * width for rows, width in (part.shape for part in self.rectangles))

    def attend(self, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        """[N, H, D], as the decoder's `Attend`, in the type of the values; computed in float32."""
        q, k, v = (x.float() for x in (q_NHD.unflatten(1, (k_NKD.shape[1], -1)), k_NKD, v_NKD))
        out_NKGD: Tensor = _TreeAttention.apply(self, q, k, v)  # type: ignore[no-untyped-call]
        return out_NKGD.flatten(1, 2).to(v_NKD.dtype)


def plan_tree(segments: Sequence[tuple[range, range]]) -> TreePlan:
    """Plan attention.

    Args:
        segments: (flat positions of a prompt, of what follows it) of each segment, as in
            `plan_varlen`; those with the same prompt follow one another on the flat axis.
    """
    spans: dict[range, range] = {}
    for prompt, mine in segments:
        if prompt:
            span = spans.get(prompt, mine)
            spans[prompt] = range(min(span.start, mine.start), max(span.stop, mine.stop))
    return TreePlan(
        rectangles=tuple(map(Rectangle, _similar([mine for _, mine in segments]))),
        families=tuple(
            (slice(prompt.start, prompt.stop), slice(span.start, span.stop))
            for prompt, span in spans.items()
        ),
    )


def fits_tree(*tensors: Tensor) -> bool:
    """Whether queries, keys and values are where the kernel is, and float32 holds them."""
    types = (torch.float32, torch.bfloat16)
    return all(x.device.type == "cpu" and x.dtype in types for x in tensors)


def _similar(rows: list[range]) -> Iterator[list[range]]:
    """Rows of similar length; many of the same length stay among themselves."""
    chunk: list[range] = []
    for row in sorted(rows, key=lambda row: (len(row), row.start)):
        shortest = len(chunk[0]) if chunk else 0
        longest = shortest if len(chunk) * shortest > _ENOUGH else 1.3 * shortest + 4
        if chunk and (len(chunk) == _MAX_ROWS or len(row) > longest):
            yield chunk
            chunk = []
        chunk.append(row)
    if chunk:
        yield chunk


class _TreeAttention(torch.autograd.Function):
    """In rectangles one query head of a key head after the other: no key is copied."""

    @staticmethod
    def forward(ctx: Any, plan: TreePlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
        for rows in plan.rectangles:
            queries, into_out, into_lse = rows.take(q), rows.room(out), rows.room(lse)
            keys, values = (rows.take(x).transpose(1, 2) for x in (k, v))
            for g in range(q.shape[2]):
                found, weight = _forward(_head(queries, g), keys, values, is_causal=True)
                _head(into_out, g).copy_(found)
                _head(into_lse, g).copy_(weight)
            rows.put(into_out, out)
            rows.put(into_lse, lse)
        for prompt, span in plan.families:
            queries, keys, values = q[span].permute(2, 1, 0, 3), k[prompt], v[prompt]
            seen, weight = _forward(queries, *_for_each(queries, keys, values))
            seen, weight = seen.permute(2, 1, 0, 3), weight.permute(2, 1, 0)
            out[span].lerp_(seen, (weight - lse[span]).sigmoid_()[..., None])
            torch.logaddexp(lse[span], weight, out=lse[span])
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        (gradient,) = gradients
        q, k, v, out, lse = ctx.saved_tensors
        into_q, into_k, into_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows in ctx.plan.rectangles:
            into, queries, seen, weight = (
                rows.take_gradient(gradient),
                *map(rows.take, (q, out, lse)),
            )
            keys, values = (rows.take(x).transpose(1, 2) for x in (k, v))
            into_queries, into_keys, into_values = map(rows.room, (into_q, into_k, into_v))
            for g in range(q.shape[2]):
                before = (_head(x, g) for x in (into, queries))
                after = (_head(x, g) for x in (seen, weight))
                found = _backward(*before, keys, values, *after, 0.0, is_causal=True)
                _head(into_queries, g).copy_(found[0])
                into_keys.add_(found[1].transpose(1, 2))
                into_values.add_(found[2].transpose(1, 2))
            rows.put(into_queries, into_q)
            rows.put(into_keys, into_k)
            rows.put(into_values, into_v)
        for prompt, span in ctx.plan.families:
            queries, seen, into = (x[span].permute(2, 1, 0, 3) for x in (q, out, gradient))
            weight = lse[span].permute(2, 1, 0)
            keys, values = _for_each(queries, k[prompt], v[prompt])
            found = _backward(into, queries, keys, values, seen, weight, 0.0, False)
            into_q[span].add_(found[0].permute(2, 1, 0, 3))
            into_k[prompt].add_(found[1].sum(0).transpose(0, 1))
            into_v[prompt].add_(found[2].sum(0).transpose(0, 1))
        return None, into_q, into_k, into_v


def _head(x_BTKG: Tensor, g: int) -> Tensor:
    """[B, T, K, G, ...] -> [B, K, T, ...]: one query head of each key head."""
    return x_BTKG[:, :, :, g].transpose(1, 2)


def _for_each(queries: Tensor, *keys_PKD: Tensor) -> Iterator[Tensor]:
    """[P, K, D] -> [G, K, P, D]: the same for each of the G query heads of a key head."""
    for x_PKD in keys_PKD:
        yield x_PKD.transpose(0, 1).expand(len(queries), -1, -1, -1)
