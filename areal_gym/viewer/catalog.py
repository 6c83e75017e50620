"""The runs that the viewer shows, read from disk as they change."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from areal_gym.errors import DataError, NothingToDoError, UnknownIdError, choices
from areal_gym.report.chart_table import CHARTS
from areal_gym.run_dir.evaluations import evaluation_paths, is_graded_reward
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.run_dir.run_notes import RunNotes
from areal_gym.run_dir.trajectory_files import TrainedFile, TrajectoryFile
from areal_gym.utils.files import path_hints
from areal_gym.viewer.safe_paths import (
    GrowingFile,
    contained,
    finite,
    read_identity,
    read_object,
    read_settings,
)
from areal_gym.viewer.vocabulary import Vocabulary

_SPARKS = 60
"""Points of the sparkline in the list of runs."""


class Catalog:
    """The runs that the viewer shows, each by a short name; NothingToDoError if there is none.

    `paths` are run directories, or directories of them (listed again on each call, because new
    runs may start).
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [path.absolute() for path in paths]
        self._runs: dict[Path, Run] = {}
        if not self.runs() and not self.evaluation_paths():
            names = ", ".join(str(path) for path in paths)
            near = [hint for path in paths for hint in path_hints(path)]
            raise NothingToDoError(
                f"no runs in {names}", hints=[*near, "make one: areal-gym train --env tir"]
            )

    def runs(self) -> list[Run]:
        """Return all runs."""
        runs: dict[str, Run] = {}
        for path in _run_directories(self._paths):
            if (run := self._runs.get(path)) is None:
                run = self._runs.setdefault(path, Run(path))
            name, number = path.name, 2
            while name in runs:  # two roots may hold the same name
                name, number = f"{path.name}~{number}", number + 1
            run.name = name
            runs[name] = run
        return list(runs.values())

    def evaluation_paths(self, run: Run | None = None) -> list[Path]:
        """Return the directories of evaluations, also those inside of runs and suites, or one."""
        paths: list[Path] = []
        for root in self._paths if run is None else [run.path]:
            with suppress(OSError):
                paths += evaluation_paths(root)
        return list(dict.fromkeys(paths))

    def run(self, name: str) -> Run:
        """Return the run of that name; raise UnknownIdError if there is none."""
        runs = {run.name: run for run in self.runs()}
        if name not in runs:
            raise UnknownIdError(f"no run {name!r}", hints=choices(name, runs))
        return runs[name]


