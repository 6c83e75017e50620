"""What a report says: numbers, curves and examples, read from a run directory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_gym.config.settings_model import flat
from areal_gym.errors import NothingToDoError
from areal_gym.run_dir.run_files import RunFiles
from areal_gym.run_dir.run_list import no_run_hints
from areal_gym.run_dir.trajectory_files import TrajectoryFile, step_of
from areal_gym.utils.markup import number

_NOISE = 1e-7
"""What is nowhere larger is 0, but for rounding, and no chart."""

_EXAMPLES = 2
"""Best ones, and as many of the worst."""

_CHARTS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("Reward", "", {"reward/mean": "batch"}),
    ("pass@k", "share of tasks", {"reward/pass@*": "pass@"}),
    ("Loss", "", {"train/loss": "loss"}),
    ("Accuracy", "share", {"train/accuracy": "batch"}),
    ("KL", "nats", {"train/approx_kl": "sampler", "train/kl_reference": "reference"}),
    ("Entropy", "nats", {"train/entropy": "entropy"}),
    ("Clipped", "share of tokens", {"train/clip_fraction": "clipped"}),
    ("Gradient norm", "", {"train/grad_norm": "norm"}),
    ("Staleness", "versions", {"rollout/staleness_mean": "mean", "rollout/staleness_max": "max"}),
    (
        "Length",
        "tokens",
        {"rollout/policy_tokens_mean": "mean", "rollout/policy_tokens_max": "max"},
    ),
    (
        "Time of a step",
        "s",
        {"time/step_s": "all", "time/wait_s": "wait", "time/train_s": "train"},
    ),
    (
        "Throughput",
        "tokens/s",
        {"rollout/tokens_per_s": "step", "rollout/generated_tokens_per_s": "sampled"},
    ),
)
"""Title, unit and metrics with their labels; `*` stands for anything."""

# Where something lies on somebody's machine is nobody else's business; its own name may be.
_PATH = re.compile(r"(?:file:/+|~/|(?<![\w.:/])/)(?:[^\s/'\",:]+/)+([^\s/'\",:]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of a chart; values that are None leave a gap."""

    name: str
    steps: Sequence[int]
    values: Sequence[float | None]
    are_dots: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Lines in common axes."""

    title: str
    unit: str
    lines: Sequence[Line]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that a report says."""

    title: str
    lead: str
    """One sentence."""
    facts: Mapping[str, str]
    """The outcome."""
    evaluations: Sequence[Mapping[str, Any]]
    """Held-out tasks: step, sampled (with its 95% interval), greedy."""
    charts: Sequence[Chart]
    changed: Mapping[str, str]
    """Settings that are not the defaults."""
    settings: Mapping[str, str]
    examples: Sequence[tuple[str, Mapping[str, Any]]]
    """What it is an example of, and a trajectory without its tokens."""
    used: Sequence[Mapping[str, Any]]
    """Plugins: kind, id, summary, distribution, version."""
    environment: Mapping[str, str]


def collect(run: RunFiles) -> Report:
    """Read what there is to say.

    Raises:
        NothingToDoError: there is no run.
    """
    if not run.config_file.is_file():
        raise NothingToDoError(f"{run.path} is not a run directory", hints=no_run_hints(run.path))
    rows = run.read_metrics()
    summary = run.read_summary() or {}
    evaluations = [evaluation_of(row) for row in run.read_evaluations()]
    settings = run.read_config()
    provenance = run.read_provenance()
    done = max((int(row["step"]) for row in rows), default=0)
    leaves = {name: _shown(value) for name, value in flat(settings)}
    env = leaves.get("env.id", "?")
    method = leaves.get("trainer.algorithm", "")
    objective = leaves.get("objective", "rl")
    return Report(
        title=run.path.absolute().name,
        lead=f"{method if objective == 'rl' else objective} in {env}, "
        f"{done} of {leaves.get('steps', '?')} steps" + ("" if summary else ", not finished"),
        facts=_facts(rows, evaluations, summary),
        evaluations=evaluations,
        charts=list(charts_of(rows, evaluations)),
        changed=_changed(settings, leaves),
        settings=leaves,
        examples=_examples(run),
        used=provenance.get("used", []),
        environment={
            name: _shown(value)
            for name, value in flat({k: v for k, v in provenance.items() if k != "used"})
        },
    )


