"""Compare runs: the settings and numbers that differ, and whether differences are beyond noise.

Every run is compared with the first one. A difference counts when its 95% interval excludes 0:

- held-out accuracy where both ran the same tasks: over the differences task by task, which cancels
  how hard each task is (Student's t);
- other held-out numbers: from the intervals of the evaluations, as if they were independent;
- numbers of training: over the last `WINDOW` steps that all runs have, Welch's t.

The intervals cover the noise of tasks and of sampling. They do not cover the noise of seeds, about
which one run per setting says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from areal_gym.config.settings_model import flat
from areal_gym.errors import UsageError
from areal_gym.report.chart_table import evaluations_of
from areal_gym.report.evaluation_content import identity
from areal_gym.run_dir.evaluations import EVALUATION_FILE, Evaluation
from areal_gym.run_dir.run_files import RunFiles
from areal_gym.run_dir.run_list import no_run_hints
from areal_gym.run_dir.trajectory_files import TrajectoryFile
from areal_gym.utils.statistics import Interval, difference_interval, mean, mean_interval

WINDOW = 10

Verdict = Literal["better", "worse", "higher", "lower", "within noise"]

_TRAINING: tuple[tuple[str, str, int], ...] = (
    ("reward", "reward/mean", 1),
    ("accuracy of the batch", "train/accuracy", 1),
    ("loss", "train/loss", 0),
    ("entropy", "train/entropy", 0),
    ("KL to the sampler", "train/approx_kl", 0),
    ("KL to the reference", "train/kl_reference", 0),
    ("tokens of an episode", "rollout/policy_tokens_mean", 0),
    ("truncated", "rollout/truncated", -1),
    ("staleness", "rollout/staleness_mean", 0),
    ("overlap efficiency", "time/overlap_efficiency", 1),
    ("tokens/s", "rollout/tokens_per_s", 1),
    ("seconds of a step", "time/step_s", -1),
)
"""Label, metric, and whether more is better (1), worse (-1) or neither (0)."""

_TASK_LABELS = {"reward", "accuracy of the batch", "loss", "truncated", "tokens of an episode"}
"""Labels whose values cannot be compared between environments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One number of all runs, with 95% intervals where they are known."""

    label: str
    values: Sequence[float | None]
    intervals: Sequence[tuple[float, float] | None]
    notes: Sequence[str] = ()
    """A note on each value, such as its step."""
    differences: Sequence[tuple[float, float] | None] = ()
    """The interval of each value minus that of the first run."""
    verdicts: Sequence[Verdict | None] = ()
    """Each run against the first one; None: unknown, or it is the first one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The differences between two or more runs."""

    runs: Sequence[Mapping[str, Any]]
    """Name, path, environment, status and step of each run."""
    settings: Mapping[str, Sequence[Any]]
    """The settings that differ, with the value of each run; None where a run does not have it."""
    heldout: Sequence[Row]
    training: Sequence[Row]
    cost: Sequence[Row]
    steps: tuple[int, int] | None
    """First and last step of `training`; None: there is no step that all runs have."""
    remarks: Sequence[str]
    """Caveats, for the reader."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form."""
        return asdict(self)


def compare(paths: Sequence[Path]) -> Comparison:
    """Compare run directories, or directories of evaluations on their own.

    Raises:
        UsageError: one of them holds neither.
        DataError: a file of trajectories is damaged.
    """
    sides = [_Side(path) for path in paths]
    settings = _differing(sides)
    envs = {side.env for side in sides}
    is_same_task = len(envs) == 1 and not any(key.startswith("env.") for key in settings)
    is_same_split = not {"eval.split", "split"} & settings.keys()
    common = [step for step in sides[0].rows if all(step in side.rows for side in sides)]
    window = common[-WINDOW:]
    return Comparison(
        runs=[side.facts(name) for name, side in zip(_names(sides), sides, strict=True)],
        settings=settings,
        heldout=list(_heldout(sides, is_same_task and is_same_split)),
        training=list(_training(sides, window, is_same_task)),
        cost=list(_cost(sides)),
        steps=(window[0], window[-1]) if window else None,
        remarks=list(_remarks(sides, settings, is_same_task)),
    )


_ALONE = {"sampled": "eval", "greedy": "eval-greedy"}
"""The files of `areal-gym eval`, by measurement."""


