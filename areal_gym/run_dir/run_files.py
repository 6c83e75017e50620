"""The files of a run directory: their paths, and how they are read.

    config.yaml           the resolved settings, which can start the same run again
    plugins.json          the plugins used, with distribution and version; Python, platform
    inputs/               copies of the user's files: rewards, tools, environments, small data
    metrics.jsonl         one line per step
    evaluations.jsonl     one line per evaluation on held-out tasks
    evaluations/          a folder for each `areal-gym eval --run` of this run
    journal.jsonl         the state of each group, so finished groups survive a crash
    trajectories/         step-000012.jsonl, one trajectory per line; eval-*.jsonl
    images/               the images in messages, by hash: ab/<sha256>.png
    trained/              step-000012.jsonl: advantages and log-probabilities, one line per row
    tokenizer.json        the policy's tokenizer, so that token ids can be read
    checkpoints/          written by the trainer
    loggers/              a folder for each logger
    profiles/             traces of the steps in trainer.profile.steps
    learning_curve.png    written at the end
    report.html           written at the end: a shareable one-page report
    summary.json          written at the end; a run without it has not finished
    status.json           the run's state, or how and why it ended
    notes.json            tags and a note that users add in the viewer
    *.jsonl.torn          an incomplete last line, cut off when a run was resumed after a crash
    log.txt               messages with their times

Files are written atomically (temporary name, fsync, rename). `metrics.jsonl` and `log.txt` are
appended to; readers ignore an incomplete last line after a crash, and the next writer cuts it off.
If the disk is full, a `TrainError` is raised, and the file stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_gym.errors import DataError, UsageError
from areal_gym.run_dir.run_status import RunStatus, StatusFile, StatusRecord, is_locked
from areal_gym.types import Group, Trajectory, notebook_html
from areal_gym.utils.files import path_hints, read_json, read_lines, read_yaml


class RunFiles:
    """The paths of a run's files, and functions that read them. It writes nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.plugins_file = path / "plugins.json"
        self.inputs_dir = path / "inputs"
        self.metrics_file = path / "metrics.jsonl"
        self.evaluations_file = path / "evaluations.jsonl"
        self.evaluations_dir = path / "evaluations"
        self.journal_file = path / "journal.jsonl"
        self.trajectories_dir = path / "trajectories"
        self.images_dir = path / "images"
        self.trained_dir = path / "trained"
        self.tokenizer_file = path / "tokenizer.json"
        self.checkpoints_dir = path / "checkpoints"
        self.loggers_dir = path / "loggers"
        self.profiles_dir = path / "profiles"
        self.learning_curve_file = path / "learning_curve.png"
        self.report_file = path / "report.html"
        self.summary_file = path / "summary.json"
        self.log_file = path / "log.txt"
        self.status_file = path / "status.json"
        self.notes_file = path / "notes.json"
        self._status = StatusFile(self.status_file)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}>"

    _repr_html_ = notebook_html

    def contents(self) -> list[Path]:
        """Return every path that a run may write, whether it exists or not."""
        paths = [value for value in vars(self).values() if isinstance(value, Path)][1:]
        return [*paths, *self.path.glob("*.jsonl.torn")]

    def checkpoint(self, step: int) -> Path:
        """Return the path of a step's checkpoint, which may not exist."""
        return self.checkpoints_dir / f"step-{step:06d}"

    def trajectories_file(self, name: int | str) -> Path:
        """Return the path of a step's trajectories (`name=12`) or of others (`name="eval-0"`)."""
        stem = f"step-{name:06d}" if isinstance(name, int) else name
        return self.trajectories_dir / f"{stem}.jsonl"

    @property
    def holds_run(self) -> bool:
        """Whether the directory has a run's files."""
        return any(path.exists() for path in self.contents())

    @property
    def is_finished(self) -> bool:
        """Whether the run has finished."""
        return self.summary_file.exists()

    @property
    def is_being_written(self) -> bool:
        """Whether a process of this machine has locked it; False if that cannot be determined."""
        return is_locked(self.path)

    @property
    def status(self) -> RunStatus:
        """The run's current or final state; "finished" for a directory that is not a run's."""
        if self.is_finished or not self.config_file.exists():
            return "finished"
        if self.is_being_written:
            return "running"
        record = self._status.read()
        return "stopped" if record is None else record.current_state

    @property
    def error(self) -> str | None:
        """The error in `status.json`, if the run has failed."""
        return None if (record := self._status.read()) is None else record.error

    def read_status(self) -> StatusRecord | None:
        """Read `status.json`; None when it is missing or cannot be read."""
        return self._status.read()

    def recipe(self) -> Path:
        """Return the file with the run's settings; raise UsageError if there is no run."""
        if not self.config_file.exists():
            raise UsageError(
                f"{self.path} is not a run directory: there is nothing to resume",
                hints=[*path_hints(self.path), "start one: leave --resume out"],
            )
        return self.config_file

    def read_config(self) -> dict[str, Any]:
        """Read the resolved settings as a tree; it is empty if they cannot be read."""
        try:
            settings = read_yaml(self.config_file)
        except (OSError, DataError):
            return {}
        return settings if isinstance(settings, dict) else {}

    def read_provenance(self) -> dict[str, Any]:
        """Read the result of `save_provenance`; it is empty if there is none."""
        return read_json(self.plugins_file) if self.plugins_file.exists() else {}

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read all complete lines, in order."""
        return list(read_lines(self.metrics_file, skips_torn_end=True))

    def read_evaluations(self) -> list[dict[str, Any]]:
        """Read all evaluations, in order."""
        return list(read_lines(self.evaluations_file, skips_torn_end=True))

    def read_summary(self) -> dict[str, Any] | None:
        """Read the run's outcome; None if it has not finished. Raises DataError if damaged."""
        return read_json(self.summary_file) if self.summary_file.exists() else None

    def read_trajectories(self, name: int | str) -> Iterator[Trajectory]:
        """Read the trajectories that `save_trajectories` wrote under this name."""
        return map(Trajectory.from_dict, read_lines(self.trajectories_file(name)))

    def read_refused(self) -> tuple[int, list[Group]] | None:
        """Read the step and the batch of the newest `save_refused`; None if there is none."""
        files = sorted(self.trajectories_dir.glob("refused-*.jsonl"))
        if not files:
            return None
        return int(files[-1].stem.removeprefix("refused-")), self.read_groups(files[-1].stem)

    def read_groups(self, name: int | str) -> list[Group]:
        """Read the batch of a step, in the order in which it was trained on."""
        groups: dict[str, list[Trajectory]] = {}
        for trajectory in self.read_trajectories(name):
            groups.setdefault(trajectory.group_id, []).append(trajectory)
        return [
            Group(id=id, task=members[0].task, trajectories=tuple(members))
            for id, members in groups.items()
        ]