class Run:
    """One run directory, with what was read of it so far."""

    EMPTY_CARD: ClassVar[dict[str, Any]] = {
        **dict.fromkeys(("error", "env", "objective", "algorithm", "seed", "steps", "reward")),
        **{"status": "stopped", "model": "", "step": 0, "rewards": [], "heldout": []},
        **{"train_s": None, "changed_s": 0.0, "problems": [], "is_graded": False},
        **{"is_evaluation": False, "started_s": None, "duration_s": None, "tags": [], "note": ""},
    }
    """The card of a run that cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.directory = RunDir(path)
        self._metrics = GrowingFile(path, self.directory.metrics_file, is_flat=True)
        self._evaluations = GrowingFile(path, self.directory.evaluations_file, is_flat=False)
        self._files: dict[str, tuple[tuple[int, int], TrajectoryFile, TrainedFile]] = {}
        self._vocabulary: Vocabulary | None = None
        self._settings: tuple[int, dict[str, Any]] = (0, {})

    def card(self) -> dict[str, Any]:
        """Return what a list of runs shows of it."""
        rows = self._metrics.sample(_SPARKS)
        rewards = [_number(row.get("reward/mean")) for row in rows]
        evaluations = self.evaluations()
        is_graded = any(is_graded_reward(_mapping(row.get("sampled"))) for row in evaluations)
        settings = self.identity()
        problems = self._problems(settings)
        status, error = self._status()
        notes, times = RunNotes(), self._times()
        try:
            notes = RunNotes.from_dict(read_object(self.path, self.directory.notes_file))
        except DataError as damage:
            problems.append(f"notes.json: {damage.message}")
        try:
            summary = self.summary() or {}
        except DataError as damage:
            summary = {}
            problems.append(damage.message)
        return {
            "name": self.name,
            "is_evaluation": self.is_evaluation,
            "status": status,
            "error": error,
            "env": _scalar(nested(settings, "env", "id")),
            "objective": _scalar(settings.get("objective")),
            "algorithm": _scalar(nested(settings, "trainer", "algorithm")),
            "model": Path(str(nested(settings, "engine", "model") or "")).name,
            "seed": _number(settings.get("seed")),
            "step": int(rows[-1].get("step", 0)) if rows else 0,
            "steps": _number(settings.get("steps")),
            "reward": next((r for r in reversed(rewards) if r is not None), None),
            "rewards": _thinned(rewards, _SPARKS),
            "heldout": [
                value for row in evaluations if (value := _heldout(row, is_graded)) is not None
            ],
            "is_graded": is_graded,
            "train_s": _number(summary.get("train_s")),
            "changed_s": self.changed_s,
            "started_s": times[0],
            "duration_s": times[1],
            "tags": list(notes.tags),
            "note": notes.note,
            "problems": problems,
        }

    def pulse(self) -> dict[str, Any]:
        """Return what the page polls to see whether anything has changed."""
        return {
            "status": self._status()[0],
            "step": self.step,
            "evaluations": len(self.evaluations()),
            "files": self.file_names(),
        }

    def about(self) -> dict[str, Any]:
        """Return the card, settings, provenance, evaluations, summary, and which charts to draw."""
        return {
            "card": self.card(),
            "charts": [asdict(spec) for spec in CHARTS],
            "files": self.file_names(),
            "settings": self.settings(),
            "provenance": read_object(self.path, self.directory.plugins_file),
            "evaluations": self.evaluations(),
            "summary": self.summary(),
        }

    @property
    def is_evaluation(self) -> bool:
        """Whether it holds nothing but an evaluation."""
        return not self.directory.config_file.exists()

    @property
    def step(self) -> int:
        """The number of the newest step."""
        rows = self.metrics()
        return int(rows[-1].get("step", 0)) if rows else 0

    def settings(self) -> dict[str, Any]:
        """Return the resolved settings, read again when changed; empty if they cannot be read."""
        file = contained(self.path, self.directory.config_file)
        stamp = 0 if file is None else file.stat().st_mtime_ns
        if self._settings[0] != stamp:
            self._settings = stamp, read_settings(self.path, self.directory.config_file)
        return self._settings[1]

    def identity(self) -> dict[str, Any]:
        """Return the settings that a card shows."""
        if self._settings[0] == 0:
            identity = read_identity(self.path, self.directory.config_file)
            if identity is not None:
                return identity
        return self.settings()

    def summary(self) -> dict[str, Any] | None:
        """Return the run's outcome, None until it ends; raise DataError if it is damaged."""
        return read_object(self.path, self.directory.summary_file) or None

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the rows of `evaluations.jsonl`."""
        return self._evaluations.rows()

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of `metrics.jsonl`; only what was appended since is read."""
        return self._metrics.rows()

    def curves(self, after: int = 0) -> dict[str, Any]:
        """Return the columns of `metrics.jsonl` for the steps after `after`."""
        rows = [row for row in self.metrics() if row.get("step", 0) > after]
        names = sorted({name for row in rows for name in row} - {"step"})
        return {
            "step": [row["step"] for row in rows],
            "columns": {name: [_short(row.get(name)) for row in rows] for name in names},
        }

    def file_names(self) -> list[str]:
        """Return the files of trajectories: evaluations first, then steps."""
        files = self.directory.trajectories_dir.glob("*.jsonl")
        return sorted(path.stem for path in files if contained(self.path, path) is not None)

    def file(self, name: str) -> TrajectoryFile:
        """Return a file of trajectories, indexed once, or raise UnknownIdError or DataError."""
        return self._indexed(name)[1]

    def trained(self, name: str) -> TrainedFile:
        """Return the advantages and log-probabilities of a file's trajectories."""
        return self._indexed(name)[2]

    def _indexed(self, name: str) -> tuple[tuple[int, int], TrajectoryFile, TrainedFile]:
        if name not in self.file_names():  # and nothing outside of the directory
            raise UnknownIdError(f"{self.name} has no trajectories {name!r}")
        path = self.directory.trajectories_dir / f"{name}.jsonl"
        stat = path.stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
        if name not in self._files or self._files[name][0] != stamp:
            trained_path = self.directory.trained_dir / path.name
            if trained_path.exists() and contained(self.path, trained_path) is None:
                raise DataError(f"{trained_path} is not a plain file of this run")
            self._files[name] = (stamp, TrajectoryFile(path), TrainedFile(trained_path))
        return self._files[name]

    def page(self, file: str, start: int = 0, limit: int | None = None) -> dict[str, Any]:
        """Return a page of a file's trajectories as columns, which keeps ten thousand rows small.

        Besides the columns of `TrajectoryFile`, `advantage` is the mean over the trajectory's
        tokens. `is_last` says that no more can follow.
        """
        trajectories, trained = self.file(file), self.trained(file)
        heads = trajectories.page(start, limit)
        columns = {name: [head.summary[name] for head in heads] for name in trajectories.COLUMNS}
        columns["advantage"] = [trained.advantage(start + i) for i in range(len(heads))]
        return {"columns": columns, "is_last": limit is None or len(heads) < limit}

    def trajectory(self, file: str, place: int, *, has_texts: bool = True) -> dict[str, Any]:
        """Read the trajectory at `place`; raise UnknownIdError if the file is shorter.

        It is its line, with shorter numbers, and `place`; `trained`, the advantages and
        log-probabilities of its sampled tokens in their order, or null; `texts` of its token ids.
        """
        row = shortened(self.file(file).read(place))
        row |= {"trained": self.trained(file).read(place), "place": place}
        if has_texts:
            row["texts"] = self.vocabulary.texts(i for s in row["spans"] for i in s["token_ids"])
        return row

    @property
    def vocabulary(self) -> Vocabulary:
        """The texts of token ids; empty if there is no tokenizer."""
        if self._vocabulary is None or not self._vocabulary.is_known:
            self._vocabulary = Vocabulary.find(self.directory)
        return self._vocabulary

    @property
    def changed_s(self) -> float:
        """The time when its metrics or settings were written last, in seconds since the epoch."""
        files = (self.directory.metrics_file, self.directory.config_file)
        return max((stat[1] / 1e9 for stat in map(_facts, files) if stat is not None), default=0.0)

    def stamp(self) -> object:
        """Return a value that changes with whatever the card shows; no file is opened for it."""
        files = self.directory
        return (
            *map(_facts, (files.metrics_file, files.config_file, files.summary_file)),
            *map(_facts, (files.status_file, files.notes_file, files.evaluations_file)),
            None if files.is_finished else self._status(),
        )

    def _times(self) -> tuple[float | None, float | None]:
        """Return when its process started, and for how long it has been running or ran."""
        record = self.directory.read_status() if self._has_own_status() else None
        if record is None:
            return None, None
        try:
            start_s, end_s = (
                datetime.fromisoformat(text).timestamp()
                for text in (record.started_at, record.updated_at)
            )
        except (ValueError, OverflowError, OSError):
            return None, None
        return start_s, max(0.0, end_s - start_s)

    def _has_own_status(self) -> bool:
        file = self.directory.status_file
        return contained(self.path, file) is not None or not os.path.lexists(file)

    def _status(self) -> tuple[str, str | None]:
        """Return the run's status, and why it has failed; "stopped" where it cannot be read."""
        with suppress(OSError):
            if self._has_own_status():
                return self.directory.status, self.directory.error
        return "stopped", None

    def _problems(self, identity: Mapping[str, Any]) -> list[str]:
        counts = {"metrics.jsonl": self._metrics, "evaluations.jsonl": self._evaluations}
        problems = [
            f"{name}: {file.num_damaged} damaged lines were skipped"
            for name, file in counts.items()
            if file.num_damaged
        ]
        if self.directory.config_file.exists() and not identity:
            problems.append("config.yaml: these settings cannot be read")
        return problems