def _differing(sides: Sequence[_Side]) -> dict[str, list[Any]]:
    # Evaluations are compared by how they were measured; beside a run, they have no settings.
    trees: list[dict[str, Any] | None]
    if all(side.evaluation is not None for side in sides):
        trees = [identity(side.evaluation) for side in sides if side.evaluation is not None]
    else:
        trees = [dict(flat(side.config)) if side.config else None for side in sides]
    runs = [settings for settings in trees if settings is not None]
    return {
        key: [settings and settings.get(key) for settings in trees]
        for key in dict.fromkeys(key for settings in runs for key in settings)
        if any(settings.get(key) != runs[0].get(key) for settings in runs)
    }


class _Side:
    def __init__(self, path: Path) -> None:
        self.run = RunFiles(path)
        self.files = {file.stem: file for file in self.run.trajectories_dir.glob("eval*.jsonl")}
        if not self.run.config_file.is_file() and not self.files:
            raise UsageError(
                f"{path} is neither a run directory nor an evaluation", hints=no_run_hints(path)
            )
        is_evaluation = (path / EVALUATION_FILE).is_file()
        self.evaluation = Evaluation.open(path) if is_evaluation else None
        self.config = self.run.read_config()
        self.rows = {int(row["step"]): row for row in self.run.read_metrics()}
        self.summary = self.run.read_summary() or {}
        self.evaluations = evaluations_of(self.run.read_evaluations())
        if not self.config:
            self.evaluations = [
                _alone(name, mean_interval([*scores.values()]))
                for name, stem in _ALONE.items()
                if (scores := self.scores(stem))
            ]

    @property
    def env(self) -> str:
        if self.evaluation is not None:
            return self.evaluation.info.env
        try:
            return str(self.config["env"]["id"])
        except (KeyError, TypeError):
            return next((row["env"] for stem in self.files for row in self._heads(stem, 1)), "?")

    @property
    def _status(self) -> str:
        return self.run.status if self.evaluation is None else self.evaluation.info.status

    def facts(self, name: str) -> dict[str, Any]:
        step = max(self.rows, default=0) if self.config else None
        where = {"name": name, "path": str(self.run.path), "env": self.env}
        return {**where, "status": self._status, "step": step}

    def scores(self, stem: str) -> dict[str, float]:
        """Return the share of successful episodes in an evaluation, by task."""
        scores: dict[str, list[float]] = {}
        if self.evaluation is not None and stem == self.evaluation.trajectories_file.stem:
            for sample in self.evaluation.iter_samples():
                if sample["success"] is not None:
                    scores.setdefault(sample["task"], []).append(float(sample["success"]))
            return {task: mean(values) for task, values in scores.items()}
        for row in self._heads(stem):
            if not row["error"]:
                scores.setdefault(row["task"], []).append(float(row["reward"] >= 1 - 1e-9))
        return {task: mean(values) for task, values in scores.items()}

    def stem(self, row: Mapping[str, Any], name: str) -> str:
        """Return the file of an evaluation's trajectories; scheduled greedy ones have none."""
        if not self.config:
            return _ALONE[name]
        return f"eval-{row['step']:06d}" if name == "sampled" else ""

    def _heads(self, stem: str, limit: int | None = None) -> Iterable[Mapping[str, Any]]:
        if stem not in self.files:
            return ()
        return [head.summary for head in TrajectoryFile(self.files[stem]).page(0, limit)]


_HELDOUT = (("reward", 1), ("sampled", 1), ("greedy", 1), ("accuracy", 1), ("loss", -1))
"""Held-out measures, and 1 where more is better."""


def _heldout(sides: Sequence[_Side], is_same_task: bool) -> Iterable[Row]:
    for name, good in _HELDOUT:
        measured = [
            [row for row in side.evaluations if row.get(name) is not None] for side in sides
        ]
        if not any(measured):
            continue
        if any(len(rows) > 1 for rows in measured):
            first = [rows[:1] if len(rows) > 1 else [] for rows in measured]
            yield _point(f"{name}, before", name, first)
        last = [rows[-1] if rows else None for rows in measured]
        row = _point(f"{name}, last", name, [rows[-1:] for rows in measured])
        differences = [
            _heldout_difference(name, sides[0], last[0], side, theirs)
            for side, theirs in zip(sides, last, strict=True)
        ]
        yield _judged(row, differences, good if is_same_task else None)
        if any(len(rows) > 2 for rows in measured):
            best = [sorted(rows, key=lambda r: good * r[name])[-1:] for rows in measured]
            yield _point(f"{name}, best", name, best)


def _point(label: str, name: str, rows: Sequence[Sequence[Mapping[str, Any]]]) -> Row:
    return Row(
        label=label,
        values=[float(r[0][name]) if r else None for r in rows],
        intervals=[_interval_of(r[0], name) if r else None for r in rows],
        notes=[f"step {r[0]['step']}" if r and r[0]["step"] else "" for r in rows],
    )


