"""The built-in loggers: TensorBoard, Weights & Biases, Trackio. Each package is imported on use."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_gym.errors import ConfigError

_MODES = ("online", "offline", "disabled")


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


class WandbLogger:
    """Records a run in Weights & Biases; a resumed run continues the same one.

    Args:
        project: the project in which the run appears.
        entity: the user or team that owns the project; by default the one that is logged in.
        group: the name of a group of runs that are shown together.
        tags: labels for searching.
        mode: "online", "offline" (everything stays in the run directory until `wandb sync`) or
            "disabled"; by default the environment variable `WANDB_MODE`, or else "online".

    Raises:
        ConfigError: the mode is unknown, or it is online and there is no login.
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
        self._options: dict[str, Any] = {"project": project, "entity": entity, "group": group}
        self._options["tags"] = tuple(tags)
        if self._mode not in _MODES:
            message = f"the logger wandb has no mode {self._mode!r}"
            raise ConfigError(message, hints=[f"there are: {', '.join(_MODES)}"])
        if self._mode == "online":
            # Otherwise wandb would ask for a login on the terminal, in the middle of the display.
            import wandb

            if not wandb.login(prompt=False, verify=False):
                raise ConfigError(
                    "the logger wandb is online, but there is no login",
                    hints=[
                        "log in: wandb login (or set WANDB_API_KEY)",
                        'or stay offline: "loggers=[{id: wandb, kwargs: {mode: offline}}]"',
                    ],
                )

    def open(
        self, directory: Path, *, name: str, config: Mapping[str, Any], first_step: int
    ) -> str:
        """Begin or continue the run of Weights & Biases."""
        import wandb

        id_file = directory / "id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12])
        self._run = wandb.init(
            **self._options,
            mode=self._mode,
            dir=directory,
            id=id_file.read_text(),
            resume="allow",
            name=name,
            config=dict(config),
            # wandb's output would mix with the display on the terminal.
            settings=wandb.Settings(silent=True, console="off"),
        )
        # wandb's own steps only increase; ours decrease after a resume, and for late evaluations.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if self._mode == "online":
            return str(self._run.url)
        return f"wandb sync {directory}/wandb/offline-run-*" if self._mode == "offline" else "off"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Finish the run of Weights & Biases."""
        self._run.finish()


class TrackioLogger:
    """Records a run in Trackio's own directory; a resumed run continues the same one.

    Args:
        project: the project in which the run appears: `trackio show --project areal-gym`.
        group: the name of a group of runs that are shown together.
        space_id: a Hugging Face Space, "user/name", to which the metrics are sent instead.
    """

    def __init__(
        self, project: str = "areal-gym", group: str | None = None, space_id: str | None = None
    ) -> None:
        self._project = project
        self._options = {"group": group, "space_id": space_id}

    def open(
        self, directory: Path, *, name: str, config: Mapping[str, Any], first_step: int
    ) -> str:
        """Begin or continue Trackio's run."""
        import trackio

        # Trackio continues runs by name, and a run of another directory may have the same name.
        name_file = directory / "name"
        is_known = name_file.exists()
        if not is_known:
            name_file.write_text(f"{name}-{uuid.uuid4().hex[:6]}")
        name = name_file.read_text()
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for data
            self._run = trackio.init(
                self._project,
                name,
                config=dict(config),
                resume="allow" if is_known else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
                **self._options,
            )
        space = self._options["space_id"]
        if space is not None:
            return f"https://huggingface.co/spaces/{space}"
        return f"trackio show --project {self._project} (run {name})"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish Trackio's run."""
        import trackio

        with contextlib.redirect_stdout(sys.stderr):
            trackio.finish()  # run.finish() would be called again when the program ends
