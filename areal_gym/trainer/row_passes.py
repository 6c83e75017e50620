"""Passes a batch's rows through the policy in micro-batches; each rank passes its share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from areal_gym.config import TrainerConfig
from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.policy_model import PolicyModel
from areal_gym.trainer.batch.bins import Row, split_by_patches, split_by_tokens
from areal_gym.trainer.batch.packing import pack
from areal_gym.trainer.batch.rank_batches import own_members, split_by_group
from areal_gym.trainer.batch.recorded_experts import with_recorded_experts
from areal_gym.trainer.batch.sequences import Sequence as TokenSequence
from areal_gym.trainer.chunked_logprobs import TokenScores, score_tokens, top_tokens
from areal_gym.trainer.critic import Critic
from areal_gym.trainer.parallel.fsdp import autocast, drop_gathered
from areal_gym.trainer.parallel.rank_group import Ranks
from areal_gym.types import TopTokens


def gather_rows(ranks: Ranks, by_row: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the values of all ranks' rows, on the CPU if there are several data ranks.

    Every rank must call this. A rank sends one flat tensor, because a view would carry its whole
    storage, and a tensor on a GPU would arrive on that GPU.
    """
    if ranks.num_data_ranks == 1:
        return dict(by_row)
    flat_T = torch.cat(list(by_row.values())).cpu() if by_row else torch.zeros(0)
    mine = (list(by_row), [len(values) for values in by_row.values()], flat_T)
    merged: dict[int, Tensor] = {}
    for indexes, lengths, part_T in ranks.gather(mine):
        merged.update(zip(indexes, torch.split(part_T, lengths), strict=True))
    return merged


