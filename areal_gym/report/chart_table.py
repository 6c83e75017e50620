"""The charts of a run: which metrics share which axes. Reports, notebooks, pictures and the viewer
draw from this table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_gym.run_dir.evaluations import is_graded_reward

_NOISE = 1e-7
"""A chart whose values are nowhere larger than this shows rounding only, and is left out."""


@dataclass(frozen=True, slots=True)
class ChartSpec:
    """The metrics of one chart, and how its axis runs."""

    title: str
    unit: str
    hint: str
    metrics: Mapping[str, str]
    """Metrics with their labels; `*` stands for any text."""
    total: str = ""
    """The metric of which `metrics` are parts; shown where they are not stacked."""
    heldout: str = ""
    """The measurement on held-out tasks in the same unit."""
    floor: float | None = 0.0
    ceiling: float | None = None
    least: float | None = None
    """How high the axis reaches at least, lest noise around zero look like a landscape."""
    is_stacked: bool = False
    is_quiet: bool = False
    """Whether it is left out while all values are 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of a chart; values that are None leave a gap."""

    name: str
    steps: Sequence[int]
    values: Sequence[float | None]
    are_dots: bool = False
    bounds: Sequence[tuple[float, float] | None] = field(default_factory=tuple)
    """95% interval of each value, if they have one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Lines in common axes."""

    title: str
    unit: str
    lines: Sequence[Line]


CHARTS = (
    ChartSpec(
        *("Reward", "", "mean of the batch; held-out accuracy with its 95% interval"),
        {"reward/mean": "batch"},
        heldout="sampled",
    ),
    ChartSpec(
        *("pass@k", "share of tasks", "share of tasks solved by at least one of k"),
        {"reward/pass@*": "pass@"},
        ceiling=1,
    ),
    ChartSpec(
        *("Loss", "", "the loss that is minimized"),
        {"train/loss": "loss", "train/critic_loss": "critic"},
        heldout="loss",
        floor=None,
    ),
    ChartSpec(
        *("Accuracy", "share", "on the batch and on held-out examples"),
        {"train/accuracy": "batch"},
        heldout="accuracy",
    ),
    ChartSpec(
        *("KL", "nats", "from the policy that sampled, from the reference and from the teacher"),
        {
            "train/approx_kl": "sampler",
            "train/kl_reference": "reference",
            "train/kl_teacher": "teacher",
        },
        least=1e-5,
    ),
    ChartSpec(
        *("Entropy", "nats", "mean entropy of the distributions that tokens were sampled from"),
        {"train/entropy": "entropy"},
    ),
    ChartSpec(
        *("Clipped", "share of tokens", "share of tokens whose loss is clipped"),
        {"train/clip_fraction": "clipped", "train/corrected_fraction": "corrected"},
        least=0.01,
    ),
    ChartSpec("Gradient norm", "", "before clipping", {"train/grad_norm": "norm"}),
    ChartSpec(
        "Groups",
        "share of groups",
        "solved by all members or by none: there is nothing to learn from these",
        {"reward/solve_all": "all solve", "reward/solve_none": "none solves"},
        ceiling=1,
    ),
    ChartSpec(
        *("Staleness", "versions", "versions that a token lags behind"),
        {"rollout/staleness_mean": "mean", "rollout/staleness_max": "max"},
        least=1,
    ),
    ChartSpec(
        *("Length", "tokens", "tokens sampled per trajectory"),
        {"rollout/policy_tokens_mean": "mean", "rollout/policy_tokens_max": "max"},
    ),
    ChartSpec(
        *("Turns", "", "engine calls per episode"),
        {
            "rollout/turns": "turns",
            "env/tool_calls": "tool calls",
            "env/tool_errors": "tool errors",
        },
    ),
    ChartSpec(
        *("Time of a step", "s", "the parts of its wall time"),
        {"time/wait_s": "wait", "time/train_s": "train", "time/publish_s": "publish"},
        total="time/step_s",
        is_stacked=True,
    ),
    ChartSpec(
        *("Overlap", "share", "of generation and training; 100% hides the shorter one entirely"),
        {"time/overlap_efficiency": "overlap", "time/share_engine": "episodes wait for the engine"},
        ceiling=1,
    ),
    ChartSpec(
        *("Throughput", "tokens/s", "tokens per second, trained on and sampled"),
        {"rollout/tokens_per_s": "whole step", "rollout/generated_tokens_per_s": "sampled"},
    ),
    ChartSpec(
        *("Stop reasons", "share of episodes", "why the episodes ended"),
        {"rollout/stop/*": ""},
        ceiling=1,
        is_stacked=True,
    ),
    ChartSpec(
        *("Failures", "episodes", "episodes lost so far, by cause"),
        {"rollout/failures/*": "", "rollout/stale_groups": "stale groups"},
        is_quiet=True,
    ),
)
"""The charts of a run, the most telling first."""


def charts_of(
    rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]] = ()
) -> Iterator[Chart]:
    """Yield the charts that a run's metrics give, the most telling first.

    `evaluations` is what `evaluations_of` makes of the rows of `evaluations.jsonl`.
    """
    for spec in CHARTS:
        chart = chart_of(spec, rows, evaluations)
        if any(abs(value or 0.0) > _NOISE for line in chart.lines for value in line.values):
            yield chart


def chart_of(
    spec: ChartSpec, rows: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]
) -> Chart:
    """Make one chart; it has no lines where the run has none of the metrics."""
    names = sorted({name for row in rows for name in row}, key=lambda name: (len(name), name))
    steps = [int(row["step"]) for row in rows]
    total = {spec.total: "all"} if spec.total else {}
    lines = []
    for metric, label in {**total, **spec.metrics}.items():
        stem = metric.removesuffix("*")
        for name in names:
            if name == metric or (stem != metric and name.startswith(stem)):
                values = [row.get(name) for row in rows]
                lines.append(Line(name=label + name[len(stem) :], steps=steps, values=values))
    return Chart(title=spec.title, unit=spec.unit, lines=[*lines, *_heldout(spec, evaluations)])


_BOUNDS = {"sampled": ("low", "high"), "reward": ("reward_low", "reward_high")}


def _heldout(spec: ChartSpec, evaluations: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    labels = {spec.heldout: "held out"} if spec.heldout else {}
    if spec.heldout == "sampled":
        is_graded = any("reward" in row for row in evaluations)
        other = {"reward": "held out", "sampled": "solved"}
        labels = other if is_graded else {**labels, "greedy": "greedy"}
    for measure, label in labels.items():
        rows = [row for row in evaluations if row.get(measure) is not None]
        if rows:
            low, high = _BOUNDS.get(measure, ("", ""))
            yield Line(
                name=label,
                steps=[row["step"] for row in rows],
                values=[row[measure] for row in rows],
                are_dots=True,
                bounds=[None if row.get(low) is None else (row[low], row[high]) for row in rows],
            )


def evaluations_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Flatten the rows of `evaluations.jsonl`: `step`, and what the objective measures.

    The mean reward is there where it says more than the share of successes: a function of the
    user's may return any number.
    """
    is_graded = any("heldout" not in row and is_graded_reward(row["sampled"]) for row in rows)
    return [{**_flat(row), **(_reward(row["sampled"]) if is_graded else {})} for row in rows]


def _reward(scores: Mapping[str, Any]) -> dict[str, Any]:
    return {name: scores.get(name) for name in ("reward", "reward_low", "reward_high")}


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    if "heldout" in row:
        return {"step": row["step"], **row["heldout"]}
    flat = {"step": row["step"]}
    for name, prefix in (("sampled", ""), ("greedy", "greedy_")):
        flat[name] = row[name]["pass@1"]
        flat |= {f"{prefix}{end}": row[name][f"pass@1_{end}"] for end in ("low", "high")}
    return flat
