"""Which runs are shown, and what is known of each; read from disk as it changes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from areal_gym.errors import NothingToDoError, UnknownIdError
from areal_gym.files import path_hints
from areal_gym.rundir import RunDir, error_of
from areal_gym.trajectory_files import TrainedFile, TrajectoryFile
from areal_gym.viewer.vocabulary import Vocabulary

__all__ = ["Catalog", "Run"]

_SPARKS = 60
"""Points of the small curve in the list of runs."""


class Catalog:
    """The runs that somebody looks at, by a short name each.

    Args:
        paths: run directories, or directories of them (which are looked through again each time,
            for a run may begin).

    Raises:
        NothingToDoError: there is no run.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = [path.absolute() for path in paths]
        self._runs: dict[Path, Run] = {}
        if not self.runs():
            names = ", ".join(str(path) for path in paths)
            near = [hint for path in paths for hint in path_hints(path)]
            raise NothingToDoError(
                f"no runs in {names}", hints=[*near, "make one: areal-gym train --env tir"]
            )

    def runs(self) -> list[Run]:
        """All runs, by name."""
        found: dict[str, Run] = {}
        for path in _run_directories(self._paths):
            run = self._runs.setdefault(path, Run(path))
            name, number = path.name, 2
            while name in found:  # two roots may hold the same name
                name, number = f"{path.name}~{number}", number + 1
            run.name = name
            found[name] = run
        return list(found.values())

    def run(self, name: str) -> Run:
        """The run of that name.

        Raises:
            UnknownIdError: there is none.
        """
        runs = {run.name: run for run in self.runs()}
        if name not in runs:
            raise UnknownIdError(
                f"no run {name!r}", hints=[f"there is: {', '.join(runs) or 'none'}"]
            )
        return runs[name]


