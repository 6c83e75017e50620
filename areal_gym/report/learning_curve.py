"""`learning_curve.png`, the picture at the end of a run: charts of the table, by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from areal_gym.report.chart_table import CHARTS, Chart, Line, chart_of, evaluations_of

_LINES = ("#8aa9d6", "#7f7f7f")
_DOTS = (("#1f4e9c", "o", "-"), ("#c2571a", "s", "--"))
"""Colour, marker and line of the measurements on held-out tasks."""


def draw_learning_curve(
    rows: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    *,
    title: str,
    baselines: Mapping[str, float] | None = None,
) -> bytes:
    """Draw reward and held-out accuracy, or loss and accuracy side by side, as a PNG.

    `baselines` are horizontal lines to compare with (the best demonstrator, ...).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = evaluations_of(evaluations)
    is_supervised = any("heldout" in row for row in evaluations) or any(
        "reward/mean" not in row for row in rows
    )
    titles = ("Loss", "Accuracy") if is_supervised else ("Reward",)
    charts = [chart_of(spec, rows, measured) for spec in CHARTS if spec.title in titles]
    figure = Figure(figsize=(7.2, 3.2 if is_supervised else 4.0), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title)
    for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        _draw_chart(axes, chart)
        for name, value in (baselines or {}).items():
            _draw_baseline(axes, f"{name} {value:.2f}", value)
        if not is_supervised:
            axes.set(ylabel="accuracy / reward")
            if all(-0.02 <= value <= 1.05 for line in chart.lines for value in _values(line)):
                axes.set(ylim=(-0.02, 1.05))
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()


def _draw_chart(axes: Any, chart: Chart) -> None:
    lines = [line for line in chart.lines if not line.are_dots]
    dots = [line for line in chart.lines if line.are_dots]
    for line, color in zip(lines, _LINES, strict=False):
        label = f"training {line.name}" if line.name == "batch" else line.name
        axes.plot(line.steps, _values(line), color=color, linewidth=1.5, label=label)
    for line, (color, marker, style) in zip(dots, _DOTS, strict=False):
        bars = [(v - b[0], b[1] - v) for v, b in zip(_values(line), line.bounds, strict=True) if b]
        axes.errorbar(
            line.steps,
            _values(line),
            yerr=list(zip(*bars, strict=True)) or None,
            color=color,
            marker=marker,
            linestyle=style,
            capsize=3,
            label=f"{line.name} (95%)" if bars else line.name,
        )
    axes.set(xlabel="training step", ylabel=chart.title.lower())
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if chart.lines:
        axes.legend(loc="best", frameon=False, fontsize=8)


def _draw_baseline(axes: Any, label: str, value: float) -> None:
    axes.axhline(value, color="#777777", linewidth=1, linestyle=":")
    axes.annotate(
        label,
        (1.0, value),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color="#555555",
    )


def _values(line: Line) -> list[float]:
    return [float("nan") if value is None else value for value in line.values]
