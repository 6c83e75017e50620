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
from areal_gym.trainer.chunked_logprobs import TokenScores, score_tokens
from areal_gym.trainer.critic import Critic
from areal_gym.trainer.parallel.fsdp import autocast, drop_gathered
from areal_gym.trainer.parallel.rank_group import Ranks


def gather_rows(ranks: Ranks, by_row: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the values of all ranks' rows, on the CPU if there are several data ranks.

    Every rank must call this.

    A rank sends one flat tensor: a view would take its whole storage along, and a tensor of a GPU
    would arrive on that GPU.
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
    """Forward passes of rows of tokens. `temperature` is that of sampling."""

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
        """Yield (packed rows, their places in `rows`, whether they count) of this rank's shares.

        Each minibatch is shared by itself, so that a rank reads the tokens of the same rows in
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
        has_images = any(row.images for row in rows)  # of any rank: all know all rows' pictures
        if has_images:
            most = self._config.patches_per_microbatch
            parts = [part for each in parts for part in split_by_patches(mine_rows, each, most)]
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

        `temperature` is that of sampling by default.
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
        """Return log-probabilities of each row's trained tokens, by default under the policy.

        `temperature` is that of sampling by default; `members`, those of one update, leave the
        other rows out.
        """

        def look(batch: PackedBatch, packed: list[TokenSequence]) -> Sequence[Tensor]:
            logprobs_T = self.scores(batch, packed, decoder, temperature=temperature).logprobs
            return torch.split(logprobs_T, [row.num_trainable for row in packed])

        return self._without_gradient(rows, look, decoder or self._decoder, members=members)

    def values(
        self, rows: Sequence[TokenSequence], critic: Critic, num_trajectories: int
    ) -> tuple[Tensor, Tensor]:
        """Return the critic's values before each token [T], and at the end of what was cut [G]."""

        def look(batch: PackedBatch, packed: list[TokenSequence]) -> Sequence[Tensor]:
            masks = [row.loss_mask for row in packed]
            with autocast(self._device, self._config):
                before_T, after_B = critic.before_and_after(self._decoder, batch, masks)
            parts = torch.split(before_T, [row.num_trainable for row in packed])
            return [torch.cat(pair) for pair in zip(parts, after_B.split(1), strict=True)]

        values_of_rows = self._without_gradient(rows, look, self._decoder, critic.trunk)
        final_values_G = torch.zeros(num_trajectories, dtype=torch.float64)
        for row, values in zip(rows, values_of_rows, strict=True):
            # Of a trajectory with several branches the last one counts.
            final_values_G[row.trajectory_id] = float(values[-1]) if row.is_truncated else 0.0
        return torch.cat([values[:-1] for values in values_of_rows]), final_values_G

    @torch.no_grad()
    def _without_gradient(
        self,
        rows: Sequence[TokenSequence],
        look: Callable[[PackedBatch, list[TokenSequence]], Sequence[Tensor]],
        *gathered: nn.Module | None,
        members: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Return what `look` gives for each row, in order; `gathered` modules are passed."""
        by_row: dict[int, Tensor] = {}
        minibatches: Sequence[Sequence[int]] = (
            split_by_group([row.group_id for row in rows], self._config.minibatches)
            if members is None
            else [members]
        )
        for batch, indexes, is_mine in self.microbatches(rows, *minibatches):
            values = look(batch, [rows[i] for i in indexes])
            if is_mine:
                by_row.update(zip(indexes, values, strict=True))
        drop_gathered(*gathered)
        by_row = gather_rows(self._ranks, by_row)
        return [by_row[i] for i in (range(len(rows)) if members is None else members)]
