"""A run is a directory. This module is the only one that knows what lies where.

    config.yaml           the resolved settings; they run again as they are
    plugins.json          what was used: plugin, distribution and version, Python, platform
    metrics.jsonl         one line per step
    evaluations.jsonl     one line per evaluation on held-out tasks
    journal.jsonl         what became of each group; finished ones survive a crash in it
    trajectories/         step-000012.jsonl, one trajectory per line; eval-*.jsonl
    trained/              step-000012.jsonl, line by line what the trainer made of them
    tokenizer.json        of the policy, so that token ids can be read
    checkpoints/          written by the trainer
    loggers/              a folder for each logger: what it keeps
    learning_curve.png    written at the end
    report.html           written at the end: the run on one page
    summary.json          written at the end: a run without it has not finished
    status.json           what the run is doing, or how it ended and why
    *.jsonl.torn          what a crash has torn of a file, cut off when the run was resumed
    log.txt

Files appear whole or not at all (temporary name, fsync, rename). `metrics.jsonl` and `log.txt`
grow; a line that a crash has torn is ignored by readers and cut off by the next writer. A full
disk is a `TrainError` that says so, and leaves the file as it was before.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from areal_gym.errors import (
    DataError,
    InfrastructureError,
    NothingToDoError,
    RunExistsError,
    TrainError,
    UsageError,
)
from areal_gym.run_dir.run_status import RunStatus, StatusFile, StatusRecord
from areal_gym.types import Group, Trajectory
from areal_gym.utils.files import (
    append_text,
    cut_torn_end,
    path_hints,
    read_json,
    read_lines,
    read_yaml,
    readable_disk_errors,
    remove,
    to_json,
    write_atomic,
)
from areal_gym.version import __version__

RunMode = Literal["new", "resume", "clean"]
"""What to do with a directory: it must hold no run, its run is continued, its run is replaced."""


class RunDir:
    """One run's directory. The constructor only names it: readers need no more.

    Example::

        with RunDir.open(Path("runs/tir-1"), mode="new") as run:
            run.append_metrics({"step": 1, "reward/mean": 0.25})
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.plugins_file = path / "plugins.json"
        self.metrics_file = path / "metrics.jsonl"
        self.evaluations_file = path / "evaluations.jsonl"
        self.journal_file = path / "journal.jsonl"
        self.trajectories_dir = path / "trajectories"
        self.trained_dir = path / "trained"
        self.tokenizer_file = path / "tokenizer.json"
        self.checkpoints_dir = path / "checkpoints"
        self.loggers_dir = path / "loggers"
        self.learning_curve_file = path / "learning_curve.png"
        self.report_file = path / "report.html"
        self.summary_file = path / "summary.json"
        self.log_file = path / "log.txt"
        self.status_file = path / "status.json"
        self.repairs: list[str] = []
        """What `begin` had to mend, for a person."""
        self._status = StatusFile(self.status_file)
        self._made: list[Path] = []
        self._mode: RunMode = "new"
        self._has_begun = False
        self._lock: int | None = None
        self._is_new = False
        self._has_config = False

    @classmethod
    def open(cls, path: Path, mode: RunMode = "new", *, begins: bool = True) -> Self:
        """Claim a directory for writing; nobody else can until `close` or our end.

        Args:
            path: the directory.
            mode: what to do with what is in it.
            begins: whether to change it right away. Else it stays as it is, byte for byte, until
                `begin` is called: what is refused before leaves no trace.

        Raises:
            RunExistsError: `mode` is "new" and there is something already.
            UsageError: nothing to resume, or "clean" would delete what no run has written.
            InfrastructureError: another process is writing there.
        """
        run = cls(path)
        run._mode = mode
        if mode == "resume":
            run.recipe()
        run._made = [parent for parent in (path, *path.parents) if not parent.exists()]
        with readable_disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        run._claim()
        try:
            run._check()
            if begins:
                run.begin()
        except BaseException:
            run.close()
            raise
        return run

    def close(self) -> None:
        """Give the directory up; what `open` made and is still empty disappears. Idempotent."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                for path in self._made or [self.path]:
                    path.rmdir()
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # A request that cannot be served leaves no run behind.
        is_refused = isinstance(error, UsageError | NothingToDoError)
        if is_refused and self._is_new and not self.trajectories_dir.exists():
            self._clear()
        elif self.is_intact:
            self._status.end(error)
        self.close()

    @property
    def has_begun(self) -> bool:
        """Whether it may be written to."""
        return self._has_begun

    def begin(self) -> None:
        """Makes the directory ready for writing: the first change to it. Idempotent.

        Raises:
            DataError: a file that grows is a link to another file.
            TrainError: the disk is full or not writable.
        """
        if self._has_begun:
            return
        growing = (self.metrics_file, self.evaluations_file, self.journal_file)
        for file in (*growing, self.log_file):
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
            mended = [cut_torn_end(file) for file in (self.metrics_file, self.evaluations_file)]
            self.repairs += [words for words in mended if words is not None]
        self._is_new = self._mode != "resume"
        self._has_begun = True

    def report_start(self, *, step: int, steps: int) -> None:
        """The run begins, or goes on after `step`: from now on, `status.json` says how it is."""
        self._status.start(step=step, steps=steps)

    @property
    def holds_run(self) -> bool:
        """Whether a run has written here."""
        return any(path.exists() for path in self._contents())

    @property
    def is_finished(self) -> bool:
        """Whether its run came to its end."""
        return self.summary_file.exists()

    @property
    def status(self) -> RunStatus:
        """What its run does, or how it ended; what an evaluation wrote on its own is finished."""
        if self.is_finished or not self.config_file.exists():
            return "finished"
        if self.is_being_written:
            return "running"
        record = self._status.read()
        return "stopped" if record is None else record.current_state

    def read_status(self) -> StatusRecord | None:
        """What `status.json` says; None where there is none that can be read."""
        return self._status.read()

    @property
    def is_intact(self) -> bool:
        """Whether this is still the directory that was opened, and nobody has emptied it."""
        try:
            is_same = self._lock is not None and os.path.samestat(
                os.fstat(self._lock), self.path.stat()
            )
        except FileNotFoundError:
            return False
        return is_same and (self.config_file.exists() or not self._has_config)

    @property
    def is_being_written(self) -> bool:
        """Whether a process of this machine has it open; False where the system does not tell."""
        try:
            inode = self.path.stat().st_ino
            locks = Path("/proc/locks").read_text(encoding="ascii")
        except OSError:
            return False
        # Asking for the lock ourselves could get in the way of a run that begins.
        return any(" FLOCK " in line and f":{inode} " in line for line in locks.splitlines())

    def __repr__(self) -> str:
        return f"<RunDir {self.path}>"

    def _repr_html_(self) -> str:
        from areal_gym.report import summary_html

        return summary_html(self)

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step is, if there is one."""
        return self.checkpoints_dir / f"step-{step:06d}"

    def recipe(self) -> Path:
        """The file with the run's settings.

        Raises:
            UsageError: there is no run.
        """
        if not self.config_file.exists():
            raise UsageError(
                f"{self.path} holds no run to resume",
                hints=[*path_hints(self.path), "start one: leave --resume out"],
            )
        return self.config_file

    # ---- writing -----------------------------------------------------------------------------

    def save_config(self, text: str) -> None:
        """The resolved settings, as YAML."""
        write_atomic(self.config_file, text)
        self._has_config = True

    def save_provenance(self, used: Iterable[Mapping[str, Any]], policy: str) -> None:
        """What the run is made of; versions of the rest are added.

        Args:
            used: rows of `Entry.to_dict()`.
            policy: the hash of the weights that it starts with.
        """
        facts = {"used": list(used), "initial_policy": policy, **_facts()}
        write_atomic(self.plugins_file, to_json(facts, indent=2))

    def add_provenance(self, **facts: Any) -> None:
        """What became known later."""
        write_atomic(self.plugins_file, to_json({**self.read_provenance(), **facts}, indent=2))

    def read_provenance(self) -> dict[str, Any]:
        """What `save_provenance` wrote; empty when nothing did."""
        if not self.plugins_file.exists():
            return {}
        return read_json(self.plugins_file)

    def save_summary(self, summary: Mapping[str, Any]) -> None:
        """The run's outcome; after this it counts as finished."""
        write_atomic(self.summary_file, to_json(summary, indent=2))

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """One step's numbers; `row["step"]` says which. Not a number becomes null.

        Raises:
            TrainError: the disk is full, or this is no longer the directory that was opened.
        """
        self._require_intact()
        append_text(self.metrics_file, to_json(row) + "\n")
        if isinstance(row.get("step"), int):
            self._status.took_step(row["step"])

    def append_evaluation(self, row: Mapping[str, Any]) -> None:
        """One evaluation: `step`, and the reports `sampled` and `greedy`."""
        append_text(self.evaluations_file, to_json(row) + "\n")

    def append_log(self, text: str) -> None:
        """A line for people, with the time before it."""
        append_text(self.log_file, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def save_trajectories(self, trajectories: Iterable[Trajectory], *, name: int | str) -> Path:
        """One file of trajectories, of a step (`name=12`) or of anything else (`name="eval-0"`)."""
        file = self._trajectories_file(name)
        write_atomic(file, "".join(to_json(t.to_dict()) + "\n" for t in trajectories))
        return file

    def save_refused(self, trajectories: Iterable[Trajectory], step: int) -> Path:
        """The batch of a step that was not taken, because nothing could be learned from it."""
        return self.save_trajectories(trajectories, name=f"refused-{step:06d}")

    def save_trained(self, rows: Iterable[Mapping[str, Any]], *, step: int) -> None:
        """What training made of a step's trajectories: a row for each, in their order."""
        text = "".join(to_json(row) + "\n" for row in rows)
        write_atomic(self.trained_dir / f"step-{step:06d}.jsonl", text)

    def save_tokenizer(self, policy: Path) -> None:
        """Keep the tokenizer of a checkpoint directory, where it has one in a file of its own."""
        file = policy / "tokenizer.json"
        if file.is_file():
            write_atomic(self.tokenizer_file, file.read_bytes())

    def rewind(self, step: int) -> None:
        """Forget what lies after `step`: a run resumes where its checkpoint is, not its metrics."""
        for file in (self.metrics_file, self.evaluations_file):
            rows = [r for r in read_lines(file, skips_torn_end=True) if r.get("step", 0) <= step]
            write_atomic(file, "".join(to_json(row) + "\n" for row in rows))
        for path in (
            *self.trajectories_dir.glob("step-*.jsonl"),
            *self.trained_dir.glob("step-*.jsonl"),
            *self.checkpoints_dir.glob("step-*"),
        ):
            number = path.stem.removeprefix("step-")
            if number.isdigit() and int(number) > step:
                remove(path)
        for file in (self.summary_file, self.report_file):
            file.unlink(missing_ok=True)

    # ---- reading -----------------------------------------------------------------------------

    def read_config(self) -> dict[str, Any]:
        """The resolved settings as a tree; empty when there are none that can be read."""
        try:
            found = read_yaml(self.config_file)
        except (OSError, DataError):
            return {}
        return found if isinstance(found, dict) else {}

    def read_metrics(self) -> list[dict[str, Any]]:
        """All whole lines, in order."""
        return list(read_lines(self.metrics_file, skips_torn_end=True))

    def read_evaluations(self) -> list[dict[str, Any]]:
        """All evaluations, in order."""
        return list(read_lines(self.evaluations_file, skips_torn_end=True))

    def read_summary(self) -> dict[str, Any] | None:
        """The run's outcome; None while it has none.

        Raises:
            DataError: the file is damaged.
        """
        if not self.summary_file.exists():
            return None
        return read_json(self.summary_file)

    def read_trajectories(self, name: int | str) -> Iterator[Trajectory]:
        """What `save_trajectories` wrote under that name."""
        return map(Trajectory.from_dict, read_lines(self._trajectories_file(name)))

    def read_refused(self) -> tuple[int, list[Group]] | None:
        """The newest of the batches of `save_refused`, and its step; None when there is none."""
        files = sorted(self.trajectories_dir.glob("refused-*.jsonl"))
        if not files:
            return None
        return int(files[-1].stem.removeprefix("refused-")), self.read_groups(files[-1].stem)

    def read_groups(self, name: int | str) -> list[Group]:
        """The batch of a step, in the order in which it was trained on."""
        found: dict[str, list[Trajectory]] = {}
        for trajectory in self.read_trajectories(name):
            found.setdefault(trajectory.group_id, []).append(trajectory)
        return [
            Group(id=id, task=members[0].task, trajectories=tuple(members))
            for id, members in found.items()
        ]

    # ---- inside ------------------------------------------------------------------------------

    def _contents(self) -> list[Path]:
        own = [value for value in vars(self).values() if isinstance(value, Path)][1:]
        return [*own, *self.path.glob("*.jsonl.torn")]

    def _trajectories_file(self, name: int | str) -> Path:
        stem = f"step-{name:06d}" if isinstance(name, int) else name
        return self.trajectories_dir / f"{stem}.jsonl"

    def _claim(self) -> None:
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = None
            raise InfrastructureError(
                f"another process is writing to {self.path}",
                hints=["wait for its end, or choose another directory with --out"],
            ) from None
        except OSError:
            # Some network file systems lock no directories; there, the rules of `mode` must do.
            pass

    def _require_intact(self) -> None:
        # Files would be written into a directory that holds half a run, and that anybody can claim.
        if self._lock is None or self.is_intact:
            return
        raise TrainError(
            f"{self.path} was deleted or moved while the run was writing to it",
            hints=[
                "moved: what it holds is whole, --resume --out PLACE goes on with it",
                f"deleted: the weights as they are now are saved in {self.checkpoints_dir}, and "
                "engine.model=CHECKPOINT starts a new run from them",
            ],
        )

    def _check(self) -> None:
        """Refuse what `_mode` does not go with; nothing is changed."""
        mode = self._mode
        if mode == "resume":
            self.recipe()
        elif self.holds_run and mode == "new":
            raise RunExistsError(
                f"{self.path} already holds a run of {self._num_steps()} steps",
                hints=[
                    "continue it:  --resume",
                    "replace it:   --clean",
                    "keep it:      choose another directory with --out",
                ],
            )
        elif not self.holds_run and any(p for p in self.path.iterdir() if p.suffix != ".tmp"):
            kind = RunExistsError if mode == "new" else UsageError
            raise kind(
                f"{self.path} is not empty, and what is in it is no run",
                hints=["choose another directory with --out"],
            )

    def _num_steps(self) -> int:
        with contextlib.suppress(DataError, OSError):
            return len(self.read_metrics())
        return 0

    def _clear(self) -> None:
        # Only what runs write goes: a mistyped --out must not cost anybody a home directory.
        for path in self._contents():
            remove(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What a list of runs shows of one."""

    path: Path
    env_id: str
    num_steps: int
    """Steps that are done."""
    is_finished: bool
    reward: float | None
    """Mean reward of the newest step."""
    summary: Mapping[str, Any]
    """`summary.json`; empty until the run has finished."""


def list_runs(root: Path = Path("runs")) -> list[RunInfo]:
    """The runs directly under `root`, by name. Empty when there is no such directory."""
    return [run_info(path) for path in run_paths(root)]


def run_paths(root: Path) -> list[Path]:
    """Where they lie."""
    if not root.is_dir():
        return []
    return [path for path in sorted(root.iterdir()) if RunDir(path).config_file.exists()]


def error_of(run: RunDir) -> str | None:
    """Why a run has failed, as its `status.json` says."""
    record = run.read_status()
    return None if record is None else record.error


def no_run_hints(path: Path) -> list[str]:
    """For an error about `path`, which holds no run."""
    return [*path_hints(path), "all runs: areal-gym list runs"]


def run_info(path: Path) -> RunInfo:
    """What there is to say about one run, finished or not."""
    run = RunDir(path)
    try:
        env_id = str(run.read_config()["env"]["id"])
    except (KeyError, TypeError):
        env_id = "?"
    rows = run.read_metrics()
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    return RunInfo(
        path=run.path,
        env_id=env_id,
        num_steps=max((int(row.get("step", 0)) for row in rows), default=0),
        is_finished=run.is_finished,
        reward=rewards[-1] if rewards else None,
        summary=run.read_summary() or {},
    )


def new_run_path(label: str, root: Path = Path("runs")) -> Path:
    """Reserve `runs/LABEL-DATE-TIME`: an empty directory that nobody else was given.

    `RunDir.open(path, "new")` takes it; `path.rmdir()` gives it back.
    """
    stem = f"{re.sub('[/:]+', '-', label)}-{time.strftime('%Y%m%d-%H%M%S')}"
    with readable_disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        for suffix in ("", *(f"-{n}" for n in range(2, 10_000))):
            path = root / (stem + suffix)
            with contextlib.suppress(FileExistsError):
                # Runs started in the same second must not meet: mkdir decides who is first.
                path.mkdir()
                return path
    raise InfrastructureError(f"{root} has no free name left for {stem}")


@contextlib.contextmanager
def run_path(given: Path | None, label: str) -> Iterator[Path]:
    """`given`, or a path that is reserved; what is empty in the end disappears again."""
    path = given or new_run_path(label)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()
        if given is None:
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # `runs`, when this was to be the first one


def _facts() -> dict[str, Any]:
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
