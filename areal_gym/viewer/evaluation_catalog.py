"""The evaluations that the viewer shows: directories of their own, and those of a run's schedule.

Each has a short id: `NAME` of a directory among the runs, `RUN:NAME` of one in `RUN/evaluations`
or in a suite, `RUN:step-40` of one on the schedule of a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from areal_gym.errors import DataError, GymError, UnknownIdError, choices
from areal_gym.run_dir.evaluations import EVALUATION_FILE, Evaluation, is_graded_reward
from areal_gym.viewer.catalog import Catalog, Run, nested, shortened
from areal_gym.viewer.safe_paths import contained, finite, read_object
from areal_gym.viewer.sample_table import SampleTable

_SCORE = re.compile(r"pass(@|\^)([1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an evaluation lies: a directory, or one step of a run's schedule."""

    path: Path
    run: Run | None
    step: int | None = None


class EvaluationCatalog:
    """Lists and opens the evaluations in and below the catalog's paths, listed again each time."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._known: dict[str, _Place] = {}
        self._tables: dict[_Place, SampleTable] = {}
        self._directories: dict[Path, Run] = {}
        self._lock = Lock()

    def cards(self) -> list[dict[str, Any]]:
        """Return how each was measured and its scores; a damaged one says so in `problems`."""
        self._known = self._places()
        return [self._card(id, place) for id, place in self._known.items()]

    def about(self, id: str) -> dict[str, Any]:
        """Return the card of one evaluation, and all that it says of itself as `details`."""
        place = self._place(id)
        card = self._card(id, place)
        if place.step is not None:
            return {**card, "details": _scheduled(place)}
        return {**card, "details": read_object(place.path, place.path / EVALUATION_FILE)}

    def page(self, id: str, start: int = 0, limit: int | None = None) -> dict[str, Any]:
        """Return samples as columns, in the order in which they ended (see `SampleTable`)."""
        return self._table(self._place(id)).page(start, limit)

    def trajectory(self, id: str, number: int, *, has_texts: bool = True) -> dict[str, Any]:
        """Return the trajectory of a row, as `Run.trajectory` does."""
        place = self._place(id)
        row = shortened(self._table(place).read(number))
        row |= {"trained": None, "place": number}
        if has_texts:
            row["texts"] = self.texts(id, (i for s in row["spans"] for i in s["token_ids"]))
        return row

    def directory_of(self, id: str) -> Path:
        """Return the directory of an evaluation, which has its pictures."""
        return self._place(id).path

    def file_of(self, id: str) -> str | None:
        """Return the file of a run's trajectories that one on its schedule is read from."""
        step = self._place(id).step
        return None if step is None else f"eval-{step:06d}"

    def texts(self, id: str, token_ids: Iterator[int]) -> dict[str, str]:
        """Return the texts of token ids, from the evaluation's or its run's tokenizer."""
        place = self._place(id)
        own = self._directories.setdefault(place.path, Run(place.path))
        for run in (own, place.run):
            if run is not None and run.vocabulary.is_known:
                return run.vocabulary.texts(token_ids)
        return {}

    def _place(self, id: str) -> _Place:
        if id in self._known:
            return self._known[id]
        if (place := self._direct(id)) is not None:  # listing thousands of runs would be slow
            self._known[id] = place
            return place
        self._known = self._places()
        if id not in self._known:
            raise UnknownIdError(f"no evaluation {id!r}", hints=choices(id, self._known))
        return self._known[id]

    def _direct(self, id: str) -> _Place | None:
        """Return where an evaluation lies if its id says so, else None."""
        name, _, inside = id.partition(":")
        by_name = {run.name: run for run in self._catalog.runs()}
        if (run := by_name.get(name)) is None:
            return None
        if run.is_evaluation:
            by_path = {run.path: run for run in by_name.values()}
            return None if inside else _Place(run.path, self._source(run, by_path))
        steps = {f"step-{row['step']}": row for row in run.evaluations()}
        if isinstance(steps.get(inside, {}).get("sampled"), Mapping):
            return _Place(run.path, run, steps[inside]["step"])
        for path in self._catalog.evaluation_paths(run):
            if path.name == inside:
                return _Place(path, run)
        return None

    def _places(self) -> dict[str, _Place]:
        runs = self._catalog.runs()
        by_path = {run.path: run for run in runs}
        places: dict[str, _Place] = {}

        def add(id: str, place: _Place) -> None:
            name, number = id, 2
            while name in places:
                name, number = f"{id}~{number}", number + 1
            places[name] = place

        for run in runs:
            if run.is_evaluation:
                add(run.name, _Place(run.path, self._source(run, by_path)))
                continue
            for row in run.evaluations():
                if isinstance(row.get("sampled"), Mapping):
                    add(f"{run.name}:step-{row['step']}", _Place(run.path, run, row["step"]))
        for path in self._catalog.evaluation_paths():
            if path not in by_path:
                inside = path.parent.parent if path.parent.name == "evaluations" else path.parent
                owner = by_path.get(inside)
                prefix = owner.name if owner is not None else inside.name
                add(f"{prefix}:{path.name}", _Place(path, owner))
        return places

    def _source(self, run: Run, by_path: Mapping[Path, Run]) -> Run | None:
        """Return the run whose policy an evaluation measured, if it is shown."""
        try:
            policy = read_object(run.path, run.path / EVALUATION_FILE).get("policy")
        except DataError:
            return None
        name = Path(str(policy.get("run"))).name if isinstance(policy, dict) else ""
        return next((other for other in by_path.values() if other.path.name == name), None)

    def _table(self, place: _Place) -> SampleTable:
        with self._lock:
            if place not in self._tables:
                if place.step is not None:
                    file = place.path / "trajectories" / f"eval-{place.step:06d}.jsonl"
                    self._tables[place] = SampleTable(place.path, file, None)
                else:
                    evaluation = _opened(place.path)
                    self._tables[place] = SampleTable(
                        place.path, evaluation.trajectories_file, evaluation.samples_file
                    )
            return self._tables[place]

    def _card(self, id: str, place: _Place) -> dict[str, Any]:
        card: dict[str, Any] = {
            **{"id": id, "name": id, "run": None if place.run is None else place.run.name},
            **dict.fromkeys(("step", "env", "benchmark", "split", "model", "temperature")),
            **dict.fromkeys(("num_tasks", "num_samples", "reward", "started_at", "duration_s")),
            **dict.fromkeys(("error", "num_done", "num_total", "num_failed", "seed")),
            **{"is_graded": False},
            **{"status": "stopped", "scores": [], "stops": {}, "problems": [], "policy": ""},
        }
        try:
            facts = _scheduled(place) if place.step is not None else _facts(_opened(place.path))
        except (GymError, OSError) as error:
            return {**card, "problems": [f"{error}"]}
        scores = facts.pop("scores")
        is_graded = is_graded_reward(scores)
        stops = scores.get("stop_reasons")
        stops = stops if isinstance(stops, dict) else {}
        return {
            **card,
            **facts,
            "reward": finite(scores.get("reward")),
            "num_failed": finite(scores.get("num_failed")),
            "is_graded": is_graded,
            "scores": [*([_score("reward", scores)] if is_graded else []), *_scores(scores)],
            "stops": {str(name): finite(value) for name, value in stops.items()},
        }