class RowPasses:
    """Runs forward passes of token rows; `temperature` is the sampling temperature."""

    def __init__(
        self, decoder: PolicyModel, config: TrainerConfig, ranks: Ranks, temperature: float
    ) -> None:
        self._decoder = decoder
        self._config = config
        self._ranks = ranks
        self._temperature = temperature
        self._device = next(decoder.parameters()).device

    def microbatches(
        self, rows: Sequence[TokenSequence], *minibatches: Sequence[int]
    ) -> Iterator[tuple[PackedBatch, list[int], bool]]:
        """Yield (packed rows, their indexes in `rows`, whether they count) of this rank's shares.

        Each minibatch is shared out separately, so that a rank reads the tokens of the same rows in
        every pass.
        """
        share = self._decoder.can_share_prompts
        packed = {
            i: Row(
                token_ids=rows[i].token_ids,
                num_shared=share * rows[i].num_prompt_tokens,
                images=rows[i].images,
            )
            for members in minibatches
            for i in members
        }
        mine, spare = own_members(self._ranks, minibatches, [len(row) for row in rows])
        mine_rows = [packed[i] for i in mine]
        parts = split_by_tokens(mine_rows, self._config.tokens_per_microbatch)
        has_images = any(row.images for row in rows)  # on any rank: all know the images of all rows
        if has_images:
            most = self._config.patches_per_microbatch
            parts = [cut for part in parts for cut in split_by_patches(mine_rows, part, most)]
        passes = self._ranks.equal_passes([[mine[j] for j in part] for part in parts], spare)
        for indexes, is_mine in passes:
            batch = pack([packed[i] for i in indexes], self._device, has_images=has_images)
            yield with_recorded_experts(batch, [rows[i] for i in indexes]), indexes, is_mine

    def scores(
        self,
        batch: PackedBatch,
        rows: Sequence[TokenSequence],
        decoder: PolicyModel | None = None,
        *,
        temperature: float | None = None,
        has_entropy_gradient: bool = False,
    ) -> TokenScores:
        """Score the trained tokens of a packed batch of `rows`, by default with the policy.

        `temperature` defaults to the sampling temperature.
        """
        masks = [row.loss_mask for row in rows]
        with autocast(self._device, self._config):
            return score_tokens(
                decoder or self._decoder,
                batch,
                masks,
                self._temperature if temperature is None else temperature,
                has_entropy_gradient=has_entropy_gradient,
            )

    def logprobs(
        self,
        rows: Sequence[TokenSequence],
        decoder: PolicyModel | None = None,
        *,
        temperature: float | None = None,
        members: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Return the log-probabilities of each row's trained tokens, by default under the policy.

        Args:
            rows: the rows of the batch.
            decoder: scores the rows instead of the policy.
            temperature: the sampling temperature by default.
            members: indexes of the rows to score, those of one update; by default all.

        Returns:
            One tensor [T] per scored row.
        """

        def score_rows(batch: PackedBatch, packed: list[TokenSequence]) -> Sequence[Tensor]:
            logprobs_T = self.scores(batch, packed, decoder, temperature=temperature).logprobs
            return torch.split(logprobs_T, [row.num_trainable for row in packed])

        return self._without_gradient(rows, score_rows, decoder or self._decoder, members=members)

    def top(self, rows: Sequence[TokenSequence], top_k: int) -> list[TopTokens]:
        """Return the likeliest tokens, at temperature 1, at each row's trained tokens."""

        def list_rows(batch: PackedBatch, packed: list[TokenSequence]) -> Sequence[Tensor]:
            with autocast(self._device, self._config):
                ids_TK, logprobs_TK = top_tokens(
                    self._decoder, batch, [row.loss_mask for row in packed], top_k
                )
            # Rows are gathered as one tensor each: float64 has both kinds of numbers exactly.
            pairs_T2K = torch.stack((ids_TK.double(), logprobs_TK.double()), dim=1)
            return torch.split(pairs_T2K, [row.num_trainable for row in packed])

        of_rows = self._without_gradient(rows, list_rows, self._decoder)
        pairs = (pairs_T2K.cpu().numpy() for pairs_T2K in of_rows)
        return [TopTokens.from_arrays(pair[:, 0], pair[:, 1]) for pair in pairs]

    def values(
        self, rows: Sequence[TokenSequence], critic: Critic, num_trajectories: int
    ) -> tuple[Tensor, Tensor]:
        """Return the critic's values before each token [T], and at the ends of truncated ones [G].

        The second is 0 for a trajectory that was not truncated.
        """

        def predict_rows(batch: PackedBatch, packed: list[TokenSequence]) -> Sequence[Tensor]:
            masks = [row.loss_mask for row in packed]
            with autocast(self._device, self._config):
                before_T, after_B = critic.before_and_after(self._decoder, batch, masks)
            parts = torch.split(before_T, [row.num_trainable for row in packed])
            return [torch.cat(pair) for pair in zip(parts, after_B.split(1), strict=True)]

        values_of_rows = self._without_gradient(rows, predict_rows, self._decoder, critic.trunk)
        final_values_G = torch.zeros(num_trajectories, dtype=torch.float64)
        for row, values in zip(rows, values_of_rows, strict=True):
            # The last branch of a trajectory counts.
            final_values_G[row.trajectory_id] = float(values[-1]) if row.is_truncated else 0.0
        return torch.cat([values[:-1] for values in values_of_rows]), final_values_G

    @torch.no_grad()
    def _without_gradient(
        self,
        rows: Sequence[TokenSequence],
        run: Callable[[PackedBatch, list[TokenSequence]], Sequence[Tensor]],
        *gathered: nn.Module | None,
        members: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Return the result of `run` for each row, in order; it passes the `gathered` modules."""
        by_row: dict[int, Tensor] = {}
        minibatches: Sequence[Sequence[int]] = (
            split_by_group([row.group_id for row in rows], self._config.minibatches)
            if members is None
            else [members]
        )
        for batch, indexes, is_mine in self.microbatches(rows, *minibatches):
            values = run(batch, [rows[i] for i in indexes])
            if is_mine:
                by_row.update(zip(indexes, values, strict=True))
        drop_gathered(*gathered)
        by_row = gather_rows(self._ranks, by_row)
        return [by_row[i] for i in (range(len(rows)) if members is None else members)]