def _facts(
    rows: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
) -> dict[str, str]:
    facts: dict[str, str] = {}
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        for name in ("sampled", "greedy", "accuracy", "loss"):
            if last.get(name) is not None:
                facts[f"held out, {name}"] = f"{number(first.get(name))} → {number(last[name])}"
    if best := (summary.get("warm_start") or {}).get("best_demonstrator"):
        facts["best demonstrator"] = number(best)
    if rows:
        first, last = rows[0], rows[-1]
        for name, key in (("reward of the batch", "reward/mean"), ("entropy", "train/entropy")):
            if last.get(key) is not None:
                facts[name] = f"{number(first.get(key))} → {number(last[key])}"
        step_s = [row["time/step_s"] for row in rows if row.get("time/step_s") is not None]
        if step_s:
            facts["time of a step"] = f"{number(sum(step_s) / len(step_s))} s"
        limits = [row["limited_by"] for row in rows if row.get("limited_by")]
        if limits:
            facts["limited by"] = max(sorted(set(limits)), key=limits.count)
    for name, key in (("training", "train_s"), ("warm start", "warm_start_s")):
        if summary.get(key):
            facts[name] = f"{number(summary[key])} s"
    if summary.get("checkpoint"):
        facts["policy"] = str(summary["checkpoint"])
    return facts


def evaluation_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `evaluations.jsonl`, leaves: `step` and what the objective measures."""
    if "heldout" in row:
        return {"step": row["step"], **row["heldout"]}
    sampled, greedy = row["sampled"], row["greedy"]
    return {
        "step": row["step"],
        "sampled": sampled["pass@1"],
        "low": sampled["pass@1_low"],
        "high": sampled["pass@1_high"],
        "greedy": greedy["pass@1"],
        "greedy_low": greedy["pass@1_low"],
        "greedy_high": greedy["pass@1_high"],
    }


def evaluation_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of texts: what was measured, with its interval where it has one."""
    bounds = {"sampled": ("low", "high"), "greedy": ("greedy_low", "greedy_high")}
    of_others = {name for pair in bounds.values() for name in pair}
    names = [name for name in (rows[0] if rows else ()) if name not in of_others]

    def cell(row: Mapping[str, Any], name: str) -> str:
        low, high = (row.get(bound) for bound in bounds.get(name, ("", "")))
        interval = "" if low is None else f" ({number(low)} to {number(high)})"
        return number(row.get(name)) + interval

    return names, [[cell(row, name) for name in names] for row in rows]


def charts_of(
    rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]] = ()
) -> Iterator[Chart]:
    """The charts that a run's metrics give, the most telling first.

    Args:
        rows: of `metrics.jsonl`.
        evaluations: `step`, and what was measured at it.
    """
    names = sorted({name for row in rows for name in row}, key=lambda n: (len(n), n))
    steps = [int(row["step"]) for row in rows]
    for title, unit, metrics in _CHARTS:
        lines = []
        for metric, label in metrics.items():
            stem = metric.removesuffix("*")
            for name in names:
                if name == metric or (stem != metric and name.startswith(stem)):
                    values = [row.get(name) for row in rows]
                    lines.append(Line(name=label + name[len(stem) :], steps=steps, values=values))
        dots = {"Reward": "sampled", "Accuracy": "accuracy", "Loss": "loss"}.get(title, "")
        if any(dots in row for row in evaluations):
            marks = [row.get(dots) for row in evaluations]
            at = [row["step"] for row in evaluations]
            lines.append(Line(name="held out", steps=at, values=marks, are_dots=True))
        if any(abs(value or 0.0) > _NOISE for line in lines for value in line.values):
            yield Chart(title=title, unit=unit, lines=lines)


def _changed(settings: Mapping[str, Any], leaves: Mapping[str, str]) -> dict[str, str]:
    from pydantic import ValidationError

    from areal_gym.config import RunConfig

    try:
        changed = RunConfig.model_validate(settings).changed()
    except ValidationError:  # of another version
        return dict(leaves)
    return {name: _shown(value) for name, value in changed.items()}


def _examples(run: RunFiles) -> list[tuple[str, Mapping[str, Any]]]:
    """Of the newest step."""
    files = [path for path in run.trajectories_dir.glob("step-*.jsonl") if step_of(path)]
    return best_and_worst(max(files), _EXAMPLES) if files else []


def best_and_worst(path: Path, num: int) -> list[tuple[str, Mapping[str, Any]]]:
    """Trajectories of a file without their tokens, `num` of each at most: what each of them is an
    example of, "best" or "worst". They are of groups apart where there are enough.

    Raises:
        DataError: the file is damaged.
    """
    file = TrajectoryFile(path)
    rows = [head.summary for head in file.page()]
    order = sorted(range(len(rows)), key=lambda place: -rows[place]["reward"])
    best, worst = _apart(rows, order, num), _apart(rows, order[::-1], num)
    worst = [place for place in worst if place not in best]
    return [
        *(("best", file.read_head(place)) for place in best),
        *(("worst", file.read_head(place)) for place in worst),
    ]


def _apart(rows: Sequence[Mapping[str, Any]], order: Sequence[int], num: int) -> list[int]:
    chosen: dict[str, int] = {}
    for place in order:
        chosen.setdefault(rows[place]["group"], place)
    return list(chosen.values())[:num]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "–"
    if value is None or value == {}:
        return "–"
    if isinstance(value, float):
        return number(value)
    text = str(value)
    if Path(text).is_absolute() or text.startswith("~"):
        return f"…/{Path(text).name}"
    return _PATH.sub(r"…/\1", text)
