"""A run trained again from its record: no engine, no environment, no sampling.

A run directory holds, step by step, the trajectories that were trained on, with ids,
log-probabilities and versions, in the order in which they were. That is all that training takes
in, so the same settings give the same weights, bit for bit on a CPU; other settings show what they
would have made of the same experience.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_gym.config import RunConfig
from areal_gym.config.objective_settings import SUPERVISED
from areal_gym.errors import DataError, NothingToDoError, UsageError
from areal_gym.plugins import registry
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.components import Components
from areal_gym.runs.make_trainer import make_trainer
from areal_gym.runs.policy_directory import policy_directory, require_same_start
from areal_gym.runs.preparation import save_settings
from areal_gym.runs.probe import keep_rounding_from_clips
from areal_gym.runs.run_display import Display, SilentDisplay
from areal_gym.trainer.base import close_trainer

if TYPE_CHECKING:
    from areal_gym.trainer.base import GroupTrainer

_COMPARED = ("train/loss", "train/grad_norm", "reward/mean")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReport:
    """How a replay compares with its run."""

    num_steps: int
    checkpoint: str | None
    """The run's checkpoint that the weights were compared with; None when none is left to."""
    max_difference: float | None
    """Largest absolute difference of a weight; 0.0 is bit for bit."""
    first_difference: int | None
    """The first step whose loss, gradient norm or reward differ from the record; None if none."""

    @property
    def is_identical(self) -> bool:
        """Whether nothing that was compared differs."""
        return self.first_difference is None and not self.max_difference

    def to_dict(self) -> dict[str, Any]:
        """Plain and JSON-ready."""
        return {**asdict(self), "is_identical": self.is_identical}


def replay(
    config: RunConfig,
    source: Path,
    *,
    out: Path | None = None,
    num_steps: int | None = None,
    display: Display | None = None,
) -> ReplayReport:
    """Train the policy that `source` started with on what `source` recorded.

    Args:
        config: the settings; `source`'s own for a faithful replay.
        source: a run directory.
        out: a new run directory for metrics and the final checkpoint; nothing is kept without.
        num_steps: how many steps; all that were recorded by default.
        display: where to say what goes on.

    Raises:
        NothingToDoError: no step was recorded.
        DataError: the trajectories of a step are gone.
        UsageError: it learned from fixed data.
        ConfigError: the initial policy is not the one that the run started with.
        GymError: see `areal_gym.errors`.
    """
    registry().get("trainers", config.trainer.id).require_installed()
    import torch

    shown = display or SilentDisplay()
    if config.objective in SUPERVISED:
        raise UsageError(
            f"{source} has no episodes to replay: its objective is {config.objective}",
            hints=["fixed data and a seed give the same run again: areal-gym train -c CONFIG"],
        )
    run = RunDir(source)
    recorded = {row["step"]: row for row in run.read_metrics()}
    steps = sorted(recorded)[:num_steps]
    if not steps:
        raise NothingToDoError(
            f"{source} has recorded no step to replay",
            hints=[f"let it train first: areal-gym train --resume --out {source}"],
        )
    # There is nothing to overlap with here.
    settings = config.trainer.model_copy(update={"runs_in": "thread"})
    config = config.model_copy(update={"trainer": settings})
    policy, _ = policy_directory(config, Components.of(config), shown)
    require_same_start(run, policy)
    # As training does: the number of threads decides in which order sums are added up.
    torch.set_num_threads(config.trainer.num_threads)
    trainer = make_trainer(config, policy)
    gap = run.read_provenance().get("engine_gap", {"max": 0.0})
    keep_rounding_from_clips(gap["max"], config, trainer)  # as the run itself did
    try:
        return _train_again(config, run, recorded, steps, policy, trainer, shown, out)
    finally:
        close_trainer(trainer)


def _train_again(
    config: RunConfig,
    run: RunDir,
    recorded: Mapping[int, Mapping[str, Any]],
    steps: Sequence[int],
    policy: Path,
    trainer: GroupTrainer,
    shown: Display,
    out: Path | None,
) -> ReplayReport:
    shown.phase("replay", len(steps))
    first_difference: int | None = None
    rows: list[dict[str, Any]] = []
    for step in steps:
        groups = run.read_groups(step)
        if not groups:
            raise DataError(
                f"{run.path} has lost the trajectories of step {step}: "
                "there is nothing to train on",
                hints=[f"they belong into {run.trajectories_dir}"]
                + ([f"what comes before: --steps {rows[-1]['step']}"] if rows else []),
            )
        metrics = trainer.step(groups, step - 1)
        rows.append({"step": step, **metrics})
        if first_difference is None and not _agree(metrics, recorded[step]):
            first_difference = step
        shown.step(step, len(steps), metrics)
    if out is not None:
        _save(config, trainer, out, rows, policy)
    checkpoint = run.checkpoints_dir / f"step-{steps[-1]:06d}"
    if not checkpoint.is_dir():
        return ReplayReport(
            num_steps=len(steps),
            checkpoint=None,
            max_difference=None,
            first_difference=first_difference,
        )
    return ReplayReport(
        num_steps=len(steps),
        checkpoint=str(checkpoint),
        max_difference=_largest_difference(trainer, checkpoint),
        first_difference=first_difference,
    )


def _agree(metrics: Mapping[str, Any], recorded: Mapping[str, Any]) -> bool:
    def same(ours: float, theirs: float | None) -> bool:
        # JSON has no NaN; the record holds null in its place.
        return ours == theirs or (theirs is None and not math.isfinite(ours))

    return all(same(metrics[key], recorded[key]) for key in _COMPARED if key in recorded)


def _largest_difference(trainer: GroupTrainer, checkpoint: Path) -> float:
    from areal_gym.models.tiny.checkpoint_files import load_checkpoint

    theirs = load_checkpoint(checkpoint).state_dict()
    return max(float((ours.cpu() - theirs[name]).abs().max()) for name, ours in trainer.weights())


def _save(
    config: RunConfig, trainer: GroupTrainer, out: Path, rows: list[dict[str, Any]], policy: Path
) -> None:
    from areal_gym.trainer.checkpoint import save_trainer

    with RunDir.open(out, "new") as directory:
        save_settings(directory, config)
        for row in rows:
            directory.append_metrics(row)
        save_trainer(trainer, directory.checkpoints_dir, rows[-1]["step"], policy)
