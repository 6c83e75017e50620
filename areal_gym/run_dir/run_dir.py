"""Open a run directory in one of three modes, lock it, and write its files.

`run_files` lists the files; only `RunFiles` and `RunDir` know their paths.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from areal_gym.errors import DataError, NothingToDoError, RunExistsError, TrainError, UsageError
from areal_gym.images import ImageStore, hashes_in_files
from areal_gym.run_dir.run_files import RunFiles
from areal_gym.run_dir.run_status import DirectoryLock
from areal_gym.run_dir.trajectory_files import step_of
from areal_gym.types import Trajectory
from areal_gym.utils.files import (
    append_text,
    cut_torn_end,
    read_lines,
    readable_disk_errors,
    remove,
    to_json,
    to_json_line,
    write_atomic,
)
from areal_gym.utils.packed_numbers import PackedNumbers
from areal_gym.version import __version__

RunMode = Literal["new", "resume", "clean"]
"""How a directory is opened: "new" must have no run, "resume" continues its run, "clean" replaces
it."""


class RunDir(RunFiles):
    """A run's directory. The constructor does not touch the disk, which is enough for reading.

    Example::

        with RunDir.open(Path("runs/tir-1"), mode="new") as run:
            run.append_metrics({"step": 1, "reward/mean": 0.25})
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.repairs: list[str] = []
        """Descriptions of what `begin` has repaired."""
        self.has_begun = False
        """Whether `begin` was called, so the directory may be written to."""
        self._created: list[Path] = []
        self._mode: RunMode = "new"
        self._lock: DirectoryLock | None = None
        self._has_config = False

    @classmethod
    def open(cls, path: Path, mode: RunMode = "new", *, begins: bool = True) -> Self:
        """Lock a directory for writing until `close` or the end of the process.

        Args:
            path: the directory.
            mode: what to do with a run that is in it.
            begins: whether to call `begin`. Otherwise nothing is changed until `begin` is called,
                so a request that is refused before leaves the directory as it was.

        Raises:
            RunExistsError: `mode` is "new", and the directory is not empty.
            UsageError: there is no run to resume, or "clean" would delete files that are not a
                run's.
            InfrastructureError: another process is writing to the directory.
        """
        run = cls(path)
        run._mode = mode
        if mode == "resume":
            run.recipe()
        run._created = [parent for parent in (path, *path.parents) if not parent.exists()]
        with readable_disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        run._lock = DirectoryLock(path)
        try:
            run._check_mode()
            if begins:
                run.begin()
        except BaseException:
            run.close()
            raise
        return run

    def close(self) -> None:
        """Release the lock, and remove the directories that `open` created if they are empty.

        Idempotent.
        """
        if self._lock is not None:
            with contextlib.suppress(OSError):
                for path in self._created or [self.path]:
                    path.rmdir()
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # A refused request leaves no run.
        is_refused = isinstance(error, UsageError | NothingToDoError)
        is_new = self.has_begun and self._mode != "resume"
        if is_refused and is_new and not self.trajectories_dir.exists():
            self._clear()
        elif self.is_intact:
            self._status.end(error)
        self.close()

    def begin(self) -> None:
        """Prepare the directory for writing, which is the first change to it. Idempotent.

        Raises:
            DataError: a file that would be appended to is a symbolic link.
            TrainError: the disk is full or not writable.
        """
        if self.has_begun:
            return
        rows = (self.metrics_file, self.evaluations_file)
        for file in (*rows, self.journal_file, self.log_file):
            if self._mode == "resume" and file.is_symlink():
                raise DataError(
                    f"{file} is a link to {os.readlink(file)}, and is not written through",
                    hints=["put the file itself there, or remove the link"],
                )
        with readable_disk_errors(self.path):
            for folder in (self.path, self.trajectories_dir):
                for leftover in folder.glob(".*.tmp"):
                    leftover.unlink()
            for leftover in self.checkpoints_dir.glob(".step-*"):
                remove(leftover)
            if self._mode == "clean":
                self._clear()
        if self._mode == "resume":
            self.repairs += filter(None, map(cut_torn_end, rows))
        self.has_begun = True

    @property
    def is_intact(self) -> bool:
        """Whether this is still the directory that was opened, with its files in it."""
        if self._lock is None or not self._lock.is_valid:
            return False
        return self.config_file.exists() or not self._has_config

    def report_start(self, *, step: int, steps: int) -> None:
        """Write `status.json`: the run starts, or continues after `step`."""
        self._status.start(step=step, steps=steps)

    def save_config(self, text: str) -> None:
        """Save the resolved settings, as YAML."""
        write_atomic(self.config_file, text)
        self._has_config = True

    def save_provenance(self, used: Iterable[Mapping[str, Any]], policy: str) -> None:
        """Save the plugins that a run uses, its initial policy, and the versions of packages.

        Args:
            used: rows from `Entry.to_dict()`.
            policy: the hash of the initial policy's weights.
        """
        facts = {"used": list(used), "initial_policy": policy, **_software()}
        write_atomic(self.plugins_file, to_json(facts, indent=2))

    def add_provenance(self, **facts: Any) -> None:
        """Add facts to the provenance that become known later."""
        write_atomic(self.plugins_file, to_json({**self.read_provenance(), **facts}, indent=2))

    def save_summary(self, summary: Mapping[str, Any]) -> None:
        """Save the run's outcome, which marks the run as finished."""
        write_atomic(self.summary_file, to_json(summary, indent=2))

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Append the metrics of the step `row["step"]`. NaN becomes null.

        Raises:
            TrainError: the disk is full, or the directory was deleted, moved or replaced.
        """
        self._require_intact()
        append_text(self.metrics_file, to_json(row) + "\n")
        if isinstance(row.get("step"), int):
            self._status.took_step(row["step"])

    def append_evaluation(self, row: Mapping[str, Any]) -> None:
        """Append an evaluation, with `step` and the reports `sampled` and `greedy`."""
        append_text(self.evaluations_file, to_json(row) + "\n")

    def append_log(self, text: str) -> None:
        """Append a line to the log, with the current time in front."""
        append_text(self.log_file, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def save_trajectories(self, trajectories: Iterable[Trajectory], *, name: int | str) -> Path:
        """Save the trajectories of a step (`name=12`), or others (`name="eval-0"`), in one file."""
        file, trajectories = self.trajectories_file(name), list(trajectories)
        ImageStore(self.images_dir).keep_images_of(trajectories)
        _write_rows(file, (t.to_dict(packs_numbers=True) for t in trajectories))
        return file

    def save_refused(self, trajectories: Iterable[Trajectory], step: int) -> Path:
        """Save the batch of a step that was refused because its loss or gradient was not finite."""
        return self.save_trajectories(trajectories, name=f"refused-{step:06d}")

    def save_trained(self, rows: Iterable[Mapping[str, Any]], *, step: int) -> None:
        """Save the advantages and log-probabilities of a step's trained tokens, row by row."""
        _write_rows(self.trained_dir / f"step-{step:06d}.jsonl", map(_packed, rows))

    def save_tokenizer(self, policy: Path) -> None:
        """Copy `tokenizer.json` from a checkpoint directory, if it has one."""
        file = policy / "tokenizer.json"
        if file.is_file():
            write_atomic(self.tokenizer_file, file.read_bytes())

    def rewind(self, step: int) -> None:
        """Delete the records of all steps after `step`, the checkpoint from which a run resumes.

        Images that no remaining file names are deleted, too.
        """
        for file in (self.metrics_file, self.evaluations_file):
            rows = [r for r in read_lines(file, skips_torn_end=True) if r.get("step", 0) <= step]
            _write_rows(file, rows)
        for path in (
            *self.trajectories_dir.glob("step-*.jsonl"),
            *self.trained_dir.glob("step-*.jsonl"),
            *self.checkpoints_dir.glob("step-*"),
        ):
            if (step_of(path) or 0) > step:
                remove(path)
        for file in (self.summary_file, self.report_file):
            file.unlink(missing_ok=True)
        self._remove_unnamed_images()

    def _remove_unnamed_images(self) -> None:
        """Delete the images that no file of the run names."""
        if self.images_dir.is_dir():
            files = (*self.path.rglob("*.json"), *self.path.rglob("*.jsonl*"))
            named = hashes_in_files(file for file in files if file.is_file())
            if num_removed := ImageStore(self.images_dir).remove_all_but(named):
                self.append_log(f"{num_removed} pictures that no file names are deleted")

    def _require_intact(self) -> None:
        # Otherwise a new directory would get half a run, and without a lock.
        if self._lock is None or self.is_intact:
            return
        raise TrainError(
            f"{self.path} was deleted or moved while the run was writing to it",
            hints=[
                "moved: its files are complete, --resume --out PLACE continues it",
                f"deleted: the weights as they are now are saved in {self.checkpoints_dir}, and "
                "engine.model=CHECKPOINT starts a new run from them",
            ],
        )

    def _check_mode(self) -> None:
        if self._mode == "resume":
            self.recipe()
        elif self.holds_run and self._mode == "new":
            num_steps = 0
            with contextlib.suppress(DataError, OSError):
                num_steps = len(self.read_metrics())
            raise RunExistsError(
                f"{self.path} already holds a run of {num_steps} steps",
                hints=[
                    "continue it:  --resume",
                    "replace it:   --clean",
                    "keep it:      choose another directory with --out",
                ],
            )
        elif not self.holds_run and any(p for p in self.path.iterdir() if p.suffix != ".tmp"):
            error = RunExistsError if self._mode == "new" else UsageError
            raise error(
                f"{self.path} is not empty, and is not a run directory",
                hints=["choose another directory with --out"],
            )

    def _clear(self) -> None:
        # Only what runs write is deleted: a mistyped --out must not cost a home directory.
        for path in self.contents():
            remove(path)


def _write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    write_atomic(file, map(to_json_line, rows))


def _packed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.to_packed() if isinstance(value, PackedNumbers) else value
        for name, value in row.items()
    }


def _software() -> dict[str, Any]:
    packages: dict[str, str] = {}
    for name in ("torch", "transformers", "gymnasium", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "areal_gym": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
    }
