"""The step that ended a run, because its loss or gradient was not finite, taken again."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_gym.config import RunConfig
from areal_gym.errors import NotFiniteError, NothingToDoError
from areal_gym.plugins import registry
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.components import Components
from areal_gym.runs.make_trainer import make_trainer
from areal_gym.runs.policy_directory import policy_directory, require_same_start
from areal_gym.runs.run_display import Display, SilentDisplay
from areal_gym.trainer.base import close_trainer
from areal_gym.types import Group

if TYPE_CHECKING:
    from areal_gym.trainer.base import GroupTrainer


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedReport:
    """What became of the step this time."""

    step: int
    reason: str | None
    """Why it is refused again; None when it is not."""
    loss: float | None
    grad_norm: float | None
    unscorable: tuple[str, ...]
    """Trajectories to which the policy gives log-probabilities that are not finite."""

    @property
    def is_finite(self) -> bool:
        """Whether the step was taken."""
        return self.reason is None

    def to_dict(self) -> dict[str, Any]:
        """Plain and JSON-ready."""
        return {**asdict(self), "is_finite": self.is_finite}


def replay_refused(
    config: RunConfig, source: Path, *, display: Display | None = None
) -> RefusedReport:
    """Take the step again for which `source` kept the batch, from the checkpoint before it.

    Args:
        config: the settings; with `source`'s own it is refused again, others show what would help.
        source: a run directory.
        display: where to say what goes on.

    Raises:
        NothingToDoError: no step was refused.
        UsageError: the checkpoint before that step is gone.
        GymError: see `areal_gym.errors`.
    """
    registry().get("trainers", config.trainer.id).require_installed()
    import torch

    from areal_gym.trainer.checkpoint import checkpoint_of, require_whole, restore_trainer

    run = RunDir(source)
    found = run.read_refused()
    if found is None:
        raise NothingToDoError(f"{source} has refused no step: there is nothing to take again")
    step, groups = found
    settings = config.trainer.model_copy(update={"runs_in": "thread"})
    config = config.model_copy(update={"trainer": settings})
    policy, _ = policy_directory(config, Components.of(config), display or SilentDisplay())
    require_same_start(run, policy)
    before = policy
    if step > 1:
        _, before = checkpoint_of(run.checkpoints_dir, step - 1)
        require_whole(before)
    torch.set_num_threads(config.trainer.num_threads)
    trainer = make_trainer(config, before, initial=policy)
    try:
        if before is not policy:
            restore_trainer(trainer, before)
        return _take(trainer, step, groups)
    finally:
        close_trainer(trainer)


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
    return RefusedReport(
        step=step,
        reason=reason,
        loss=metrics["train/loss"] if reason is None else None,
        grad_norm=metrics["train/grad_norm"] if reason is None else None,
        unscorable=unscorable,
    )


def _unscorable(trainer: GroupTrainer, groups: list[Group]) -> tuple[str, ...]:
    from areal_gym.trainer.batch.sequences import sequences_of

    ids = [trajectory.id for group in groups for trajectory in group]
    rows = [row for row in sequences_of(groups) if row.num_trainable]
    scores = zip(rows, trainer.score(rows), strict=True)
    bad = {row.trajectory_id for row, logprobs in scores if not logprobs.isfinite().all()}
    return tuple(ids[i] for i in sorted(bad))