def _bound_names(name: str) -> tuple[str, str]:
    prefix = "" if name == "sampled" else f"{name}_"
    return f"{prefix}low", f"{prefix}high"


def _alone(name: str, accuracy: Interval) -> dict[str, Any]:
    low, high = _bound_names(name)
    return {"step": 0, name: accuracy.mean, low: accuracy.low, high: accuracy.high}


def _interval_of(row: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    low, high = map(row.get, _bound_names(name))
    return None if low is None or high is None else _bounds(Interval(row[name], low, high))


_Evaluation = Mapping[str, Any] | None


def _heldout_difference(
    name: str, first: _Side, ours: _Evaluation, other: _Side, theirs: _Evaluation
) -> Interval | None:
    if ours is None or theirs is None:
        return None
    if name in ("sampled", "greedy"):
        base = first.scores(first.stem(ours, name))
        scores = other.scores(other.stem(theirs, name))
        if both := base.keys() & scores.keys():
            return mean_interval([scores[task] - base[task] for task in both])
    known = [bounds for row in (ours, theirs) if (bounds := _interval_of(row, name))]
    if len(known) < 2:
        return None
    spread = math.hypot(*((high - low) / 2 for low, high in known))
    centre = float(theirs[name]) - float(ours[name])
    return Interval(centre, centre - spread, centre + spread)


def _training(sides: Sequence[_Side], window: Sequence[int], is_same_task: bool) -> Iterable[Row]:
    for label, metric, good in _TRAINING:
        series = [
            [float(value) for step in window if (value := side.rows[step].get(metric)) is not None]
            for side in sides
        ]
        if not any(series):
            continue
        estimates = [mean_interval(values) if values else None for values in series]
        means = [None if estimate is None else estimate.mean for estimate in estimates]
        row = Row(label=label, values=means, intervals=[*map(_bounds, estimates)])
        is_comparable = is_same_task or label not in _TASK_LABELS
        differences = [
            difference_interval(values, series[0]) if values and series[0] else None
            for values in series
        ]
        yield _judged(row, differences, good if is_comparable else None)


def _judged(row: Row, differences: Sequence[Interval | None], good: int | None) -> Row:
    judged = [None, *differences[1:]] if good is not None else [None] * len(differences)
    return replace(
        row,
        differences=[_bounds(difference) for difference in judged],
        verdicts=[_verdict(difference, good or 0) for difference in judged],
    )


def _verdict(difference: Interval | None, good: int) -> Verdict | None:
    if difference is None or _bounds(difference) is None:
        return None
    if difference.low <= 0 <= difference.high:
        return "within noise"
    is_more = difference.mean > 0
    if not good:
        return "higher" if is_more else "lower"
    return "better" if is_more == (good > 0) else "worse"


def _bounds(interval: Interval | None) -> tuple[float, float] | None:
    if interval is None or not math.isfinite(interval.low):
        return None
    return interval.low, interval.high


def _cost(sides: Sequence[_Side]) -> Iterable[Row]:
    # An interrupted run records only the CPU seconds of its last part.
    summaries = [s if s.get("first_step", 1) == 1 else {} for s in (side.summary for side in sides)]
    rows = (
        ("steps", [float(len(side.rows)) or None for side in sides]),
        ("wall seconds of the steps", [_total(side, "time/step_s") for side in sides]),
        ("tokens trained on", [_total(side, "rollout/tokens") for side in sides]),
        ("CPU seconds, warm start included", [summary.get("cpu_s") for summary in summaries]),
    )
    for label, values in rows:
        if any(value is not None for value in values):
            yield Row(label=label, values=values, intervals=[None] * len(values))


def _total(side: _Side, metric: str) -> float | None:
    values = [row[metric] for row in side.rows.values() if row.get(metric) is not None]
    return math.fsum(values) if values else None


def _remarks(
    sides: Sequence[_Side], settings: Mapping[str, Sequence[Any]], is_same_task: bool
) -> Iterable[str]:
    runs = [side for side in sides if side.config]
    if not is_same_task:
        yield "the environments differ: rewards and accuracies cannot be compared"
    if len(runs) > 1 and not settings:
        yield "all settings are the same"
    elif settings.keys() == {"seed"}:
        yield "only the seed differs: differences in the numbers are noise of the seed"
    if len({max(side.rows, default=0) for side in runs}) > 1:
        yield "the runs are at different steps: held-out numbers are from the last evaluations"


def _names(sides: Sequence[_Side]) -> list[str]:
    short = [side.run.path.absolute().name for side in sides]
    return short if len(set(short)) == len(short) else [str(side.run.path) for side in sides]