class Run:
    """One run directory, and what was read of it so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.directory = RunDir(path)
        self._metrics = _GrowingFile(self.directory.metrics_file)
        self._files: dict[str, tuple[tuple[int, int], TrajectoryFile, TrainedFile]] = {}
        self._vocabulary: Vocabulary | None = None
        self._settings: tuple[int, dict[str, Any]] = (0, {})

    def card(self) -> dict[str, Any]:
        """What a list of runs shows of it."""
        rows = self.metrics()
        rewards = [row.get("reward/mean") for row in rows]
        summary = self.directory.read_summary() or {}
        evaluations = self.directory.read_evaluations()
        settings = self.settings()
        return {
            "name": self.name,
            "status": self.directory.status,
            "error": error_of(self.directory),
            "env": _at(settings, "env", "id"),
            "objective": settings.get("objective"),
            "algorithm": _at(settings, "trainer", "algorithm"),
            "model": Path(str(_at(settings, "engine", "model") or "")).name,
            "seed": settings.get("seed"),
            "step": self.step,
            "steps": settings.get("steps"),
            "reward": next((r for r in reversed(rewards) if r is not None), None),
            "rewards": _thinned(rewards, _SPARKS),
            "heldout": [
                value
                for row in evaluations
                if (value := _at(row, "sampled", "pass@1") or _at(row, "heldout", "accuracy"))
                is not None
            ],
            "train_s": summary.get("train_s"),
            "changed_s": self._changed_s(),
        }

    def pulse(self) -> dict[str, Any]:
        """What is asked again and again while somebody watches: has anything happened?"""
        return {
            "status": self.directory.status,
            "step": self.step,
            "evaluations": len(self.directory.read_evaluations()),
            "files": self.file_names(),
        }

    def about(self) -> dict[str, Any]:
        """The card, settings, provenance, evaluations and summary."""
        return {
            "card": self.card(),
            "files": self.file_names(),
            "settings": self.settings(),
            "provenance": self.directory.read_provenance(),
            "evaluations": self.directory.read_evaluations(),
            "summary": self.directory.read_summary(),
        }

    @property
    def step(self) -> int:
        """The newest step."""
        rows = self.metrics()
        return int(rows[-1].get("step", 0)) if rows else 0

    def settings(self) -> dict[str, Any]:
        """The resolved settings, read when they have changed; empty when they cannot be read."""
        file = self.directory.config_file
        stamp = file.stat().st_mtime_ns if file.exists() else 0
        if self._settings[0] != stamp:
            self._settings = (stamp, self.directory.read_config())
        return self._settings[1]

    def metrics(self) -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl`; only what was appended since the last time is read."""
        return self._metrics.rows()

    def curves(self, after: int = 0) -> dict[str, Any]:
        """Columns of `metrics.jsonl`, from the step behind `after` on: numbers by name."""
        rows = [row for row in self.metrics() if row.get("step", 0) > after]
        names = sorted({name for row in rows for name in row} - {"step"})
        return {
            "step": [row["step"] for row in rows],
            "columns": {name: [_short(row.get(name)) for row in rows] for name in names},
        }

    def file_names(self) -> list[str]:
        """Files of trajectories: evaluations first, then steps."""
        names = [path.stem for path in self.directory.trajectories_dir.glob("*.jsonl")]
        return sorted(names)

    def file(self, name: str) -> TrajectoryFile:
        """A file of trajectories, indexed once.

        Raises:
            UnknownIdError: there is none of that name.
            DataError: it is damaged.
        """
        return self._indexed(name)[1]

    def trained(self, name: str) -> TrainedFile:
        """What training made of a file's trajectories."""
        return self._indexed(name)[2]

    def _indexed(self, name: str) -> tuple[tuple[int, int], TrajectoryFile, TrainedFile]:
        if name not in self.file_names():  # and nothing outside of the directory
            raise UnknownIdError(f"{self.name} has no trajectories {name!r}")
        path = self.directory.trajectories_dir / f"{name}.jsonl"
        stat = path.stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
        if name not in self._files or self._files[name][0] != stamp:
            trained = TrainedFile(self.directory.trained_dir / path.name)
            self._files[name] = (stamp, TrajectoryFile(path), trained)
        return self._files[name]

    @property
    def vocabulary(self) -> Vocabulary:
        """Texts of token ids; empty ones when there is no tokenizer."""
        if self._vocabulary is None or not self._vocabulary.is_known:
            model = Path(str(_at(self.settings(), "engine", "model")))
            self._vocabulary = Vocabulary.find(self.directory, model)
        return self._vocabulary

    def _changed_s(self) -> float:
        files = (self.directory.metrics_file, self.directory.config_file)
        return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


class _GrowingFile:
    """JSON lines of a file that grows, or is replaced by a shorter one when a run is resumed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key: tuple[int, int] = (0, 0)
        self._rows: list[dict[str, Any]] = []

    def rows(self) -> list[dict[str, Any]]:
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return []
        inode, read = self._key
        if stat.st_ino != inode or stat.st_size < read:
            read, self._rows = 0, []
        if stat.st_size > read:
            with self._path.open("rb") as stream:
                stream.seek(read)
                new = stream.read()
            new = new[: new.rfind(b"\n") + 1]
            self._rows += [json.loads(line.decode("utf-8", "replace")) for line in new.splitlines()]
            read += len(new)
        self._key = (stat.st_ino, read)
        return self._rows


def _run_directories(paths: Iterable[Path]) -> list[Path]:
    found = []
    for path in paths:
        inside = sorted(path.iterdir()) if path.is_dir() else []
        found += [p for p in (path, *inside) if _is_run(RunDir(p))]
    return list(dict.fromkeys(found))


def _is_run(run: RunDir) -> bool:
    # An evaluation on its own keeps nothing but trajectories.
    return run.config_file.is_file() or run.trajectories_dir.is_dir()


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _short(value: Any) -> Any:
    """Six digits are more than a screen has."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _thinned(values: Sequence[float | None], num: int) -> list[float | None]:
    if len(values) <= num:
        return [_short(value) for value in values]
    return [_short(values[i * (len(values) - 1) // (num - 1)]) for i in range(num)]
