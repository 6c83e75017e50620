"""Factors of all learning rates: schedule, staleness, drift, and the share of rows that teach."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError
from areal_gym.trainer.batch.experience import TokenBatch
from areal_gym.trainer.step_stats import drift_of

_MEMORY = 0.9
"""The share of the largest drift that still counts one step later."""
_MEMORY_OF_KL = 0.8
"""The same for the KL divergence and one update a step, where 0.9 slows AdamW down for too long."""


def require_steps(config: TrainerConfig) -> None:
    """Raise ConfigError if the learning rate decays and the number of steps is not set."""
    schedule = config.lr_schedule
    if schedule.id != "constant" and schedule.steps is None:
        raise ConfigError(
            f"trainer.lr_schedule = {schedule.id!r} needs the number of steps by which it ends",
            hints=["a run knows it; a trainer made by hand: lr_schedule={'id': ..., 'steps': 100}"],
        )


def lr_factor(config: TrainerConfig, num_steps: int) -> float:
    """Return the factor of the learning rates in the step after `num_steps` steps.

    The warm-up is one step ahead of transformers' schedules, whose first step has a rate of 0;
    after it, the factors are the same.
    """
    schedule, warmup = config.lr_schedule, config.warmup_steps
    if num_steps < warmup:
        return (num_steps + 1) / warmup
    if schedule.id == "constant":
        return 1.0
    assert schedule.steps is not None  # `require_steps`
    begin = warmup
    if schedule.id == "wsd":
        begin = max(warmup, schedule.steps - max(1, round(schedule.decay_share * schedule.steps)))
    progress = min(1.0, max(0, num_steps - begin) / max(1, schedule.steps - begin))
    if schedule.id == "cosine":
        factor = 0.5 * (1 + math.cos(math.pi * progress))
    elif schedule.id == "wsd" and schedule.decay == "sqrt":
        factor = 1 - math.sqrt(progress)
    else:
        factor = 1 - progress
    return schedule.min_ratio + (1 - schedule.min_ratio) * factor


def teaching_factor(
    config: TrainerConfig, columns: TokenBatch, members: Sequence[int], staleness: float
) -> float:
    """Return the factor of the learning rates for rows of which only some have an advantage.

    with Muon:   sqrt(rows with an advantage / rows)
    with AdamW:  the same for stale batches, at least 1 / (1 + |staleness|)

    The better a policy is, the more groups have equal rewards, and therefore no gradient (Yu et al.
    2025, "DAPO", 3.2). Muon's steps have one length whatever the gradient's: a few rows move the
    policy as far as a whole batch does. The root is the rule for batch sizes of optimizers that
    normalise (Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient
    Algorithms"). AdamW's steps get shorter by themselves, because it divides by the size of earlier
    gradients, but not those of the few batches that teach after many that did not.

    The factor is 1 where every row teaches without an advantage, by an entropy bonus or a KL
    penalty, and where Muon has no row with one, because it does not step then. With AdamW it is 1
    as well for fresh batches, and where `trainer.max_drift` is null.

    Args:
        config: the trainer's settings.
        columns: the batch, with advantages.
        members: the indexes of the update's rows.
        staleness: the batch's mean staleness, in versions; it may be negative.
    """
    if config.entropy_bonus > 0 or config.kl.coefficient > 0:
        return 1.0
    is_muon = config.optimizer == "muon"
    if not is_muon and (config.max_drift is None or not staleness):
        return 1.0
    advantages = (columns.take("advantages", [i]) for i in members)
    num_teaching = sum(bool((row_T != 0).any()) for row_T in advantages)
    factor = math.sqrt(num_teaching / len(members))
    return (factor or 1.0) if is_muon else max(factor, _least_factor(staleness))


def _least_factor(staleness: float) -> float:
    # After --from-step, episodes of the journal may be of versions that are to come.
    return 1 / (1 + abs(staleness))


class DriftDamping:
    """Shortens the updates on stale batches where the policy has drifted since they were sampled.

    drift = max(distance, the drift before * memory)
    factor = min(most, max(trainer.max_drift / drift, 1 / (1 + |staleness|)))
    most = 1 with Muon, 1 / sqrt(1 + |staleness|) with AdamW

    distance = train/drift with Muon: sum of |A| d^2 / sum of |A|, as in `ratios.adverse_drift`
    distance = train/approx_kl with AdamW, and for students that learn whole distributions

    The memory is 0.9 a step; for the KL divergence with one update a step, 0.8.

    A stale batch's gradient points from where the policy was. Optimizers that normalise (AdamW,
    Muon) follow it in full steps, however little clips and masks leave of it, so the policy
    overshoots at high rates: tokens whose advantage is positive get less likely than when they were
    sampled, and others more. That shows in some batches and not in others, so it is remembered for
    a while.

    With Muon, a policy that moves the way the advantages ask is not slowed down, however far it
    goes. AdamW moves weights that have had small gradients as far as others, and so a few tokens
    very far: its policies were lost while hardly anything went against the advantages, some without
    any drift before. So its rate is lower for stale batches in any case. A student of whole
    distributions has no advantages, and `most` is 1.

    Fresh batches are never damped, and others by no more than Zhang et al. 2016 ("Staleness-aware
    Async-SGD for Distributed Deep Learning") divide, because differences between engine and trainer
    look like a drift, too. docs/asynchrony.md has the experiments.

    The drift is not part of a checkpoint: the first stale batch of a resumed run shows it again.
    """

    def __init__(self, config: TrainerConfig, *, has_advantages: bool = True) -> None:
        self._is_kl = config.optimizer != "muon" or not has_advantages
        default = 0.01 if self._is_kl else 0.006
        self._limit = default if config.max_drift == "default" else config.max_drift
        self._drift = 0.0
        self._is_below_root_of_age = config.optimizer != "muon" and has_advantages

    def distance(self, sums: Mapping[str, float]) -> float:
        """Return how far the policy is from the one that sampled; `sums` are of an update."""
        return sums["approx_kl"] if self._is_kl else drift_of(sums)

    def factor(self, drift: float, staleness: float, num_updates: int) -> float:
        """Return the factor of the learning rates of one update.

        Args:
            drift: the `distance` of the update's tokens, from 0 on.
            staleness: the batch's mean staleness, in versions; it may be negative.
            num_updates: updates of the step.
        """
        if self._limit is None:
            return 1.0
        least = _least_factor(staleness)
        if not math.isfinite(drift):
            return least
        memory = _MEMORY_OF_KL if self._is_kl and num_updates == 1 else _MEMORY
        self._drift = max(drift, memory ** (1 / num_updates) * self._drift)
        most = math.sqrt(least) if self._is_below_root_of_age else 1.0
        return max(least, min(most, self._limit / max(self._limit, self._drift)))