def shortened(row: dict[str, Any]) -> dict[str, Any]:
    """Return a trajectory's line with shorter numbers, and without what no page shows."""
    for span in row["spans"]:
        for name in ("routed_experts", "teacher_top"):  # larger than the rest, and never shown
            span.pop(name, None)
        for name in ("logprobs", "teacher_logprobs"):
            if span.get(name) is not None:
                span[name] = [v if v is None else round(v, 5) for v in span[name]]
    return row


def _run_directories(paths: Iterable[Path]) -> list[Path]:
    directories = []
    for path in paths:
        names = []
        with suppress(OSError):
            names = sorted(os.listdir(path))
        # Paths are made of runs only: there may be thousands, and the list is asked for often.
        places = (f"{path}", *(f"{path}/{n}" for n in names))
        directories += [
            path if place == f"{path}" else Path(place) for place in places if _is_run(place)
        ]
    return list(dict.fromkeys(directories))


def _is_run(path: str) -> bool:
    # An evaluation on its own keeps nothing but trajectories.
    return os.path.isfile(f"{path}/config.yaml") or os.path.isdir(f"{path}/trajectories")


def _facts(file: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written or replaced; None without one."""
    try:
        facts = os.stat(file)
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


def nested(value: Any, *keys: str) -> Any:
    """Return what lies under keys of nested objects, None where one is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _number(value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return finite(value) if is_number else None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _scalar(value: Any) -> Any:
    return value if isinstance(value, str) else finite(value)


def _heldout(row: dict[str, Any], is_graded: bool) -> Any:
    sampled = _number(nested(row, "sampled", "reward" if is_graded else "pass@1"))
    return _number(nested(row, "heldout", "accuracy")) if sampled is None else sampled


def _short(value: Any) -> Any:
    """Round to six digits, more than a screen can show."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _thinned(values: Sequence[float | None], num: int) -> list[float | None]:
    if len(values) <= num:
        return [_short(value) for value in values]
    return [_short(values[i * (len(values) - 1) // (num - 1)]) for i in range(num)]
