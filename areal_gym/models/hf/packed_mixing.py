"""Tokens of a packed batch of the trainer see their prompt, themselves, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from areal_gym.errors import TrainError
from areal_gym.models.context_parallel import WHOLE, ContextGroup
from areal_gym.models.flat_batch import Block, PackedBatch
from areal_gym.models.hf.routing import RoutingStats, replay
from areal_gym.models.hf.token_mixing import ScoreRules, masked_attention


class PackedMixing:
    """The `TokenMixing` of one flat batch.

    With `replays` tokens pass the experts that the batch records for them. The model is given the
    tokens that this rank has in `context`. Tokens of one picture in `pictures_N` see each other in
    both directions.
    """

    def __init__(
        self,
        batch: PackedBatch,
        stats: RoutingStats,
        context: ContextGroup = WHOLE,
        *,
        replays: bool = False,
        pictures_N: Tensor | None = None,
    ) -> None:
        self._batch = batch
        self._stats = stats
        self._context = context
        self._replays = replays
        self._pictures_N = pictures_N
        self._num_tokens = len(batch.token_ids_N)
        recorded_NLK = batch.routed_experts_NLK
        self._recorded_nLK = None if recorded_NLK is None else context.own(recorded_NLK)

    def attend(
        self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKE: Tensor, rules: ScoreRules
    ) -> Tensor:
        """Return [N, H, E], by the batch's fused kernels where they know the layer's rules."""
        if rules.sinks_H is not None:
            rules = replace(rules, sinks_H=self._context.own_heads(rules.sinks_H))
        return self._context.attend(
            partial(self._attend, rules=rules), q_NHD, k_NKD, v_NKE, self._num_tokens
        )

    def _attend(self, q_NHD: Tensor, k_NKD: Tensor, v_NKE: Tensor, rules: ScoreRules) -> Tensor:
        width = q_NHD.shape[-1]
        is_causal = rules.sinks_H is None and rules.chunk is None and self._pictures_N is None
        if is_causal and v_NKE.shape[-1] <= width:
            if not math.isclose(rules.scale, width**-0.5, rel_tol=1e-9):
                q_NHD = q_NHD * (rules.scale * math.sqrt(width))  # `attend` divides by sqrt(D)
            # Kernels want values as wide as keys; in latent attention they are narrower.
            num_missing = width - v_NKE.shape[-1]
            v_NKD = F.pad(v_NKE, (0, num_missing)) if num_missing else v_NKE
            out_NHD = self._batch.attend(
                q_NHD, k_NKD, v_NKD, window=rules.window, softcap=rules.softcap
            )
            return out_NHD[..., : width - num_missing]
        blocks, inverse_N = self._batch.rectangles
        outputs = []
        for block in blocks:
            query_BQ, key_BK = block.query_position_BQ, block.key_position_BK
            out_BQHE = masked_attention(
                q_NHD[block.query_index_BQ],
                k_NKD[block.key_index_BK],
                v_NKE[block.key_index_BK],
                block.mask(None),
                query_BQ[:, :, None] - key_BK[:, None],
                query_BQ,
                rules,
                self._seen(block),
            )
            outputs.append(out_BQHE.flatten(0, 1))
        return torch.cat(outputs)[inverse_N]

    def _seen(self, block: Block) -> Tensor | None:
        """Return which keys are of the picture of a query, [B, Q, K]."""
        if self._pictures_N is None:
            return None
        of_query_BQ = self._pictures_N[block.query_index_BQ]
        of_key_BK = self._pictures_N[block.key_index_BK].masked_fill(~block.is_real_BK, -2)
        return (of_query_BQ[:, :, None] == of_key_BK[:, None]) & (of_query_BQ >= 0)[:, :, None]

    def recur(
        self, forward: Callable[..., Tensor], hidden_1NC: Tensor, kwargs: dict[str, Any]
    ) -> Tensor:
        """Return [1, N, C], each sequence by itself; none may share its prompt with another.

        A rank that has a part of the tokens computes the sequences that these belong to, from
        their beginning to its own end: a recurrence cannot be begun in the middle.
        """
        segments = [own for _, own in self._batch.segments]
        if any(prompt for prompt, _ in self._batch.segments):
            raise TrainError("recurrent layers cannot share prompts between sequences")
        mine = self._context.own_range(self._num_tokens)
        if mine.stop > self._num_tokens:  # what fills up the last ranks sees itself only
            segments.append(range(self._num_tokens, mine.stop))
        num_filled = len(mine) * self._context.size
        hidden_NC = self._context.whole(hidden_1NC[0], num_filled)
        parts = []
        for own in segments:
            start, stop = max(own.start, mine.start), min(own.stop, mine.stop)
            if start < stop:
                out_1SC = forward(hidden_NC[None, own.start : stop], **kwargs)
                parts.append(out_1SC[:, start - own.start :])
        return torch.cat(parts, dim=1)

    def route(self, layer: int, own_NK: Tensor, num_experts: int) -> Tensor:
        """Return the router's choice, or what the batch records; count both."""
        recorded_nLK, chosen_NK = self._recorded_nLK, own_NK
        if recorded_nLK is not None and self._replays:
            chosen_NK = replay(layer, own_NK, recorded_nLK)
        if torch.is_grad_enabled():
            # Without what fills up the last ranks.
            num = max(0, self._num_tokens - self._context.own_range(self._num_tokens).start)
            self._stats.count(layer, chosen_NK[:num], num_experts)
            if recorded_nLK is not None:
                self._stats.compare(own_NK[:num], recorded_nLK[:num, layer])
        return chosen_NK
