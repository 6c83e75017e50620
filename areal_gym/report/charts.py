"""Draw charts as small SVG without scripts, in the colors of the surrounding page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import TypeGuard

from areal_gym.report.chart_table import Chart, Line
from areal_gym.utils.markup import number

WIDTH, HEIGHT = 340, 190
COLORS = ("#4a80d6", "#d2742c", "#3b9c68", "#b85aa0", "#9a8722", "#2b9aa3")
"""Readable on white and on black."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 44, 22
_LEGEND_ROW = 14


def draw(chart: Chart, *, ink: str = "currentColor", x: int = 0, y: int = 0) -> str:
    """Draw a chart as an `svg` element of WIDTH by HEIGHT, at a place in a larger picture.

    `ink` is the color of texts and axes. A legend of several rows makes the plot lower.
    """
    bounds = [bound for line in chart.lines for pair in line.bounds for bound in pair or ()]
    values = [v for line in chart.lines for v in line.values if _is_number(v)] + bounds
    steps = [step for line in chart.lines for step in line.steps]
    ticks = _ticks(min([0.0, *values]), max(values))
    low, high = min([0.0, *values]), max(max(values), ticks[-1])
    first, last = min(steps), max(max(steps), min(steps) + 1)
    legend = _legend(chart.lines)
    top = _TOP + legend[-1][2] if legend else _TOP

    def across(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * (WIDTH - _LEFT - _RIGHT)

    def up(value: float) -> float:
        return HEIGHT - _BOTTOM - (value - low) / (high - low) * (HEIGHT - _BOTTOM - top)

    unit = f" ({chart.unit})" if chart.unit else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" x="{x}" y="{y}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" font-family="sans-serif" font-size="11" '
        f'fill="{ink}"><title>{escape(chart.title)}</title>',
        f'<text x="4" y="14" font-size="12" font-weight="600">{escape(chart.title)}'
        f'<tspan font-weight="400" fill-opacity="0.6">{escape(unit)}</tspan></text>',
        *(_tick(value, up(value), ink) for value in ticks),
    ]
    for step, anchor in ((first, "start"), (max(steps), "end")):
        parts.append(
            f'<text x="{across(step):.1f}" y="{HEIGHT - 7}" text-anchor="{anchor}" '
            f'fill-opacity="0.6" font-size="10">{step}</text>'
        )
    for i, (line, (text, left, down)) in enumerate(zip(chart.lines, legend, strict=True)):
        color = COLORS[i % len(COLORS)]
        parts += [
            f'<rect x="{left:.0f}" y="{25 + down}" width="10" height="3" fill="{color}"/>',
            f'<text x="{left + 14:.0f}" y="{30 + down}" fill-opacity="0.8">{escape(text)}</text>',
            *_marks(line, color, across, up),
        ]
    return "".join([*parts, "</svg>"])


def _legend(lines: Sequence[Line]) -> list[tuple[str, float, int]]:
    """Return each line's entry, with its left edge and its distance from the first row, in pixels.

    A text's width is estimated from its length.
    """
    entries: list[tuple[str, float, int]] = []
    left, down = 4.0, 0
    for line in lines:
        newest = next((value for value in reversed(line.values) if _is_number(value)), None)
        text = f"{line.name} {number(newest)}"
        width = 14 + 6.2 * len(text)
        if entries and left + width > WIDTH:
            left, down = 4.0, down + _LEGEND_ROW
        entries.append((text, left, down))
        left += width + 12
    return entries


def _tick(value: float, y: float, ink: str) -> str:
    return (
        f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
        f'stroke="{ink}" stroke-opacity="0.13"/>'
        f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end" '
        f'fill-opacity="0.6" font-size="10">{number(value)}</text>'
    )


def _marks(
    line: Line, color: str, across: Callable[[float], float], up: Callable[[float], float]
) -> list[str]:
    points = [
        (across(step), up(value)) if _is_number(value) else None
        for step, value in zip(line.steps, line.values, strict=True)
    ]
    if line.are_dots or len(points) == 1:
        bars = [
            f'<path d="M{across(step):.1f},{up(bounds[0]):.1f}V{up(bounds[1]):.1f}" '
            f'stroke="{color}" stroke-opacity="0.5"/>'
            for step, bounds in zip(line.steps, line.bounds, strict=False)
            if bounds is not None
        ]
        return bars + [
            f'<circle cx="{p[0]:.1f}" cy="{p[1]:.1f}" r="2.6" fill="{color}"/>' for p in points if p
        ]
    path, is_pen_up = [], True
    for point in points:
        if point is not None:
            path.append(f"{'M' if is_pen_up else 'L'}{point[0]:.1f},{point[1]:.1f}")
        is_pen_up = point is None
    return [f'<path d="{"".join(path)}" fill="none" stroke="{color}" stroke-width="1.5"/>']


def _ticks(low: float, high: float) -> Sequence[float]:
    rough = (high - low or 1.0) / 3
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [float(f"{i * size:.12g}") for i in range(first, max(last, first + 1) + 1)]


def _is_number(value: float | None) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)
