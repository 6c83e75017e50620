"""Trains runs again from their records: no engine, no environment, no sampling.

A run directory holds the trajectories that each step trained on, in order, with token ids,
log-probabilities and versions. Training reads nothing else, so the same settings give the same
weights, bit for bit on a CPU, and other settings show what they would have made of the same
experience. `replay_refused` repeats a step that ended a run because its loss or gradient was not
finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_gym.config import AgentConfig, RunConfig
from areal_gym.config.objective_settings import SUPERVISED
from areal_gym.errors import DataError, NotFiniteError, NothingToDoError, UsageError
from areal_gym.images import use_image_store
from areal_gym.plugins import registry
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.components import Components
from areal_gym.runs.make_trainer import make_trainer
from areal_gym.runs.policy_directory import policy_directory, require_same_start
from areal_gym.runs.preparation import save_settings
from areal_gym.runs.probe import keep_rounding_from_clips
from areal_gym.runs.run_display import Display
from areal_gym.trainer.base import close_trainer
from areal_gym.types import Group
from areal_gym.utils.command_words import quoted

if TYPE_CHECKING:
    from areal_gym.trainer.base import GroupTrainer

_COMPARED = ("train/loss", "train/grad_norm", "reward/mean")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayReport:
    """The comparison of a replay with its run."""

    num_steps: int
    checkpoint: str | None
    """The run's checkpoint that the weights were compared with; None if it was deleted."""
    max_difference: float | None
    """The largest absolute difference of a weight; 0.0 means identical bits."""
    first_difference: int | None
    """The first step whose loss, gradient norm or reward differs from the record, if any."""

    @property
    def is_identical(self) -> bool:
        """Whether nothing that was compared differed."""
        return self.first_difference is None and not self.max_difference

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form."""
        return {**asdict(self), "is_identical": self.is_identical}


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedReport:
    """The outcome of repeating a refused step."""

    step: int
    reason: str | None
    """Why the step was refused again; None if it was not."""
    loss: float | None
    grad_norm: float | None
    unscorable: tuple[str, ...]
    """Trajectories whose log-probabilities under the policy are not finite."""

    @property
    def is_finite(self) -> bool:
        """Whether the step was taken."""
        return self.reason is None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form."""
        return {**asdict(self), "is_finite": self.is_finite}


def replay(
    config: RunConfig,
    source: Path,
    *,
    out: Path | None = None,
    num_steps: int | None = None,
    display: Display | None = None,
) -> ReplayReport:
    """Train the initial policy of the run in `source` again on the run's records.

    Args:
        config: the run's own settings for a faithful replay, or others.
        source: the run directory.
        out: a new run directory for metrics and the final checkpoint; None keeps nothing.
        num_steps: the number of steps; by default all that were recorded.
        display: shows progress.

    Raises:
        NothingToDoError: no step was recorded.
        DataError: the trajectories of a step are missing.
        UsageError: the run trained on fixed data.
        ConfigError: the initial policy is not the one that the run started with.
    """
    registry().get("trainers", config.trainer.id).require_installed()
    display = display or Display()
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
            hints=[f"let it train first: areal-gym train --resume --out {quoted(source)}"],
        )
    config, policy = _start_of(config, run, display)
    trainer = make_trainer(config, policy)
    gap = run.read_provenance().get("engine_gap", {"max": 0.0})
    keep_rounding_from_clips(gap["max"], config, trainer)  # as the run itself did
    try:
        with use_image_store(run.images_dir):
            rows = _train_again(run, steps, trainer, display)
        if out is not None:
            _save(config, trainer, out, rows, policy)
        checkpoint = run.checkpoint(steps[-1])
        has_checkpoint = checkpoint.is_dir()
        differing = (row["step"] for row in rows if not _agree(row, recorded[row["step"]]))
        return ReplayReport(
            num_steps=len(steps),
            checkpoint=str(checkpoint) if has_checkpoint else None,
            max_difference=_largest_difference(trainer, checkpoint) if has_checkpoint else None,
            first_difference=next(differing, None),
        )
    finally:
        close_trainer(trainer)


