"""Factors of all learning rates: the schedule over steps, and the staleness of a batch."""

from __future__ import annotations

import math

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError


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


def stale_factor(config: TrainerConfig, staleness: float, num_updates: int) -> float:
    """Return the factor of the learning rates for a batch of this mean staleness.

    1 / sqrt(1 + staleness_damping * staleness * (num_updates - 1))

    A stale batch's gradient points from where the policy was. Optimizers that normalise (AdamW,
    Muon) follow it in full steps, however little clips and masks leave of it. With one update per
    step this was harmless up to 8 versions; with several updates, each on a part of the batch, the
    policy overshoots. Zhang et al. 2016, "Staleness-aware Async-SGD for Distributed Deep Learning",
    divide by the staleness itself; the root damps old batches less (docs/asynchrony.md).
    """
    return 1 / math.sqrt(1 + config.staleness_damping * staleness * (num_updates - 1))
