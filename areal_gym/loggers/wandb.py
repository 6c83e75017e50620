"""Metrics to Weights & Biases."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_gym.errors import ConfigError

_MODES = ("online", "offline", "disabled")


class WandbLogger:
    """A run of Weights & Biases; a resumed run goes on with the same one.

    Args:
        project: where the run appears.
        entity: user or team that owns the project; by default the one that is logged in.
        group: runs of one group are shown together.
        tags: words to find the run by.
        mode: "online", "offline" (everything stays in the run directory until `wandb sync`) or
            "disabled"; by default the environment's `WANDB_MODE`, and "online" without.

    Raises:
        ConfigError: no such mode; or it is to be online, and nobody is logged in.
    """

    def __init__(
        self,
        project: str = "areal-gym",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: str | None = None,
    ) -> None:
        self._mode = mode or os.environ.get("WANDB_MODE", "online")
        self._where: dict[str, Any] = {
            "project": project,
            "entity": entity,
            "group": group,
            "tags": tuple(tags),
        }
        if self._mode not in _MODES:
            raise ConfigError(
                f"the logger wandb has no mode {self._mode!r}",
                hints=[f"there are: {', '.join(_MODES)}"],
            )
        if self._mode == "online":
            _require_login()

    def open(
        self, directory: Path, *, name: str, config: Mapping[str, Any], first_step: int
    ) -> str:
        """See `MetricsLogger.open`."""
        import wandb

        id_file = directory / "id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12])
        self._run = wandb.init(
            **self._where,
            mode=self._mode,
            dir=directory,
            id=id_file.read_text(),
            resume="allow",
            name=name,
            config=dict(config),
            # Its talk would run into the display's, and what the display writes is no log.
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Its own count only grows; ours goes back when a run is resumed, and evaluations come late.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if self._mode == "online":
            return str(self._run.url)
        return f"wandb sync {directory}/wandb/offline-run-*" if self._mode == "offline" else "off"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `MetricsLogger.log`."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """See `MetricsLogger.close`."""
        self._run.finish()


def _require_login() -> None:
    # wandb would ask on the terminal, while the display is on it and nobody expects a question.
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise ConfigError(
            "the logger wandb is to be online, and nobody is logged in",
            hints=[
                "log in: wandb login (or set WANDB_API_KEY)",
                'or stay offline: "loggers=[{id: wandb, kwargs: {mode: offline}}]"',
            ],
        )
