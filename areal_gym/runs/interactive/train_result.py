"""The result of `areal_gym.train`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_gym.run_dir.run_dir import RunDir
from areal_gym.utils.markup import number


@dataclass(frozen=True, slots=True, repr=False)
class TrainingResult:
    """A finished run."""

    run: RunDir
    """The run directory: all metrics, all trajectories."""
    summary: Mapping[str, Any]
    """`summary.json`."""

    @property
    def stopped(self) -> str | None:
        """Why a callback ended the run early; None when it took all its steps."""
        reason: str | None = self.summary["stopped"]
        return reason

    @property
    def metrics(self) -> dict[str, Any]:
        """Metrics of the last step (docs/metrics.md); empty when there was none."""
        rows = self.run.read_metrics()
        return rows[-1] if rows else {}

    @property
    def checkpoint(self) -> Path:
        """The checkpoint of the last step, in Hugging Face's format."""
        return self.run.path / str(self.summary["checkpoint"])

    @property
    def best_checkpoint(self) -> Path | None:
        """The best checkpoint on held-out tasks that still exists."""
        name = self.summary["best_checkpoint"]
        return None if name is None else self.run.path / name

    @property
    def policy(self) -> Path:
        """The best checkpoint, or else the last, for `rollout` and `evaluate`."""
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
