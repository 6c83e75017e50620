"""Trains the policy on groups of trajectories.

    groups -> sequences -> advantages -> [minibatch: micro-batches -> loss -> backward] -> update

With several ranks, each trainer gets the whole batch, but the token ids of its share of the rows
only (`batch.rank_batches`), and passes these through its part of the model. Advantage estimator and
policy loss are arguments; the rest of an algorithm is settings
(`areal_gym.config.algorithm_settings`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError, TrainError
from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.policy_model import PolicyModel
from areal_gym.trainer.algorithms.advantages import (
    AdvantageEstimator,
    check_settings,
    needs_critic,
)
from areal_gym.trainer.algorithms.corrections import second_moment_mask
from areal_gym.trainer.algorithms.losses import (
    PolicyLoss,
    aggregate,
    aggregation_weights,
    value_loss,
)
from areal_gym.trainer.algorithms.token_loss import (
    Proximal,
    TokenLoss,
    check_credit,
    proximal_source,
)
from areal_gym.trainer.batch.experience import TokenBatch, batch_metrics
from areal_gym.trainer.batch.rank_batches import split_by_group
from areal_gym.trainer.batch.sequences import Sequence as TokenSequence
from areal_gym.trainer.batch.sequences import sequences_of
from areal_gym.trainer.batch_pass import pick_tokens
from areal_gym.trainer.chunked_logprobs import TokenScores
from areal_gym.trainer.critic import Critic
from areal_gym.trainer.lora import adapter_weights
from areal_gym.trainer.lr_schedule import DriftDamping, teaching_factor
from areal_gym.trainer.optimizer import Optimizer
from areal_gym.trainer.out_of_memory import readable_memory_errors
from areal_gym.trainer.parallel.fsdp import autocast, reducing_once
from areal_gym.trainer.parallel.rank_group import ALONE, Ranks
from areal_gym.trainer.policy_trainer import PolicyTrainer
from areal_gym.trainer.row_passes import RowPasses, gather_rows
from areal_gym.trainer.states import below, prefixed, room_for_moments
from areal_gym.trainer.step_advantages import StepAdvantages
from areal_gym.trainer.step_profiler import profiled
from areal_gym.trainer.step_stats import Step, StepStats, expert_metrics, router_agreement
from areal_gym.trainer.teacher_divergence import TeacherDivergence, VocabularyTeacher
from areal_gym.types import Group, TopTokens
from areal_gym.utils.packed_numbers import Floats


class Trainer(PolicyTrainer):
    """The trainer registered as `single`.

    Args:
        decoder: the policy; its weights are the float32 master weights and are updated in place.
            Each rank gets the whole weights, and shards them here.
        config: the trainer's settings.
        advantage: the advantage estimator (`areal_gym list advantages`).
        loss: the policy loss (`areal_gym list losses`).
        temperature: the sampling temperature; log-probabilities are of the sampling distribution.
        max_new_tokens: the most tokens of a turn: the divisor of `aggregation: constant_length`,
            and the end of the overlong penalty.
        reference: checkpoint directory of the frozen reference policy, if `kl` needs one.
        teacher: a teacher whose distributions are learned instead of rewards.
        ranks: this process among the ranks that train the policy.

    Raises:
        ConfigError: loss or estimator do not take the given arguments, the weights are not float32,
            or the settings need a reference and none is given.
    """

    def __init__(
        self,
        decoder: PolicyModel,
        config: TrainerConfig,
        *,
        advantage: AdvantageEstimator,
        loss: PolicyLoss,
        temperature: float = 1.0,
        max_new_tokens: int = 1,
        reference: Path | None = None,
        teacher: VocabularyTeacher | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(decoder, config, ranks)
        check_settings(advantage, config.advantage_kwargs)
        check_credit(loss, advantage, config)
        if config.routing_replay and not decoder.has_routers:
            raise ConfigError(
                "trainer.routing_replay = true needs a mixture of experts, and the policy is none "
                "whose routers are known",
                hints=["for a dense model: trainer.routing_replay=false", "docs/models.md"],
            )
        self._token_loss = TokenLoss(loss, config)
        self._passes = RowPasses(decoder, config, ranks, temperature)
        self._max_new_tokens = max_new_tokens
        self._critic = Critic(decoder, config, ranks) if needs_critic(advantage) else None
        self._step_advantages = StepAdvantages(
            advantage, config, self._passes, self._critic, max_new_tokens
        )
        self._reference: PolicyModel | None = None
        if config.kl.coefficient:
            if reference is None:
                raise ConfigError(
                    f"trainer.kl.coefficient = {config.kl.coefficient} needs a reference policy",
                    hints=["Trainer(..., reference=DIRECTORY)", "or trainer.kl.coefficient=0"],
                )
            self._reference = self._frozen(reference)
        self._divergence: TeacherDivergence | None = None
        if teacher is not None:
            frozen = None if teacher.directory is None else self._frozen(teacher.directory)
            self._divergence = TeacherDivergence(frozen, teacher.direction, teacher.top_k)
        self._prepare_training()
        decoder.replays_experts = config.routing_replay
        self._engine_rounds = False
        self._drift_damping = DriftDamping(config, has_advantages=teacher is None)
        self._last: Step | None = None

    def recompute_proximal(self) -> None:
        """Make "auto" corrections take ratios against the trainer's own log-probabilities."""
        self._engine_rounds = True

    @profiled
    @readable_memory_errors()
    def step(self, groups: Sequence[Group], version: int) -> dict[str, float]:
        """Train once on scored groups and return the metrics; the order of groups does not matter.

        `version` is the current weights' version, from which staleness counts.

        Raises:
            NotFiniteError: advantages are not finite, or the loss or its gradient was not finite
                several times in a row.
            TrainError: memory is too small, or the batch has no token to train on.
        """
        start_s = time.perf_counter()
        every_row = sequences_of(tuple(groups))
        # An episode whose first prompt filled the context has a reward but no token to train on: it
        # counts among its siblings' rewards only.
        rows = [row for row in every_row if row.num_trainable]
        if not rows:
            raise TrainError(
                "the batch holds no token that the policy sampled",
                hints=[
                    "are the prompts longer than engine.max_context, or do fixed roles end the "
                    "episodes before the policy's turn?"
                ],
            )
        num_recorded = sum(row.routed_experts is not None for row in rows)
        if self.config.routing_replay and not self._ranks.sum({"rows": num_recorded})["rows"]:
            raise TrainError(
                "trainer.routing_replay = true, but the batch has no record of the experts that "
                "the engine chose",
                hints=["experience that was sampled without: trainer.routing_replay=false"],
            )
        metrics = batch_metrics(every_row, version)
        is_stale = metrics["rollout/staleness_max"] > 0
        minibatches = split_by_group([row.group_id for row in rows], self.config.minibatches)
        proximal = proximal_source(
            self.config.correction,
            is_stale=is_stale,
            num_updates=len(minibatches),
            engine_rounds=self._engine_rounds,
        )
        columns = self._columns(rows, proximal)
        metrics |= self._compute_advantages(every_row, rows, columns)
        step = Step(
            rows=rows,
            columns=columns,
            proximal=proximal,
            version=version,
            staleness=metrics["rollout/staleness_mean"],
            num_updates=len(minibatches),
            work=StepStats(self.decoder.shape, self._device, self.config.dtype),
        )
        norms = [
            self._update(step, members, is_first=i == 0) for i, members in enumerate(minibatches)
        ]
        metrics |= step.metrics(self._ranks, is_stale=is_stale)
        metrics["train/grad_norm"] = sum(norms) / len(norms)
        metrics["train/lr"] = self.config.lr * mean(step.lr_scales)
        metrics["train/skipped_updates"] = float(sum(not math.isfinite(norm) for norm in norms))
        self.num_steps += 1
        self._last = step
        metrics["time/train_s"] = time.perf_counter() - start_s
        metrics |= expert_metrics(self.decoder.take_expert_counts(), self._ranks)
        metrics |= router_agreement(*self.decoder.take_router_agreement(), self._ranks)
        return metrics | step.work.metrics(metrics["time/train_s"], self._ranks)

    def trained_tokens(self) -> list[dict[str, Any]]:
        """Return advantages and log-probabilities of the last step's tokens, for the viewer.

        Each row with tokens to train on gives an object, in order: `trajectory` is its episode's
        id, `advantages` and `logprobs` are those of the policy's tokens, and `advantage` is the
        mean. The log-probabilities are those just before the row's update; minus the recorded ones,
        they are the log-ratios. The list is empty before the first step.
        """
        step = self._last
        if step is None:
            return []
        logprobs = gather_rows(self._ranks, step.logprobs)
        token_rows = []
        for i, row in enumerate(step.rows):
            advantages_T = step.columns.take("advantages", [i])
            token_rows.append(
                {
                    "trajectory": row.episode_id,
                    "advantage": round(float(advantages_T.mean()), 5),
                    # Deferred, because the result of only one rank is read.
                    "advantages": Floats.deferred(partial(_floats, advantages_T)),
                    "logprobs": Floats.deferred(partial(_floats, logprobs[i])),
                }
            )
        return token_rows

    def score(self, rows: list[TokenSequence]) -> list[Tensor]:
        """Return log-probabilities of each row's trained tokens, [T], under the current weights."""
        return self._passes.logprobs(rows)

    def score_at(self, rows: list[TokenSequence], temperature: float) -> list[Tensor]:
        """Return what `score` does, at this temperature instead of the sampling temperature."""
        return self._passes.logprobs(rows, temperature=temperature)

    def score_top(self, rows: list[TokenSequence], top_k: int) -> list[TopTokens]:
        """Return the likeliest tokens at each row's trained tokens, at temperature 1."""
        return self._passes.top(rows, top_k)

    def adapter(self) -> dict[str, Tensor]:
        """Return the adapter's tensors by peft's names; copy them before the next step."""
        if self.config.lora is None:
            raise ConfigError(
                "all weights are trained, there is no adapter to publish",
                hints=["trainer.lora={} trains one"],
            )
        return dict(adapter_weights(self.decoder))

    def checkpoint_bytes(self) -> int:
        """Return the approximate bytes of a checkpoint, including the critic."""
        num_bytes = super().checkpoint_bytes()
        if self._critic is not None:
            weights = sum(4 * p.numel() for p in self._critic.parameters())
            num_bytes += weights + room_for_moments(self._critic)
        return num_bytes

    def states(self) -> dict[str, Tensor]:
        """Return a trainer's states, the means of past rewards and the critic's states."""
        states = super().states() | self._step_advantages.states()
        if self._critic is not None:
            states |= prefixed("critic", self._critic.states())
        return states

    def _parts(self) -> list[nn.Module | Optimizer]:
        parts = super()._parts()
        return parts if self._critic is None else [*parts, self._critic, self._critic.optimizer]

    def _allocate(self, saved: Mapping[str, TensorStorageMetadata]) -> None:
        super()._allocate(saved)
        if self._critic is not None:
            self._critic.allocate(below("critic", saved))

    # ---- before the first update --------------------------------------------------------------

    def _columns(self, rows: list[TokenSequence], proximal: Proximal) -> TokenBatch:
        """Return the values per token that are known before the first update."""
        recorded = {"old": "old_logprobs", "versions": "versions"}
        columns = TokenBatch(rows, self._device, recorded)
        if self._reference is not None:
            columns.put("reference", torch.cat(self._passes.logprobs(rows, self._reference)))
        if proximal == "scored":
            columns.put("proximal", torch.cat(self._passes.logprobs(rows)))
            threshold = self.config.correction.second_moment
            if threshold is not None:
                old_T, proximal_T = columns.all("old"), columns.all("proximal")
                columns.put("kept", second_moment_mask(proximal_T, old_T, threshold=threshold))
        return columns

    def _compute_advantages(
        self, every_row: list[TokenSequence], rows: list[TokenSequence], columns: TokenBatch
    ) -> dict[str, float]:
        """Write advantages and the critic's targets into the columns; return metrics."""
        return self._step_advantages(every_row, rows, columns)

    # ---- one update ---------------------------------------------------------------------------

    def _update(self, step: Step, members: list[int], *, is_first: bool) -> float:
        """Update the policy on the rows `members`; return the gradient's norm.

        If the loss or a gradient is not finite, nothing is applied, and the norm is NaN.
        """
        proximal = step.proximal
        if is_first and proximal == "scored" and self.config.dtype != "float32":
            # In bfloat16, a token's digits depend on its micro-batch, which narrow clips would see.
            proximal = "current"
        lengths_G = step.trajectory_lengths(members)
        num_tokens = lengths_G.total()
        weights = aggregation_weights(
            self.config.aggregation, list(lengths_G.values()), constant_length=self._max_new_tokens
        )
        weights_G = dict(zip(lengths_G, weights, strict=True))
        if self._token_loss.has_batch_pass:
            pick_tokens(self._token_loss, self._passes, step, members, proximal, is_first=is_first)
        passes = self._passes.microbatches(step.rows, members)
        for batch, indexes, is_mine in reducing_once(
            passes, self.config, self.decoder, self._critic
        ):
            self.decoder.counts_experts = is_mine
            scores, loss_T, metrics = self._losses(step, batch, indexes, proximal)
            weights_B = torch.tensor([weights_G[step.rows[i].trajectory_id] for i in indexes])
            policy_loss = aggregate(loss_T, step.columns.per_row(weights_B, indexes))
            loss = policy_loss
            if "critic_loss" in metrics:
                sum_T = metrics["critic_loss"].sum()
                loss = loss + self.config.critic.coefficient * sum_T / num_tokens
            if is_mine:
                step.update.add("loss", policy_loss)
                logprobs_T = scores.logprobs.detach()
                step.add(
                    batch, indexes, logprobs_T, metrics, num_tokens=num_tokens, is_first=is_first
                )
            # Gradients are averaged over the ranks, and each data rank has a part of the loss.
            (loss * (self._ranks.num_data_ranks if is_mine else 0)).backward()
        # A loss can be NaN although its gradient is finite: a constant added to it has none.
        sums = step.end_update(self._ranks)
        is_finite = math.isfinite(sums["loss"])
        lr_scale = self._lr_scale()
        if self._divergence is None:
            lr_scale *= teaching_factor(self.config, step.columns, members, step.staleness)
        drift = self._drift_damping.distance(sums)
        lr_scale *= self._drift_damping.factor(drift, step.staleness, step.num_updates)
        step.lr_scales.append(lr_scale)
        norm = self._optimizer.step(lr_scale, is_usable=is_finite)
        if self._critic is not None:
            critic_norm = self._critic.step(lr_scale, is_usable=math.isfinite(norm))
            step.totals.add("critic_grad_norm", torch.tensor(critic_norm))
        return norm if self._note_update(norm, is_loss_finite=is_finite) else math.nan

    def _losses(
        self, step: Step, batch: PackedBatch, indexes: list[int], proximal: Proximal
    ) -> tuple[TokenScores, Tensor, dict[str, Tensor]]:
        """Return a micro-batch's scores, its policy loss per token and its metrics, all [T]."""
        rows = [step.rows[i] for i in indexes]
        bonus = self.config.entropy_bonus
        scores = self._passes.scores(batch, rows, has_entropy_gradient=bonus > 0)
        output = self._token_loss(
            scores.logprobs, step.columns, indexes, proximal=proximal, version=step.version
        )
        metrics = {**output.metrics, "entropy": scores.entropy}
        loss_T = output.loss
        if self._divergence is not None:
            with autocast(self._device, self.config):
                loss_T = self._divergence(self.decoder, batch, rows, scores.hidden)
            metrics["kl_teacher"] = loss_T.detach()
        if self._critic is not None and "returns" in step.columns:
            with autocast(self._device, self.config):
                values_T = (
                    self._critic.of(self.decoder, scores.hidden, len(scores.logprobs))
                    if self._critic.trunk is None
                    else self._critic.before(self.decoder, batch, [row.loss_mask for row in rows])
                )
            metrics["critic_loss"] = value_loss(
                values_T,
                step.columns.take("values", indexes),
                step.columns.take("returns", indexes),
                clip=self.config.critic.clip,
            )
        return scores, loss_T - bonus * scores.entropy, metrics


def _floats(values_T: Tensor) -> Floats:
    return Floats.from_array(values_T.double().cpu().numpy())
