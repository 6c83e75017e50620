"""The content of a report: numbers, charts and examples, read from a run directory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_gym.config.settings_model import flat
from areal_gym.errors import UsageError
from areal_gym.report.chart_table import Chart, charts_of, evaluations_of
from areal_gym.run_dir.run_files import RunFiles
from areal_gym.run_dir.run_list import no_run_hints
from areal_gym.run_dir.shown_images import inlined
from areal_gym.run_dir.trajectory_files import TrajectoryFile, step_of
from areal_gym.utils.markup import number

EXAMPLES = 2
"""The number of best examples, and of worst ones."""

# Reports are shared: a path keeps its last part only.
_PATH = re.compile(r"(?:file:/+|~/|(?<![\w.:/])/)(?:[^\s/'\",:]+/)+([^\s/'\",:]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The content of a report, independent of its format."""

    title: str
    lead: str
    """A sentence that summarises the run."""
    facts: Mapping[str, str]
    """The results, by name."""
    evaluations: Sequence[Mapping[str, Any]]
    """The evaluations on held-out tasks: step, sampled (with its 95% interval), greedy."""
    charts: Sequence[Chart]
    changed: Mapping[str, str]
    """The settings that differ from the defaults."""
    settings: Mapping[str, str]
    examples: Sequence[tuple[str, Mapping[str, Any]]]
    """Pairs of "best" or "worst" and a trajectory without its tokens."""
    used: Sequence[Mapping[str, Any]]
    """The plugins: kind, id, summary, distribution, version."""
    environment: Mapping[str, str]


def collect(run: RunFiles) -> Report:
    """Read the content of a report; raise UsageError if there is no run."""
    if not run.config_file.is_file():
        raise UsageError(f"{run.path} is not a run directory", hints=no_run_hints(run.path))
    rows = run.read_metrics()
    summary = run.read_summary() or {}
    evaluations = evaluations_of(run.read_evaluations())
    settings, provenance = run.read_config(), run.read_provenance()
    used = provenance.pop("used", [])
    done = max((int(row["step"]) for row in rows), default=0)
    leaves = {name: shown(value) for name, value in flat(settings)}
    env, objective = leaves.get("env.id", "?"), leaves.get("objective", "rl")
    method = leaves.get("trainer.algorithm", "") if objective == "rl" else objective
    files = [path for path in run.trajectories_dir.glob("step-*.jsonl") if step_of(path)]
    return Report(
        title=run.path.absolute().name,
        lead=f"{method} in {env}, {done} of {leaves.get('steps', '?')} steps"
        + ("" if summary else ", not finished"),
        facts=_facts(rows, evaluations, summary),
        evaluations=evaluations,
        charts=list(charts_of(rows, evaluations)),
        changed=_changed(settings, leaves),
        settings=leaves,
        examples=best_and_worst(max(files), EXAMPLES) if files else [],
        used=used,
        environment={name: shown(value) for name, value in flat(provenance)},
    )


def _facts(
    rows: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
) -> dict[str, str]:
    facts: dict[str, str] = {}

    def add_change(rows: Sequence[Mapping[str, Any]], name: str, key: str) -> None:
        if not rows or rows[-1].get(key) is None:
            return
        facts[name] = number(rows[-1][key])
        if len(rows) > 1:  # one measurement is no change
            facts[name] = f"{number(rows[0].get(key))} → {facts[name]}"

    for name in ("reward", "sampled", "greedy", "accuracy", "loss"):
        add_change(evaluations, f"held out, {name}", name)
    if best := (summary.get("warm_start") or {}).get("best_demonstrator"):
        facts["best demonstrator"] = number(best)
    add_change(rows, "reward of the batch", "reward/mean")
    add_change(rows, "entropy", "train/entropy")
    if step_s := [row["time/step_s"] for row in rows if row.get("time/step_s") is not None]:
        facts["time of a step"] = f"{number(sum(step_s) / len(step_s))} s"
    if limits := [row["limited_by"] for row in rows if row.get("limited_by")]:
        facts["limited by"] = max(sorted(set(limits)), key=limits.count)
    for name, key in (("training", "train_s"), ("warm start", "warm_start_s")):
        if summary.get(key):
            facts[name] = f"{number(summary[key])} s"
    if summary.get("checkpoint"):
        facts["policy"] = str(summary["checkpoint"])
    return facts


def evaluation_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table: each measurement, with its interval if known."""
    bounds = {
        "sampled": ("low", "high"),
        "greedy": ("greedy_low", "greedy_high"),
        "reward": ("reward_low", "reward_high"),
    }
    bound_names = {name for pair in bounds.values() for name in pair}
    names = [name for name in (rows[0] if rows else ()) if name not in bound_names]

    def cell(row: Mapping[str, Any], name: str) -> str:
        low, high = (row.get(bound) for bound in bounds.get(name, ("", "")))
        interval = "" if low is None else f" ({number(low)} to {number(high)})"
        return number(row.get(name)) + interval

    return names, [[cell(row, name) for name in names] for row in rows]


def _changed(settings: Mapping[str, Any], leaves: Mapping[str, str]) -> dict[str, str]:
    from pydantic import ValidationError

    from areal_gym.config import RunConfig

    try:
        changed = RunConfig.model_validate(settings).changed()
    except ValidationError:  # settings of another version
        return dict(leaves)
    return {name: shown(value) for name, value in changed.items()}


def best_and_worst(path: Path, num: int) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the trajectories with the highest and the lowest rewards, without their tokens.

    Each comes with "best" or "worst"; there are `num` of each at most, from different groups.
    Raises DataError if the file is damaged.
    """
    file = TrajectoryFile(path)
    rows = [head.summary for head in file.page()]
    order = sorted(range(len(rows)), key=lambda place: -rows[place]["reward"])
    best = _apart(rows, order, num)
    worst = [place for place in _apart(rows, order[::-1], num) if place not in best]
    kinds = {**dict.fromkeys(best, "best"), **dict.fromkeys(worst, "worst")}
    return [(kind, _with_pictures(path, file.read_head(place))) for place, kind in kinds.items()]


def _with_pictures(path: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    pictures = inlined(path.parent.parent, row)
    messages = [{**message, "pictures": pictures} for message in row["messages"]]
    return {**row, "messages": messages} if pictures else dict(row)


def _apart(rows: Sequence[Mapping[str, Any]], order: Sequence[int], num: int) -> list[int]:
    chosen: dict[str, int] = {}
    for place in order:
        chosen.setdefault(rows[place]["group"], place)
    return list(chosen.values())[:num]


def shown(value: Any) -> str:
    """Return a setting as text; of a path, the last part only: reports are shared."""
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or "–"
    if value is None or value == {}:
        return "–"
    if isinstance(value, float):
        return number(value)
    text = str(value)
    if Path(text).is_absolute() or text.startswith("~"):
        return f"…/{Path(text).name}"
    return _PATH.sub(r"…/\1", text)
