"""Improves one policy: groups in, updated weights out.

    groups -> sequences -> advantages -> [minibatch: micro-batches -> loss -> backward] -> update

Alone, or as one of several ranks: each is given the whole batch, and passes its share of the rows
through its part of the model.

The trainer knows no algorithm: advantage estimator and policy loss are handed in, and what else an
algorithm is made of are settings (`areal_gym.config.algorithm_settings`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_gym.config import TrainerConfig
from areal_gym.config.algorithm_settings import RewardConfig
from areal_gym.errors import ConfigError, NotFiniteError, TrainError
from areal_gym.models.backend import load_model
from areal_gym.models.policy_model import PolicyModel
from areal_gym.trainer.algorithms.advantages import (
    AdvantageEstimator,
    check_settings,
    estimate,
    needs_critic,
    needs_past_mean,
)
from areal_gym.trainer.algorithms.corrections import second_moment_mask
from areal_gym.trainer.algorithms.losses import (
    PolicyLoss,
    aggregate,
    aggregation_weights,
    value_loss,
)
from areal_gym.trainer.algorithms.ratios import KL_ESTIMATORS
from areal_gym.trainer.algorithms.token_loss import (
    Proximal,
    TokenLoss,
    check_credit,
    proximal_source,
)
from areal_gym.trainer.batch.bins import Row, split_by_tokens
from areal_gym.trainer.batch.experience import (
    MeansByLag,
    TokenBatch,
    Totals,
    advantage_inputs,
    batch_metrics,
    trained,
)
from areal_gym.trainer.batch.packing import PackedBatch, pack
from areal_gym.trainer.batch.sequences import Sequence as TokenSequence
from areal_gym.trainer.batch.sequences import sequences_of
from areal_gym.trainer.chunked_logprobs import TokenScores, score_tokens
from areal_gym.trainer.critic import Critic
from areal_gym.trainer.lora import adapter_weights, add_adapter, is_adapter, merged_weights
from areal_gym.trainer.optimizer import Optimizer
from areal_gym.trainer.out_of_memory import readable_memory_errors
from areal_gym.trainer.parallel.fsdp import drop_gathered, full, prepare_decoder
from areal_gym.trainer.parallel.rank_group import ALONE, Ranks
from areal_gym.trainer.states import StateFiles, below, prefixed, room_for, saved_tensors
from areal_gym.trainer.step_stats import StepStats
from areal_gym.types import Group

_MAX_BAD_UPDATES = 3
"""Updates in a row without a finite loss and gradient after which training stops."""

_NEWEST = 0.1
"""What a step counts in the running mean of rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """What the updates of one step share."""

    rows: list[TokenSequence]
    columns: TokenBatch
    proximal: Proximal
    version: int
    totals: Totals
    by_lag: MeansByLag
    gap_by_lag: MeansByLag
    """|log-probability of the trainer - recorded one| at the first update."""
    work: StepStats
    logprobs: dict[int, Tensor]
    """Of this rank's rows, by place: what each token had when its own update began."""


