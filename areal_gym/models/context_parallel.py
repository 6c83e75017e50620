"""Ulysses context parallelism: the ranks of a group share the tokens of every forward pass.

    norms, projections, experts   [N / c tokens, H heads]   each rank a slice of the flat axis
      all-to-all                             |
    attention                     [N tokens, H / c heads]   each rank all tokens, for its heads
      all-to-all                             |
    output projection, values     [M / c wanted tokens]     each rank as many as the others
      gather                                 |
    loss                          [M wanted tokens]         every rank all of them

Jacobs et al. 2023 (DeepSpeed-Ulysses). Attention has the whole flat axis, so that packed rows and
shared prompts are what they are on one rank. A collective's gradient is its transpose, and every
rank of the group computes the same loss: what is averaged over the ranks is the loss's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal_gym.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks that share the tokens of a pass; by default, this one has them all.

    All ranks of the group must call the same methods in the same order.
    """

    group: Any = None
    """The `torch.distributed.ProcessGroup`."""
    rank: int = 0
    size: int = 1

    def own_range(self, num_tokens: int) -> range:
        """Return this rank's places on the flat axis; the last of all may lie beyond its end."""
        length = -(-num_tokens // self.size)
        return range(self.rank * length, (self.rank + 1) * length)

    def own(self, values_NX: Tensor) -> Tensor:
        """Return this rank's part, [n, ...]; beyond the end, the last value is repeated."""
        if self.size == 1:
            return values_NX
        return values_NX[_places(self.own_range(len(values_NX)), values_NX)]

    def own_heads(self, values_H: Tensor) -> Tensor:
        """Return the values of the heads that this rank attends with."""
        return values_H.view(self.size, -1)[self.rank]

    def whole(self, values_nX: Tensor, num: int) -> Tensor:
        """Return the values of all ranks' parts, [num, ...], on every rank."""
        if self.size == 1:
            return values_nX
        copies_cnX = values_nX.expand(self.size, *values_nX.shape)
        return self._exchange(copies_cnX).flatten(0, 1)[:num]

    def wanted(self, hidden_nC: Tensor, wanted_M: Tensor, num_tokens: int) -> Tensor:
        """Return hidden states at this rank's part of the flat places `wanted_M`.

        Each rank gets as many, wherever they were computed: trained tokens are often at one end.
        """
        if self.size == 1:
            return hidden_nC.index_select(0, wanted_M)
        length = len(self.own_range(num_tokens))
        parts = [ContextGroup(None, rank, self.size).own(wanted_M) for rank in range(self.size)]
        asked_of_me = [part[part // length == self.rank] for part in parts]
        asked_of = parts[self.rank] // length
        arrived_mC = self._exchange(
            hidden_nC[torch.cat(asked_of_me) - self.rank * length],
            sent=[len(part) for part in asked_of_me],
            received=asked_of.bincount(minlength=self.size).tolist(),
        )
        # They arrive rank by rank, each rank's in the order in which they are wanted.
        return arrived_mC[asked_of.argsort(stable=True).argsort()]

    def attend(
        self,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        q_nHD: Tensor,
        k_nKD: Tensor,
        v_nKE: Tensor,
        num_tokens: int,
    ) -> Tensor:
        """Return [n, H, E]: what `attend` gives for queries, keys and values of all tokens.

        `attend` is called with all tokens and this rank's heads. A key head that query heads on
        several ranks attend to is sent to each of those ranks.

        Raises:
            ConfigError: the number of heads is not a multiple of the number of ranks.
        """
        if self.size == 1:
            return attend(q_nHD, k_nKD, v_nKE)
        num_heads = q_nHD.shape[1]
        if num_heads % self.size:
            raise ConfigError(
                f"trainer.parallel.context = {self.size} divides the heads of attention among as "
                f"many ranks, and a layer has {num_heads} on each",
                hints=[
                    f"a divisor of it: trainer.parallel.context={math.gcd(num_heads, self.size)}"
                ],
            )
        out_NhE = attend(*(self._heads_of_all_tokens(x, num_tokens) for x in (q_nHD, k_nKD, v_nKE)))
        length = len(q_nHD)
        padding = out_NhE.new_zeros(length * self.size - num_tokens, *out_NhE.shape[1:])
        out_cnhE = torch.cat((out_NhE, padding)).unflatten(0, (self.size, length))
        return self._exchange(out_cnhE).transpose(0, 1).flatten(1, 2)

    def sum(self, counts: Tensor) -> Tensor:
        """Return the sum of all ranks' counts."""
        if self.size > 1:
            counts = counts.clone()
            torch.distributed.all_reduce(counts, group=self.group)
        return counts

    def _heads_of_all_tokens(self, x_nHD: Tensor, num_tokens: int) -> Tensor:
        num_copies = math.lcm(x_nHD.shape[1], self.size) // x_nHD.shape[1]
        x_nHD = x_nHD.repeat_interleave(num_copies, dim=1) if num_copies > 1 else x_nHD
        x_cnhD = x_nHD.unflatten(1, (self.size, -1)).transpose(0, 1)
        return self._exchange(x_cnhD).flatten(0, 1)[:num_tokens]

    def _exchange(
        self, x: Tensor, sent: list[int] | None = None, received: list[int] | None = None
    ) -> Tensor:
        """Send one part of the first axis to each rank, and return what each has sent to this one.

        Parts are equal, or `sent` and `received` are their lengths.
        """
        exchange: Any = _AllToAll  # torch gives `apply` no types
        out: Tensor = exchange.apply(x, sent, received, self.group)
        return out


WHOLE = ContextGroup()
"""The group of one rank, which has all tokens of its passes."""


class _AllToAll(torch.autograd.Function):
    """`all_to_all_single` with its gradient; torch's own is in a private module."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int] | None, received: list[int] | None, group: Any
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        num_received = len(x) if received is None else sum(received)
        out = x.new_empty(num_received, *x.shape[1:])
        torch.distributed.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        exchange: Any = _AllToAll
        return exchange.apply(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _places(own: range, values_NX: Tensor) -> Tensor:
    places = torch.arange(own.start, own.stop, device=values_NX.device)
    return places.clamp(max=len(values_NX) - 1)