def _opened(path: Path) -> Evaluation:
    for name in (EVALUATION_FILE, "status.json"):
        if (path / name).exists() and contained(path, path / name) is None:
            raise DataError(f"{path / name} is not a plain file of this evaluation")
    folder = path / "trajectories"
    for file in (folder / "eval.jsonl", folder / "eval-greedy.jsonl"):
        if file.exists() and contained(path, file) is None:
            raise DataError(f"{file} is not a plain file of this evaluation")
    return Evaluation.open(path)


def _facts(evaluation: Evaluation) -> dict[str, Any]:
    info = evaluation.info
    return {
        "name": info.name,
        "env": _text(info.env),
        "benchmark": _text(info.benchmark),
        "split": _text(info.split),
        "policy": _text(info.policy_name),
        "model": _text(Path(str(info.policy.get("model") or "")).name),
        "step": finite(info.policy.get("step")),
        "temperature": finite(info.sampling.get("temperature")),
        "seed": finite(info.seed),
        "num_tasks": finite(info.num_tasks),
        "num_samples": finite(info.num_samples),
        "started_at": _text(info.started_at),
        "duration_s": finite(info.duration_s),
        "status": info.status,
        "error": _text(info.error),
        "num_done": finite(info.num_done),
        "num_total": finite(info.num_total),
        "scores": info.scores,
    }


def _scheduled(place: _Place) -> dict[str, Any]:
    """Return the same of an evaluation on a run's schedule."""
    run = place.run
    assert run is not None
    row = next((r for r in run.evaluations() if r["step"] == place.step), {})
    scores = row.get("sampled")
    scores = scores if isinstance(scores, dict) else {}
    settings = run.identity()
    return {
        "name": f"{run.name}, step {place.step}",
        "env": _text(scores.get("env", nested(settings, "env", "id"))),
        "split": _text(scores.get("split")),
        "policy": f"{run.name}, step {place.step}",
        "model": _text(Path(str(nested(settings, "engine", "model") or "")).name),
        "step": place.step,
        "temperature": finite(scores.get("temperature")),
        "seed": finite(nested(settings, "seed")),
        "num_tasks": finite(scores.get("num_tasks")),
        "num_samples": finite(scores.get("num_samples")),
        "started_at": _text(row.get("started_at")),
        "duration_s": finite(scores.get("wall_s")),
        "status": "finished",
        "scores": scores,
    }


def _scores(scores: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return pass@k and pass^k."""
    rows = []
    for name, value in scores.items():
        match = _SCORE.fullmatch(str(name))
        if match is None or finite(value) is None or isinstance(value, bool):
            continue
        rows.append(_score(name, scores))
    return sorted(rows, key=lambda row: ("^" in row["name"], int(row["name"][5:])))


def _score(name: str, scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return a score with the ends of its interval where it has one."""
    ends = {end: finite(scores.get(f"{name}_{end}")) for end in ("low", "high")}
    return {"name": name, "value": finite(scores[name]), **ends}


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