class Trainer:
    """The trainer registered as `single`.

    Args:
        decoder: the policy; its weights are updated in place and are the float32 master weights.
        config: the trainer's settings.
        advantage: estimator (`areal_gym list advantages`).
        loss: policy loss (`areal_gym list losses`).
        temperature: of sampling; log-probabilities are those of the sampling distribution.
        max_new_tokens: limit of a turn: what `aggregation: constant_length` divides by, and where
            the overlong penalty ends.
        reference: checkpoint directory of the frozen policy that `kl` is about.
        ranks: who else trains this policy; `decoder` holds the whole weights on each of them, and
            is sharded here.

    Raises:
        ConfigError: arguments that loss or estimator do not take, weights that are not float32, or
            no reference where the settings need one.
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
        ranks: Ranks = ALONE,
    ) -> None:
        if any(p.dtype != torch.float32 for p in decoder.parameters()):
            raise ConfigError(
                "master weights must be float32: in bfloat16 most updates round to nothing",
                hints=["trainer.dtype=bfloat16 computes in bfloat16 with float32 weights"],
            )
        check_settings(advantage, config.advantage_kwargs)
        check_credit(loss, advantage, config)
        self.decoder = decoder
        self.config = config
        self.num_steps = 0
        self._advantage = advantage
        self._token_loss = TokenLoss(loss, config)
        self._temperature = temperature
        self._max_new_tokens = max_new_tokens
        self._ranks = ranks
        self._device = next(decoder.parameters()).device
        self._critic = Critic(decoder, config, ranks) if needs_critic(advantage) else None
        self._reference = self._frozen(reference) if config.kl.coefficient else None
        if config.lora is not None:
            add_adapter(decoder, config.lora)
        prepare_decoder(decoder, config, ranks)
        self._optimizer = Optimizer(decoder, config)
        self._files = StateFiles(ranks)
        self._num_bad = 0
        self._engine_rounds = False
        self._last: _Step | None = None
        # Not a number before the first step.
        self._past_mean = torch.tensor(math.nan, dtype=torch.float64)

    def recompute_proximal(self) -> None:
        """Take ratios against the trainer's own log-probabilities where the setting is "auto"."""
        self._engine_rounds = True

    @readable_memory_errors()
    def step(self, groups: Sequence[Group], version: int) -> dict[str, float]:
        """Train on a batch once and return its metrics.

        Args:
            groups: scored groups. Their order does not matter.
            version: the policy version of the current weights, for staleness.

        Raises:
            NotFiniteError: advantages are not finite, or the loss or its gradient was not several
                times in a row.
            TrainError: there is too little memory, or no token to train on.
        """
        start_s = time.perf_counter()
        every_row = sequences_of(tuple(groups))
        # An episode whose first prompt filled the context has a reward, but nothing to train on:
        # it counts among its siblings and goes no further.
        rows = [row for row in every_row if row.num_trainable]
        if not rows:
            raise TrainError(
                "the batch holds no token that the policy sampled",
                hints=["are the prompts longer than engine.max_context?"],
            )
        metrics = batch_metrics(every_row, version)
        is_stale = metrics["rollout/staleness_max"] > 0
        minibatches = _by_group(rows, self.config.minibatches)
        proximal = proximal_source(
            self.config.correction,
            is_stale=is_stale,
            num_updates=len(minibatches),
            engine_rounds=self._engine_rounds,
        )
        columns = self._columns(rows, proximal)
        metrics |= self._compute_advantages(every_row, rows, columns)
        step = _Step(
            rows=rows,
            columns=columns,
            proximal=proximal,
            version=version,
            totals=Totals(),
            by_lag=MeansByLag(version),
            gap_by_lag=MeansByLag(version),
            work=StepStats(self.decoder.shape, self._device, self.config.dtype),
            logprobs={},
        )
        norms = [
            self._update(step, members, is_first=i == 0) for i, members in enumerate(minibatches)
        ]
        for name, total in self._ranks.sum(step.totals).items():
            metrics[f"train/{name}"] = total / len(minibatches)
        if is_stale:
            metrics |= step.by_lag.metrics("train/approx_kl_stale", self._ranks)
        gaps = step.gap_by_lag.metrics("", self._ranks)
        if "0" in gaps:
            metrics["train/engine_gap"] = gaps["0"]
        metrics["train/grad_norm"] = sum(norms) / len(norms)
        metrics["train/lr"] = self.config.lr * self._lr_scale()
        metrics["train/skipped_updates"] = float(sum(not math.isfinite(norm) for norm in norms))
        self.num_steps += 1
        self._last = step
        metrics["time/train_s"] = time.perf_counter() - start_s
        return metrics | step.work.metrics(metrics["time/train_s"], self._ranks)

    def trained_tokens(self) -> list[dict[str, Any]]:
        """What the last step made of each row of its batch, for those who look at it later.

        Returns:
            In order, for each row that had something to train on: `trajectory`, its trajectory's
            place in the batch; `advantages` and `logprobs` of the tokens that the policy sampled,
            and the mean of the former, `advantage`. Log-probabilities are of the weights that were
            about to be updated: less the recorded ones, the logarithm of the ratio. Empty before
            the first step.
        """
        step = self._last
        if step is None:
            return []
        mine = {i: _rounded(values_T) for i, values_T in step.logprobs.items()}
        logprobs: dict[int, list[float]] = {}
        for part in self._ranks.gather(mine):
            logprobs |= part
        found = []
        for i, row in enumerate(step.rows):
            advantages_T = step.columns.take("advantages", [i])
            found.append(
                {
                    "trajectory": row.trajectory_id,
                    "advantage": round(float(advantages_T.mean()), 5),
                    "advantages": _rounded(advantages_T),
                    "logprobs": logprobs[i],
                }
            )
        return found

    def score(self, rows: list[TokenSequence]) -> list[Tensor]:
        """Log-probabilities of each row's trained tokens under the weights as they are now."""
        return self._score(rows, self.decoder)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and tensors, an adapter merged; copy them before the next step."""
        if self.config.lora is None:
            yield from self.decoder.published(full)
        else:
            yield from merged_weights(self.decoder, self.config.lora)

    def adapter(self) -> dict[str, Tensor]:
        """peft's names and the adapter's tensors; copy them before the next step.

        Raises:
            ConfigError: `trainer.lora` is not set.
        """
        if self.config.lora is None:
            raise ConfigError(
                "all weights are trained, there is no adapter to publish",
                hints=["trainer.lora={} trains one"],
            )
        return dict(adapter_weights(self.decoder))

    def checkpoint_bytes(self) -> int:
        """About what a checkpoint holds: weights, and two numbers for each that is trained."""
        return room_for(self.decoder) + (room_for(self._critic) if self._critic else 0)

    def states(self) -> dict[str, Tensor]:
        """Everything but the policy's whole weights that a checkpoint keeps, by name: live tensors.

        No random state is among it: nothing in here draws. Tasks, sampling and curriculum derive
        their seeds from the run's seed and a group's number, which is the rollout's to keep.
        """
        counts = {"num_steps": self.num_steps, "num_bad": self._num_bad}
        states = {name: torch.tensor(count) for name, count in counts.items()}
        states |= prefixed("optimizer", self._optimizer.states())
        if needs_past_mean(self._advantage):
            states["past_mean"] = self._past_mean
        if self._critic is not None:
            states |= prefixed("critic", self._critic.states())
        parameters = self.decoder.named_parameters()
        adapter = {name: p.detach() for name, p in parameters if is_adapter(name)}
        return states | prefixed("adapter", adapter)

    def save(self, directory: Path) -> Future[None]:
        """Write `states` into a new directory: when this returns, they may change already.

        See `StateFiles.save`.
        """
        return self._files.save(self.states(), directory)

    def load(self, directory: Path) -> None:
        """Continue where `save` was called, by as many ranks or by others.

        Raises:
            TrainError: these are the states of another optimizer, or of no critic.
        """
        saved = saved_tensors(directory)
        self._optimizer.allocate(below("optimizer", saved))
        if self._critic is not None:
            self._critic.allocate(below("critic", saved))
        states = self.states()
        self._files.load(states, directory)
        self.num_steps, self._num_bad = int(states["num_steps"]), int(states["num_bad"])

    # ---- before the first update --------------------------------------------------------------

    def _frozen(self, directory: Path | None) -> PolicyModel:
        if directory is None:
            raise ConfigError(
                f"trainer.kl.coefficient = {self.config.kl.coefficient} needs a reference policy",
                hints=["Trainer(..., reference=DIRECTORY)", "or trainer.kl.coefficient=0"],
            )
        decoder = load_model(directory, device=self._device).requires_grad_(False)
        prepare_decoder(decoder, self.config, self._ranks)
        return decoder

    def _columns(self, rows: list[TokenSequence], proximal: Proximal) -> TokenBatch:
        """What is known of each token before the first update, but for its advantage."""
        columns = TokenBatch(rows, self._device)
        columns.put("old", trained(rows, "old_logprobs"))
        columns.put("versions", trained(rows, "versions"))
        if self._reference is not None:
            columns.put("reference", torch.cat(self._score(rows, self._reference)))
        if proximal == "scored":
            columns.put("proximal", torch.cat(self._score(rows, self.decoder)))
            threshold = self.config.correction.second_moment
            if threshold is not None:
                old_T, proximal_T = columns.all("old"), columns.all("proximal")
                columns.put("kept", second_moment_mask(proximal_T, old_T, threshold=threshold))
        return columns

    def _compute_advantages(
        self, every_row: list[TokenSequence], rows: list[TokenSequence], columns: TokenBatch
    ) -> dict[str, float]:
        """Add advantages, and the critic's targets, to the columns."""
        config = self.config
        inputs = advantage_inputs(every_row, config, self._max_new_tokens)
        metrics = {}
        if config.reward != RewardConfig():
            metrics["reward/shaped_mean"] = float(inputs.rewards_G.mean())
        if inputs.teacher_logprobs_T is not None:
            gained_T = inputs.teacher_logprobs_T - columns.all("old").cpu()
            metrics["train/kl_teacher"] = -float(gained_T.mean())
        if self._reference is not None and config.kl.place == "reward":
            kl = KL_ESTIMATORS[config.kl.estimator]
            penalties_T = config.kl.coefficient * kl(columns.all("old"), columns.all("reference"))
            inputs = replace(inputs, penalties_T=penalties_T.to("cpu", torch.float64))
        if self._critic is not None:
            values_T, final_values_G = self._values(rows, len(inputs.rewards_G))
            columns.put("values", values_T)
            inputs = replace(inputs, values_T=values_T.cpu(), final_values_G=final_values_G)
        if not self._past_mean.isnan():
            inputs = replace(inputs, past_mean=self._past_mean.clone())
        found = estimate(self._advantage, inputs, **config.advantage_kwargs)
        self._note_rewards(inputs.rewards_G.mean())
        columns.put("advantages", found.advantages_T.float())
        if self._critic is not None and found.returns_T is not None:
            columns.put("returns", found.returns_T.float())
            unexplained = float((found.returns_T - values_T.cpu()).var(correction=0))
            variance = float(found.returns_T.var(correction=0))
            metrics["train/explained_variance"] = 1 - unexplained / max(variance, 1e-12)
        ids_T = inputs.trajectory_ids_T
        num_nonzero = len(ids_T[found.advantages_T != 0].unique())
        metrics["train/zero_advantage"] = 1 - num_nonzero / len(ids_T.unique())
        return metrics

    def _note_rewards(self, mean: Tensor) -> None:
        """Bring the running mean of the steps' rewards up to date, in place."""
        is_first = bool(self._past_mean.isnan())
        self._past_mean.copy_(mean if is_first else self._past_mean.lerp(mean, _NEWEST))

    def _score(self, rows: list[TokenSequence], decoder: PolicyModel) -> list[Tensor]:
        def look(batch: PackedBatch, packed: list[TokenSequence]) -> Sequence[Tensor]:
            masks = [row.loss_mask for row in packed]
            scores = score_tokens(decoder, batch, masks, self._temperature)
            return torch.split(scores.logprobs, [row.num_trainable for row in packed])

        return self._forward_no_grad(rows, look)

    def _values(self, rows: list[TokenSequence], num_trajectories: int) -> tuple[Tensor, Tensor]:
        """What the critic predicts before each token [T], and at the end of what was cut [G]."""
        critic = self._critic
        assert critic is not None

        def look(batch: PackedBatch, packed: list[TokenSequence]) -> Sequence[Tensor]:
            masks = [row.loss_mask for row in packed]
            before_T, after_B = critic.before_and_after(self.decoder, batch, masks)
            parts = torch.split(before_T, [row.num_trainable for row in packed])
            return [torch.cat(pair) for pair in zip(parts, after_B.split(1), strict=True)]

        found = self._forward_no_grad(rows, look)
        final_values_G = torch.zeros(num_trajectories, dtype=torch.float64)
        for row, values in zip(rows, found, strict=True):
            # Of a trajectory with several branches the last one counts.
            final_values_G[row.trajectory_id] = float(values[-1]) if row.is_truncated else 0.0
        return torch.cat([values[:-1] for values in found]), final_values_G

    def _forward_no_grad(
        self,
        rows: list[TokenSequence],
        look: Callable[[PackedBatch, list[TokenSequence]], Sequence[Tensor]],
    ) -> list[Tensor]:
        """What `look` finds for each row, without gradient, in the order of the rows."""
        found: dict[int, Tensor] = {}
        with torch.no_grad(), self._autocast():
            for batch, indexes, is_mine in self._microbatches(rows, list(range(len(rows)))):
                seen = look(batch, [rows[i] for i in indexes])
                if is_mine:
                    found.update(zip(indexes, seen, strict=True))
        drop_gathered(self.decoder, self._reference, self._critic and self._critic.trunk)
        for part in self._ranks.gather(found):
            found |= part
        return [found[i] for i in range(len(rows))]

    # ---- one update ---------------------------------------------------------------------------

    def _update(self, step: _Step, members: list[int], *, is_first: bool) -> float:
        """Improve the policy on the rows `members`; returns the gradient's norm.

        Nothing is applied, and the norm is not finite, where the loss or a gradient is not.
        """
        rows, columns, totals = step.rows, step.columns, step.totals
        proximal = step.proximal
        if is_first and proximal == "scored" and self.config.dtype != "float32":
            # In bfloat16, a pass in other company gives other digits, which narrow clips would see.
            proximal = "current"
        sum_of_losses = 0.0
        lengths_G: Counter[int] = Counter()
        for i in members:
            lengths_G[rows[i].trajectory_id] += rows[i].num_trainable
        weights = aggregation_weights(
            self.config.aggregation,
            list(lengths_G.values()),
            constant_length=self._max_new_tokens,
        )
        weights_G = dict(zip(lengths_G, weights, strict=True))
        num_tokens = lengths_G.total()
        for batch, indexes, is_mine in self._microbatches(rows, members):
            masks = [rows[i].loss_mask for i in indexes]
            with self._autocast():
                scores = score_tokens(
                    self.decoder,
                    batch,
                    masks,
                    self._temperature,
                    has_entropy_gradient=self.config.entropy_bonus > 0,
                )
            output = self._token_loss(
                scores.logprobs, columns, indexes, proximal=proximal, version=step.version
            )
            loss_T = output.loss - self.config.entropy_bonus * scores.entropy
            weights_B = [weights_G[rows[i].trajectory_id] for i in indexes]
            loss = aggregate(loss_T, columns.per_row(weights_B, indexes))
            found = {**output.metrics, "entropy": scores.entropy}
            if is_mine:
                totals.add("loss", loss)
                sum_of_losses += float(loss.detach())
                step.work.add(batch, len(loss_T))
                lengths = [rows[i].num_trainable for i in indexes]
                step.logprobs.update(
                    zip(indexes, torch.split(scores.logprobs.detach(), lengths), strict=True)
                )
                versions_T = columns.take("versions", indexes)
                step.by_lag.add(versions_T, output.metrics["approx_kl"])
                if is_first:
                    gap_T = scores.logprobs.detach() - columns.take("old", indexes)
                    step.gap_by_lag.add(versions_T, gap_T.abs())
            if "returns" in columns:
                found["critic_loss"] = self._critic_loss(batch, masks, scores, columns, indexes)
                sum_T = found["critic_loss"].sum()
                loss = loss + self.config.critic.coefficient * sum_T / num_tokens
            if is_mine:
                for name, values_T in found.items():
                    totals.add(name, values_T, num_tokens)
            # Gradients are averaged over the ranks, each of which has a part of the sum.
            (loss * (self._ranks.size if is_mine else 0)).backward()
        # A loss may be no number where its gradient is one: what is added to it has none.
        is_usable = math.isfinite(self._ranks.sum({"loss": sum_of_losses})["loss"])
        norm = self._optimizer.step(self._lr_scale(), is_usable=is_usable)
        if self._critic is not None:
            critic_norm = self._critic.step(self._lr_scale(), is_usable=math.isfinite(norm))
            totals.add("critic_grad_norm", torch.tensor(critic_norm), self._ranks.size)
        if is_usable and math.isfinite(norm):
            self._num_bad = 0
            return norm
        self._num_bad += 1
        if self._num_bad == _MAX_BAD_UPDATES:
            self._num_bad = 0  # whoever goes on from here may try as often
            raise NotFiniteError(
                f"{'the gradient' if is_usable else 'the loss'} was not finite "
                f"{_MAX_BAD_UPDATES} times in a row; nothing was applied",
                hints=[f"a smaller learning rate may help: trainer.lr={self.config.lr / 10:g}"],
            )
        return math.nan

    def _critic_loss(
        self,
        batch: PackedBatch,
        masks: list[tuple[bool, ...]],
        scores: TokenScores,
        columns: TokenBatch,
        indexes: list[int],
    ) -> Tensor:
        critic = self._critic
        assert critic is not None
        with self._autocast():
            values_T = (
                critic.of(scores.hidden)
                if critic.trunk is None
                else critic.before(self.decoder, batch, masks)
            )
        return value_loss(
            values_T,
            columns.take("values", indexes),
            columns.take("returns", indexes),
            clip=self.config.critic.clip,
        )

    def _microbatches(
        self, rows: list[TokenSequence], members: list[int]
    ) -> Iterator[tuple[PackedBatch, list[int], bool]]:
        """Micro-batches of this rank's share: packed, which rows, and whether they count.

        All ranks make the same number of passes, for each gathers the others' weights; who has none
        left passes a row that does not count.
        """
        mine = self._ranks.share(members, [len(rows[i]) for i in members])
        share = self.decoder.can_share_prompts
        packed = [
            Row(token_ids=rows[i].token_ids, num_shared=share * rows[i].num_prompt_tokens)
            for i in mine
        ]
        parts = split_by_tokens(packed, self.config.tokens_per_microbatch) if mine else []
        num_spare = self._ranks.largest(len(parts)) - len(parts)
        for part in parts:
            yield pack([packed[j] for j in part], self._device), [mine[j] for j in part], True
        for _ in range(num_spare):
            spare = min(members, key=lambda i: len(rows[i]))
            yield pack([Row(token_ids=rows[spare].token_ids)], self._device), [spare], False

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.dtype == "float32":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16)

    def _lr_scale(self) -> float:
        if self.config.warmup_steps == 0:
            return 1.0
        return min(1.0, (self.num_steps + 1) / self.config.warmup_steps)


def _rounded(values_T: Tensor) -> list[float]:
    """Five decimals: for people."""
    values: list[float] = values_T.double().round(decimals=5).tolist()
    return values


def _by_group(rows: list[TokenSequence], num_parts: int) -> list[list[int]]:
    """Indexes of the rows of each minibatch; a group is never split."""
    ids = sorted({row.group_id for row in rows})
    num_parts = min(num_parts, len(ids))
    part_of = {group_id: i * num_parts // len(ids) for i, group_id in enumerate(ids)}
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for index, row in enumerate(rows):
        parts[part_of[row.group_id]].append(index)
    return parts
