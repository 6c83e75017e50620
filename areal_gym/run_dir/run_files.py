"""The files of a run directory: where each lies, and how it is read.

    config.yaml           the resolved settings; they run again as they are
    plugins.json          what was used: plugin, distribution and version, Python, platform
    inputs/               copies of the user's files: rewards, tools, environments, small data
    metrics.jsonl         one line per step
    evaluations.jsonl     one line per evaluation on held-out tasks
    evaluations/          a folder for each `areal-gym eval --run` of this run
    journal.jsonl         the state of each group; finished groups survive a crash in it
    trajectories/         step-000012.jsonl, one trajectory per line; eval-*.jsonl
    images/               the pictures of its messages and tokens, by hash: ab/<sha256>.png
    trained/              step-000012.jsonl: advantages and log-probabilities, line by line
    tokenizer.json        the policy's tokenizer, so that token ids can be read
    checkpoints/          written by the trainer
    loggers/              a folder for each logger
    profiles/             traces of the steps in trainer.profile.steps
    learning_curve.png    written at the end
    report.html           written at the end: a shareable one-page report
    summary.json          written at the end: a run without it has not finished
    status.json           what the run is doing, or how it ended and why
    notes.json            tags and a note that people gave it in the viewer
    *.jsonl.torn          the torn end of a file, cut off when a run was resumed after a crash
    log.txt

Files appear whole or not at all (temporary name, fsync, rename). `metrics.jsonl` and `log.txt`
grow; readers ignore a line that a crash has torn, and the next writer cuts it off. A full
disk is a `TrainError` that says so, and leaves the file as it was before.
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
    """The paths of a run's files, and their contents. It changes nothing on disk."""

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
        own = [value for value in vars(self).values() if isinstance(value, Path)][1:]
        return [*own, *self.path.glob("*.jsonl.torn")]

    def checkpoint(self, step: int) -> Path:
        """Return where the checkpoint of a step lies, if there is one."""
        return self.checkpoints_dir / f"step-{step:06d}"

    def trajectories_file(self, name: int | str) -> Path:
        """Return the file of a step's trajectories (`name=12`) or of others (`name="eval-0"`)."""
        stem = f"step-{name:06d}" if isinstance(name, int) else name
        return self.trajectories_dir / f"{stem}.jsonl"

    @property
    def holds_run(self) -> bool:
        """Whether a run has written here."""
        return any(path.exists() for path in self.contents())

    @property
    def is_finished(self) -> bool:
        """Whether the run came to its end."""
        return self.summary_file.exists()

    @property
    def is_being_written(self) -> bool:
        """Whether a process of this machine has it open; False if the system does not tell."""
        return is_locked(self.path)

    @property
    def status(self) -> RunStatus:
        """The run's state now, or its end; an evaluation on its own is finished."""
        if self.is_finished or not self.config_file.exists():
            return "finished"
        if self.is_being_written:
            return "running"
        record = self._status.read()
        return "stopped" if record is None else record.current_state

    @property
    def error(self) -> str | None:
        """The reason why the run has failed, as `status.json` says."""
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
        """Read the resolved settings as a tree; empty when there are none that can be read."""
        try:
            settings = read_yaml(self.config_file)
        except (OSError, DataError):
            return {}
        return settings if isinstance(settings, dict) else {}

    def read_provenance(self) -> dict[str, Any]:
        """Read what `save_provenance` wrote; empty when nothing did."""
        return read_json(self.plugins_file) if self.plugins_file.exists() else {}

    def read_metrics(self) -> list[dict[str, Any]]:
        """Read all whole lines, in order."""
        return list(read_lines(self.metrics_file, skips_torn_end=True))

    def read_evaluations(self) -> list[dict[str, Any]]:
        """Read all evaluations, in order."""
        return list(read_lines(self.evaluations_file, skips_torn_end=True))

    def read_summary(self) -> dict[str, Any] | None:
        """Read the run's outcome, None until it has finished; raise DataError if it is damaged."""
        return read_json(self.summary_file) if self.summary_file.exists() else None

    def read_trajectories(self, name: int | str) -> Iterator[Trajectory]:
        """Read what `save_trajectories` wrote under that name."""
        return map(Trajectory.from_dict, read_lines(self.trajectories_file(name)))

    def read_refused(self) -> tuple[int, list[Group]] | None:
        """Read the newest batch of `save_refused` and its step; None when there is none."""
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
