"""What a run came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_gym.run_dir.run_dir import RunDir
from areal_gym.utils.markup import number


@dataclass(frozen=True, slots=True, repr=False)
class TrainingResult:
    """A run that came to its end."""

    run: RunDir
    """Its directory: all metrics, all trajectories."""
    summary: Mapping[str, Any]
    """`summary.json`."""

    @property
    def stopped(self) -> str | None:
        """Why a callback ended it early; None when it took all its steps."""
        reason: str | None = self.summary["stopped"]
        return reason

    @property
    def metrics(self) -> dict[str, Any]:
        """Of the last step (docs/metrics.md); empty when it took none."""
        rows = self.run.read_metrics()
        return rows[-1] if rows else {}

    @property
    def checkpoint(self) -> Path:
        """Of the last step, in Hugging Face's layout."""
        return self.run.path / str(self.summary["checkpoint"])

    @property
    def best_checkpoint(self) -> Path | None:
        """The best of those that were measured on held-out tasks and are still there."""
        name = self.summary["best_checkpoint"]
        return None if name is None else self.run.path / name

    @property
    def policy(self) -> Path:
        """The best checkpoint, or else the last: what `rollout` and `evaluate` take."""
        return self.best_checkpoint or self.checkpoint

    def __repr__(self) -> str:
        heldout = [number(self.summary.get(f"heldout_{when}")) for when in ("before", "after")]
        stopped = "" if self.stopped is None else f", stopped: {self.stopped}"
        return (
            f"<TrainingResult {self.run.path}: {self.summary['num_steps']} steps, held out "
            f"{' -> '.join(heldout)}{stopped}>"
        )

    def _repr_html_(self) -> str:
        return self.run._repr_html_()