def replay_refused(
    config: RunConfig, source: Path, *, display: Display | None = None
) -> RefusedReport:
    """Repeat the step that ended the run in `source`, from the checkpoint before it.

    With the run's own settings it is refused again; other settings may show what helps.

    Raises:
        NothingToDoError: no step was refused.
        UsageError: the checkpoint before that step is missing.
    """
    registry().get("trainers", config.trainer.id).require_installed()
    from areal_gym.trainer.checkpoint import checkpoint_of, require_whole, restore_trainer

    run = RunDir(source)
    refused = run.read_refused()
    if refused is None:
        raise NothingToDoError(f"{source} has refused no step: there is nothing to repeat")
    step, groups = refused
    config, policy = _start_of(config, run, display or Display())
    before = policy
    if step > 1:
        _, before = checkpoint_of(run.checkpoints_dir, step - 1)
        require_whole(before)
    trainer = make_trainer(config, before, initial=policy)
    try:
        if before is not policy:
            restore_trainer(trainer, before)
        with use_image_store(run.images_dir):
            return _take(trainer, step, groups)
    finally:
        close_trainer(trainer)


def _start_of(config: RunConfig, run: RunDir, display: Display) -> tuple[RunConfig, Path]:
    """Return settings that train in this process, and the policy that the run started with."""
    import torch

    # There are no rollouts to overlap with.
    settings = config.trainer.model_copy(update={"runs_in": "thread"})
    config = config.model_copy(update={"trainer": settings})
    components = None
    if config.engine.model == "starter":  # its cache key has the environment's arguments
        # No episode is played, so the run's agent need not be installed.
        components = Components.of(config.model_copy(update={"agent": AgentConfig()}))
    policy, _ = policy_directory(config, components, display)
    require_same_start(run, policy)
    # As in training, because the number of threads decides the order of summation.
    torch.set_num_threads(config.trainer.num_threads)
    return config, policy


def _train_again(
    run: RunDir, steps: Sequence[int], trainer: GroupTrainer, display: Display
) -> list[dict[str, Any]]:
    display.phase("replay", len(steps))
    rows: list[dict[str, Any]] = []
    for step in steps:
        groups = run.read_groups(step)
        if not groups:
            hints = [f"replay the steps before it: --steps {row['step']}" for row in rows[-1:]]
            raise DataError(
                f"{run.path} has lost the trajectories of step {step}: "
                "there is nothing to train on",
                hints=[f"they belong in {run.trajectories_dir}", *hints],
            )
        metrics = trainer.step(groups, step - 1)
        rows.append({"step": step, **metrics})
        display.step(step, len(steps), metrics)
    return rows


def _agree(metrics: Mapping[str, Any], recorded: Mapping[str, Any]) -> bool:
    def is_same(value: float, recorded_value: float | None) -> bool:
        # JSON has no NaN: the record has null instead.
        return value == recorded_value or (recorded_value is None and not math.isfinite(value))

    return all(is_same(metrics[key], recorded[key]) for key in _COMPARED if key in recorded)


def _largest_difference(trainer: GroupTrainer, checkpoint: Path) -> float:
    from safetensors import safe_open

    from areal_gym.models.tiny.checkpoint_files import weight_files

    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(f, "pt")) for f in weight_files(checkpoint)]
        file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        largest = 0.0
        for name, trained in trainer.weights():
            saved = file_of[name].get_tensor(name)
            gap = trained.cpu().to(saved.dtype) - saved  # a checkpoint's files may be rounded
            largest = max(largest, float(gap.abs().max()))
        return largest


def _save(
    config: RunConfig, trainer: GroupTrainer, out: Path, rows: list[dict[str, Any]], policy: Path
) -> None:
    from areal_gym.trainer.checkpoint import save_trainer

    with RunDir.open(out, "new") as directory:
        save_settings(directory, config)
        for row in rows:
            directory.append_metrics(row)
        save_trainer(trainer, directory.checkpoints_dir, rows[-1]["step"], policy)


def _take(trainer: GroupTrainer, step: int, groups: list[Group]) -> RefusedReport:
    unscorable = _unscorable(trainer, groups)
    reason: str | None = None
    metrics: dict[str, float] = {}
    try:
        metrics = trainer.step(groups, step - 1)
        if metrics["train/skipped_updates"]:
            reason = "its loss or gradient is not finite"
    except NotFiniteError as error:
        reason = error.message
    loss, grad_norm = metrics.get("train/loss"), metrics.get("train/grad_norm")
    if reason is not None:
        loss = grad_norm = None
    return RefusedReport(
        step=step, reason=reason, loss=loss, grad_norm=grad_norm, unscorable=unscorable
    )


def _unscorable(trainer: GroupTrainer, groups: list[Group]) -> tuple[str, ...]:
    from areal_gym.trainer.batch.sequences import sequences_of

    ids = [trajectory.id for group in groups for trajectory in group]
    rows = [row for row in sequences_of(groups) if row.num_trainable]
    scores = zip(rows, trainer.score(rows), strict=True)
    bad = {row.episode_id for row, logprobs in scores if not logprobs.isfinite().all()}
    return tuple(ids[i] for i in sorted(bad))
