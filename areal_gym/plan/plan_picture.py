"""Draws a plan as SVG: bars of memory against what a GPU has, and of seconds."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from areal_gym.plan.run_plan import RunPlan
from areal_gym.utils.markup import counted

_COLORS = {
    "weights": "#4c78a8",
    "gradients": "#f2a541",
    "states": "#58a55c",
    "frozen": "#72b7b2",
    "gathered": "#9d7660",
    "activations": "#b279a2",
    "logits": "#ff9da6",
    "buckets": "#e45756",
    "cache": "#eeca3b",
}
_SECONDS = "#4c78a8"
_INK, _FAINT, _IDLE = "#24292f", "#8a929c", "#eef0f3"
_LEFT, _WIDTH, _BAR, _ROW, _TOP = 150, 620, 22, 34, 64
_FULL_WIDTH = _LEFT + _WIDTH + 110


def picture(plan: RunPlan) -> str:
    """Return the plan as an SVG document."""
    server = {"weights": plan.server_weight_bytes, "cache": plan.server_cache_bytes}
    memory = [("a rank, training", plan.rank_bytes), ("rank 0, publishing", plan.publishing_bytes)]
    if plan.num_servers:
        memory.append(("a server's GPU", server))
    longest = max([plan.gpu_bytes, *(sum(sizes.values()) for _, sizes in memory)])
    parts = [
        _text(
            16,
            26,
            f"{plan.num_parameters / 1e9:.2f} billion parameters on {plan.num_gpus} x {plan.gpu}: "
            f"{counted(plan.num_ranks, 'rank')}, "
            f"{counted(plan.num_servers, 'server')} of {plan.gpus_per_server}",
            size=15,
        ),
        _text(_LEFT, 52, f"memory of a GPU, {plan.gpu_bytes / 1e9:.0f} GB", color=_FAINT),
    ]
    y = _TOP
    for name, sizes in memory:
        parts += _stack(y, name, sizes, whole=plan.gpu_bytes, longest=longest)
        y += _ROW
    parts += _legend(y + 12, [kind for _, sizes in memory for kind in sizes])
    y += 56
    title = f"seconds of a step of {plan.step_tokens:,} tokens, estimated"
    parts.append(_text(_LEFT, y, title, color=_FAINT))
    y += 12
    slowest = max(plan.seconds.values()) or 1.0
    for name, seconds in plan.seconds.items():
        width = _WIDTH * seconds / slowest
        is_limit = name == plan.limit
        label = f"{seconds:.1f} s" + (f", {plan.limited_by}" if is_limit else "")
        parts += [
            _text(_LEFT - 10, y + 16, name, anchor="end"),
            _rect(_LEFT, y, width, _COLORS["buckets"] if is_limit else _SECONDS, label),
            *_beside(y, width, label),
        ]
        y += _ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_FULL_WIDTH}" height="{y + 10}" '
        f'viewBox="0 0 {_FULL_WIDTH} {y + 10}" font-family="sans-serif">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _stack(
    y: int, name: str, sizes: Mapping[str, int], *, whole: float, longest: float
) -> list[str]:
    """Return a bar of parts over one of what the GPU has."""
    parts = [
        _text(_LEFT - 10, y + 16, name, anchor="end"),
        _rect(_LEFT, y, _WIDTH * whole / longest, _IDLE, f"{whole / 1e9:.0f} GB"),
    ]
    x = float(_LEFT)
    for kind, size in sizes.items():
        width = _WIDTH * size / longest
        parts.append(_rect(x, y, width, _COLORS.get(kind, _FAINT), f"{kind} {size / 1e9:.1f} GB"))
        x += width
    total = sum(sizes.values())
    return [*parts, _text(_LEFT + _WIDTH + 8, y + 16, f"{total / 1e9:.1f} GB")]


def _legend(y: int, kinds: list[str]) -> list[str]:
    parts, x = [], float(_LEFT)
    for kind in dict.fromkeys(kinds):
        parts.append(_rect(x, y, 12, _COLORS.get(kind, _FAINT), kind, height=12))
        parts.append(_text(x + 17, y + 11, kind, size=12))
        x += 30 + 7 * len(kind)
    return parts


def _beside(y: int, width: float, label: str) -> list[str]:
    """Return the label of a bar, drawn after the bar, or inside it where there is no room after."""
    if width > 0.75 * _WIDTH:
        return [_text(_LEFT + width - 8, y + 16, label, anchor="end", color="white")]
    return [_text(_LEFT + width + 8, y + 16, label)]


def _rect(x: float, y: float, width: float, color: str, title: str, height: int = _BAR) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0):.1f}" height="{height}" fill="{color}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _text(
    x: float, y: float, words: str, *, size: int = 13, anchor: str = "start", color: str = _INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{color}">'
        f"{escape(words)}</text>"
    )
