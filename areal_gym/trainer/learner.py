"""One process that improves one policy: groups in, updated weights out.

    groups -> sequences -> advantages -> [minibatch: micro-batches -> loss -> backward] -> update

The learner knows no algorithm: advantage estimator and policy loss are handed in.
"""

from __future__ import annotations

import inspect
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError, TrainError, did_you_mean
from areal_gym.modeling.decoder import Decoder
from areal_gym.trainer.advantages import AdvantageEstimator
from areal_gym.trainer.corrections import correct
from areal_gym.trainer.losses import (
    LossInputs,
    PolicyLoss,
    aggregate,
    aggregation_weights,
)
from areal_gym.trainer.objective import score_tokens
from areal_gym.trainer.optimizer import Optimizer
from areal_gym.trainer.packing import PackedBatch, Row, pack, split_by_tokens
from areal_gym.trainer.ratios import k3
from areal_gym.trainer.sequences import Sequence as TokenSequence
from areal_gym.trainer.sequences import sequences_of
from areal_gym.types import Group

__all__ = ["Learner", "loss_arguments"]

_MAX_BAD_STEPS = 3
"""Updates in a row without a finite gradient after which training stops."""


class Learner:
    """The trainer registered as `single`.

    Args:
        decoder: the policy; its weights are updated in place and are the float32 master weights.
        config: the trainer's settings.
        advantage: estimator (`areal_gym list advantages`).
        loss: policy loss (`areal_gym list losses`).
        temperature: of sampling; log-probabilities are those of the sampling distribution.
        constant_length: tokens that `aggregation: constant_length` divides by.

    Raises:
        ConfigError: `loss_kwargs` that the loss does not take, or weights that are not float32.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: TrainerConfig,
        *,
        advantage: AdvantageEstimator,
        loss: PolicyLoss,
        temperature: float = 1.0,
        constant_length: int = 1,
    ) -> None:
        if any(p.dtype != torch.float32 for p in decoder.parameters()):
            raise ConfigError(
                "master weights must be float32: in bfloat16 most updates round to nothing",
                hints=["trainer.dtype=bfloat16 computes in bfloat16 with float32 weights"],
            )
        self.decoder = decoder
        self.config = config
        self.num_steps = 0
        self._advantage = advantage
        self._loss = loss
        self._loss_kwargs = loss_arguments(loss, config)
        self._temperature = temperature
        self._constant_length = constant_length
        self._optimizer = Optimizer(decoder, config)
        self._device = next(decoder.parameters()).device
        self._num_bad = 0

    def step(self, groups: Sequence[Group], version: int) -> dict[str, float]:
        """Train on a batch once and return its metrics.

        Args:
            groups: scored groups. Their order does not matter.
            version: the policy version of the current weights, for staleness.

        Raises:
            TrainError: the gradient was not finite several times in a row.
        """
        start_s = time.perf_counter()
        rows = sequences_of(tuple(groups))
        heads = [row for row in rows if row.branch == 0]  # one for each trajectory
        rewards_G = torch.tensor([row.reward for row in heads], dtype=torch.float64)
        group_ids_G = torch.tensor([row.group_id for row in heads])
        advantages_G = self._advantage(rewards_G, group_ids_G).tolist()
        if not any(row.num_trainable for row in rows):
            raise TrainError(
                "the batch holds no token that the policy sampled",
                hints=["are the prompts longer than engine.max_context?"],
            )
        metrics = _batch_metrics(rows, rewards_G, group_ids_G, advantages_G, version)
        # An episode whose first prompt filled the context has a reward, but nothing to train on:
        # it counts among its siblings and goes no further.
        rows = [row for row in rows if row.num_trainable]
        is_stale = metrics["rollout/staleness_max"] > 0
        minibatches = _by_group(rows, self.config.minibatches)
        # The one update of a step begins at the weights that the proximal policy has.
        proximal = self.score(rows) if is_stale and len(minibatches) > 1 else None
        totals: dict[str, float] = {}
        by_lag = _MeansByLag(version)
        norms = []
        for members in minibatches:
            norms.append(
                self._update(rows, advantages_G, members, is_stale, proximal, totals, by_lag)
            )
        metrics |= {f"train/{name}": value / len(minibatches) for name, value in totals.items()}
        if is_stale:
            metrics |= by_lag.metrics("train/approx_kl_stale")
        metrics["train/grad_norm"] = sum(norms) / len(norms)
        metrics["train/lr"] = self.config.lr * self._lr_scale()
        metrics["train/skipped_updates"] = float(sum(not math.isfinite(norm) for norm in norms))
        self.num_steps += 1
        metrics["time/train_s"] = time.perf_counter() - start_s
        return metrics

    def score(self, rows: list[TokenSequence]) -> list[Tensor]:
        """Log-probabilities of each row's trained tokens under the weights as they are now."""
        found: dict[int, Tensor] = {}
        with torch.no_grad(), self._autocast():
            for batch, indexes in self._micro_batches(rows, list(range(len(rows)))):
                masks = [rows[i].loss_mask for i in indexes]
                scores = score_tokens(self.decoder, batch, masks, self._temperature)
                parts = torch.split(scores.logprobs, [rows[i].num_trainable for i in indexes])
                found.update(zip(indexes, parts, strict=True))
        return [found[i] for i in range(len(rows))]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names and the live tensors; copy them before the next step."""
        for name, tensor in self.decoder.state_dict().items():
            yield name, tensor.detach()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights that a checkpoint needs."""
        return {"num_steps": self.num_steps, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.num_steps = state["num_steps"]
        self._optimizer.load_state_dict(state["optimizer"])

    # ---- one update ---------------------------------------------------------------------------

    def _update(
        self,
        rows: list[TokenSequence],
        advantages_G: list[float],
        members: list[int],
        is_stale: bool,
        proximal: list[Tensor] | None,
        totals: dict[str, float],
        by_lag: _MeansByLag,
    ) -> float:
        lengths_G: Counter[int] = Counter()
        for i in members:
            lengths_G[rows[i].trajectory_id] += rows[i].num_trainable
        weights = aggregation_weights(
            self.config.aggregation,
            list(lengths_G.values()),
            constant_length=self._constant_length,
        )
        weights_G = dict(zip(lengths_G, weights, strict=True))
        num_tokens = lengths_G.total()
        for batch, indexes in self._micro_batches(rows, members):
            with self._autocast():
                scores = score_tokens(
                    self.decoder,
                    batch,
                    [rows[i].loss_mask for i in indexes],
                    self._temperature,
                )
            lengths = torch.tensor([rows[i].num_trainable for i in indexes])
            trajectories = [rows[i].trajectory_id for i in indexes]
            old_T = self._tensor(_trained(rows, indexes, "old_logprobs"))
            proximal_T = old_T
            if proximal is not None:
                proximal_T = torch.cat([proximal[i] for i in indexes])
            elif is_stale:
                proximal_T = scores.logprobs.detach()
            inputs = LossInputs(
                logprobs=scores.logprobs,
                proximal=proximal_T,
                old_logprobs=old_T,
                advantages=self._per_token([advantages_G[i] for i in trajectories], lengths),
                sequence_ids=torch.arange(len(indexes)).repeat_interleave(lengths).to(self._device),
            )
            output = self._loss(inputs, **self._loss_kwargs)
            loss_T = output.loss
            if is_stale:
                weight_T = correct(proximal_T, old_T, inputs.sequence_ids).weights
                loss_T = weight_T * loss_T
                _add(totals, "stale_weight", weight_T, num_tokens)
            loss = aggregate(loss_T, self._per_token([weights_G[i] for i in trajectories], lengths))
            loss.backward()
            totals["loss"] = totals.get("loss", 0.0) + float(loss.detach())
            for name, values_T in output.metrics.items():
                _add(totals, name, values_T, num_tokens)
            _add(totals, "entropy", scores.entropy, num_tokens)
            # The tokens are the old policy's, so this is the divergence *from* it.
            kl_T = k3(old_T, scores.logprobs.detach())
            _add(totals, "approx_kl", kl_T, num_tokens)
            if is_stale:
                by_lag.add(_trained(rows, indexes, "versions"), kl_T)
        norm = self._optimizer.step(self._lr_scale())
        self._num_bad = 0 if math.isfinite(norm) else self._num_bad + 1
        if self._num_bad >= _MAX_BAD_STEPS:
            raise TrainError(
                f"the gradient was not finite {_MAX_BAD_STEPS} times in a row; nothing was applied",
                hints=[f"a smaller learning rate may help: trainer.lr={self.config.lr / 10:g}"],
            )
        return norm

    def _micro_batches(
        self, rows: list[TokenSequence], members: list[int]
    ) -> Iterator[tuple[PackedBatch, list[int]]]:
        packed = [
            Row(token_ids=rows[i].token_ids, num_shared=rows[i].num_prompt_tokens) for i in members
        ]
        for part in split_by_tokens(packed, self.config.tokens_per_microbatch):
            yield pack([packed[j] for j in part], self._device), [members[j] for j in part]

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.dtype == "float32":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=torch.bfloat16)

    def _lr_scale(self) -> float:
        if self.config.warmup_steps == 0:
            return 1.0
        return min(1.0, (self.num_steps + 1) / self.config.warmup_steps)

    def _tensor(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _per_token(self, values_B: list[float], lengths_B: Tensor) -> Tensor:
        return self._tensor(values_B).repeat_interleave(lengths_B.to(self._device))


def loss_arguments(loss: PolicyLoss, config: TrainerConfig) -> dict[str, Any]:
    """The settings as keyword arguments of the loss: the clips where it takes them.

    Raises:
        ConfigError: `loss_kwargs` names an argument that the loss does not have.
    """
    parameters = inspect.signature(loss).parameters
    takes = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in config.loss_kwargs:
        if name not in takes:
            near = did_you_mean(name, takes)
            raise ConfigError(
                f"the loss {config.loss!r} takes no argument {name!r}",
                hints=[near] if near else [f"it takes: {', '.join(takes) or 'none'}"],
            )
    # The loss's own default matters: 0.2 is a sensible clip for a token's ratio, not a sequence's.
    clips: dict[str, Any] = {
        name: value
        for name, value in (("clip_low", config.clip_low), ("clip_high", config.clip_high))
        if name in takes and value != "default"
    }
    return {**clips, **config.loss_kwargs}


class _MeansByLag:
    """Means of a number per token, apart by how old the token's policy is: 0 to 4, and more."""

    _MAX = 5

    def __init__(self, version: int) -> None:
        self._version = version
        self._sums: Counter[int] = Counter()
        self._counts: Counter[int] = Counter()

    def add(self, versions: list[Any], values_T: Tensor) -> None:
        for version, value in zip(versions, values_T.tolist(), strict=True):
            lag = min(self._version - version, self._MAX)
            self._sums[lag] += value
            self._counts[lag] += 1

    def metrics(self, prefix: str) -> dict[str, float]:
        return {
            f"{prefix}{lag}{'+' if lag == self._MAX else ''}": self._sums[lag] / count
            for lag, count in sorted(self._counts.items())
        }


def _trained(rows: list[TokenSequence], indexes: list[int], name: str) -> list[Any]:
    """The named numbers of the trained tokens of these rows."""
    return [
        value
        for i in indexes
        for value, is_trained in zip(getattr(rows[i], name), rows[i].loss_mask, strict=True)
        if is_trained
    ]


def _by_group(rows: list[TokenSequence], num_parts: int) -> list[list[int]]:
    """Indexes of the rows of each minibatch; a group is never split."""
    ids = sorted({row.group_id for row in rows})
    num_parts = min(num_parts, len(ids))
    part_of = {group_id: i * num_parts // len(ids) for i, group_id in enumerate(ids)}
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for index, row in enumerate(rows):
        parts[part_of[row.group_id]].append(index)
    return parts


def _add(totals: dict[str, float], name: str, values_T: Tensor, num_tokens: int) -> None:
    totals[name] = totals.get(name, 0.0) + float(values_T.detach().sum()) / num_tokens


def _batch_metrics(
    rows: list[TokenSequence],
    rewards_G: Tensor,
    group_ids_G: Tensor,
    advantages_G: list[float],
    version: int,
) -> dict[str, float]:
    heads = [row for row in rows if row.branch == 0]
    staleness = [version - v for row in rows for v in row.versions if v >= 0]
    group_ids = sorted(set(group_ids_G.tolist()))
    by_group = [rewards_G[group_ids_G == group_id] for group_id in group_ids]
    return {
        "reward/mean": float(rewards_G.mean()),
        "reward/std": float(rewards_G.std(correction=0)),
        "reward/solve_all": sum(bool((r >= 1).all()) for r in by_group) / len(by_group),
        "reward/solve_none": sum(bool((r <= 0).all()) for r in by_group) / len(by_group),
        "rollout/staleness_mean": sum(staleness) / len(staleness),
        "rollout/staleness_max": float(max(staleness)),
        "rollout/tokens": float(len(staleness)),
        "rollout/turns": sum(len(row.turn_rewards) for row in heads) / len(heads),
        "train/sequences": float(len(rows)),
        "train/masked_fraction": 1 - len(staleness) / sum(len(row) for row in rows),
        "train/zero_advantage": sum(a == 0 for a in advantages_G) / len(advantages_G),
    }
