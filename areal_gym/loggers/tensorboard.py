"""Writes metrics as TensorBoard event files in the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoardLogger:
    """Writes event files to `loggers/tensorboard`; `tensorboard --logdir runs` shows all.

    A resumed run adds a file, which tells TensorBoard to forget the steps that were lost.
    """

    def open(
        self, directory: Path, *, name: str, config: Mapping[str, Any], first_step: int
    ) -> str:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=first_step)
        return f"tensorboard --logdir {directory}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write scalars."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
