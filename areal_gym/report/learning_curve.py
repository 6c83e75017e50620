"""The picture at the end of a run: reward while training, held-out accuracy before and after."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class CurvePoint:
    """One evaluation on held-out tasks."""

    step: int
    sampled: float
    """Accuracy at the training temperature."""
    low: float
    high: float
    """95% interval of `sampled`."""
    greedy: float | None = None


def draw_learning_curve(
    steps: Sequence[Mapping[str, float]],
    points: Sequence[CurvePoint],
    *,
    title: str,
    baselines: Mapping[str, float] | None = None,
) -> bytes:
    """PNG bytes of the curve.

    Args:
        steps: rows of metrics.jsonl, with `step` and `reward/mean`.
        points: evaluations on held-out tasks, in order.
        title: the run in one line.
        baselines: horizontal lines to compare with (the best demonstrator, ...).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = [row for row in steps if "reward/mean" in row]
    if rows:
        axes.plot(
            [row["step"] for row in rows],
            [row["reward/mean"] for row in rows],
            color="#8aa9d6",
            linewidth=1.5,
            label="reward of the training batch",
        )
    if points:
        axes.errorbar(
            [p.step for p in points],
            [p.sampled for p in points],
            yerr=[[p.sampled - p.low for p in points], [p.high - p.sampled for p in points]],
            color="#1f4e9c",
            marker="o",
            capsize=3,
            label="held-out accuracy, sampled (95%)",
        )
        greedy = [(p.step, p.greedy) for p in points if p.greedy is not None]
        if greedy:
            axes.plot(
                [step for step, _ in greedy],
                [accuracy for _, accuracy in greedy],
                color="#c2571a",
                marker="s",
                linestyle="--",
                label="held-out accuracy, greedy",
            )
    for name, value in (baselines or {}).items():
        axes.axhline(value, color="#777777", linewidth=1, linestyle=":")
        axes.annotate(
            f"{name} {value:.2f}",
            (1.0, value),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color="#555555",
        )
    axes.set(xlabel="training step", ylabel="accuracy / reward", ylim=(-0.02, 1.05), title=title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()


def draw_supervised_curve(
    steps: Sequence[Mapping[str, float]], evaluations: Sequence[Mapping[str, Any]], *, title: str
) -> bytes:
    """PNG bytes of loss and accuracy, beside each other.

    Args:
        steps: rows of metrics.jsonl, with `step`, `train/loss` and `train/accuracy`.
        evaluations: rows of evaluations.jsonl, with `step` and `heldout`, which has `loss` and
            `accuracy`.
        title: the run in one line.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.2), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title)
    for axes, name in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
        axes.plot(
            [row["step"] for row in steps],
            [row[f"train/{name}"] for row in steps],
            color="#8aa9d6",
            linewidth=1.5,
            label="training batch",
        )
        axes.plot(
            [row["step"] for row in evaluations],
            [row["heldout"][name] for row in evaluations],
            color="#1f4e9c",
            marker="o",
            label="held-out",
        )
        axes.set(xlabel="training step", ylabel=name)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()
