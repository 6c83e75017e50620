"""Draws docs/asynchrony.svg: the same work, synchronous and with rollouts that run ahead.

    python docs/asynchrony_picture.py > docs/asynchrony.svg

A small simulation with the runner's rules: at most (max_staleness + version + 1) * batch episodes
are started, less those that are accepted or running; batches are taken in the order of starts;
episodes in flight go on under new weights.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise

SLOTS, BATCH, STEPS = 6, 6, 4
TRAIN_S, PUBLISH_S = 6.0, 0.4
SCALE, ROW, LEFT, WIDTH = 14.0, 17, 128, 1060
VERSIONS = ("#4c78a8", "#f2a541", "#58a55c", "#b279a2", "#e45756")
INK, FAINT, IDLE = "#24292f", "#8a929c", "#eef0f3"


@dataclass
class Episode:
    """One bar: which slot played it, and when."""

    slot: int
    start: float
    end: float


@dataclass
class Timeline:
    """What happened when; times in seconds."""

    episodes: list[Episode] = field(default_factory=list)
    trainings: list[tuple[float, float, int]] = field(default_factory=list)
    """Start, end, and how many versions the oldest token lagged behind."""
    publications: list[float] = field(default_factory=list)
    """When version 1, 2, ... began to sample."""

    def version_at(self, time: float) -> int:
        """The weights that sample then."""
        return sum(begun <= time for begun in self.publications)


def simulate(max_staleness: int, lengths: list[float]) -> Timeline:
    """Play and train until all steps are taken; episodes take `lengths`, in the order of starts."""
    line = Timeline()
    free = list(range(SLOTS))
    running: list[tuple[float, int, Episode]] = []
    now, version, trained_until = 0.0, 0, 0.0
    taken = 0  # episodes that were trained on, in the order of their starts
    while version < STEPS:
        may_start = (max_staleness + version + 1) * BATCH - len(line.episodes)
        while free and may_start > 0:
            slot = free.pop(0)
            episode = Episode(slot, now, now + lengths[len(line.episodes)])
            line.episodes.append(episode)
            heapq.heappush(running, (episode.end, len(line.episodes), episode))
            may_start -= 1
        batch = line.episodes[taken : taken + BATCH]
        is_ready = len(batch) == BATCH and all(episode.end <= now for episode in batch)
        if is_ready and trained_until <= now:
            lag = version - min(line.version_at(episode.start) for episode in batch)
            line.trainings.append((now, now + TRAIN_S, lag))
            trained_until = now + TRAIN_S + PUBLISH_S
            taken += BATCH
        events = [end for end, _, _ in running[:1]]
        if trained_until > now:
            events.append(trained_until)
        now = min(events)
        if now == trained_until:
            version += 1
            line.publications.append(now)
        while running and running[0][0] <= now:
            free.append(heapq.heappop(running)[2].slot)
            free.sort()
    return line


def text(x: float, y: float, words: str, *, size: int = 12, fill: str = INK, **more: str) -> str:
    """An SVG element; underscores of further attributes are hyphens."""
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}"{extra}>'
        f"{escape(words)}</text>"
    )


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    """An SVG element."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'
    )


def draw(line: Timeline, top: float, title: str, remark: str, end: float) -> list[str]:
    """The elements of one timeline, below `top`."""
    height = SLOTS * ROW
    parts = [text(16, top, title, size=15, font_weight="600"), text(16, top + 19, remark)]
    top += 32
    for slot in range(SLOTS):
        y = top + slot * ROW
        parts.append(text(LEFT - 10, y + 11, f"slot {slot + 1}", fill=FAINT, text_anchor="end"))
        parts.append(box(LEFT, y + 1, end * SCALE, ROW - 4, IDLE))
    for episode in line.episodes:
        last = min(episode.end, end)
        cuts = {episode.start, *line.publications, last}
        marks = sorted(time for time in cuts if episode.start <= time <= last)
        y = top + episode.slot * ROW + 1
        for begin, stop in pairwise(marks):
            fill = VERSIONS[line.version_at(begin)]
            parts.append(box(LEFT + begin * SCALE, y, (stop - begin) * SCALE, ROW - 4, fill))
        parts.append(box(LEFT + last * SCALE - 1.5, y, 1.5, ROW - 4, "#ffffff"))
    y = top + height + 6
    parts.append(text(LEFT - 10, y + 14, "trainer", text_anchor="end", font_weight="600"))
    parts.append(box(LEFT, y, end * SCALE, 20, IDLE))
    for step, (begin, stop, lag) in enumerate(line.trainings, 1):
        parts.append(box(LEFT + begin * SCALE, y, (stop - begin) * SCALE, 20, "#3b424c"))
        said = f"step {step}" + (f", {lag} old" if lag else "")
        middle = LEFT + (begin + stop) / 2 * SCALE
        parts.append(text(middle, y + 14, said, size=11, fill="#ffffff", text_anchor="middle"))
    for version, time in enumerate(line.publications, 1):
        x = LEFT + time * SCALE
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 3}" y2="{y + 27}" stroke="{INK}" '
            f'stroke-dasharray="3 3"/>'
        )
        parts.append(text(x, y + 40, f"version {version}", size=11, text_anchor="middle"))
    return parts


def main() -> None:
    """Print the picture."""
    rng = random.Random(7)
    lengths = [round(min(14.0, 2 + rng.expovariate(0.28)), 1) for _ in range(STEPS * BATCH * 3)]
    lines = {staleness: simulate(staleness, lengths) for staleness in (0, 1)}
    end = max(line.publications[-1] for line in lines.values()) + 1
    parts = draw(
        lines[0],
        34,
        "Synchronous: rollout.max_staleness=0",
        f"Slots wait for the slowest episode and for the trainer; {STEPS} steps take "
        f"{lines[0].publications[-1]:.0f} s.",
        end,
    )
    parts += draw(
        lines[1],
        268,
        "Ahead by one version: rollout.max_staleness=1",
        f"Slots are given the next task at once; {STEPS} steps take "
        f"{lines[1].publications[-1]:.0f} s. An episode that meets new weights goes on under "
        "them: its bar changes colour.",
        end,
    )
    y = 492
    parts.append(text(16, y, "sampled under"))
    for version in range(STEPS):
        x = LEFT + version * 105
        parts.append(box(x, y - 11, 14, 13, VERSIONS[version]))
        parts.append(text(x + 20, y, f"version {version}"))
    parts.append(box(LEFT + 440, y - 11, 14, 13, IDLE))
    parts.append(text(LEFT + 460, y, "nothing to do"))
    style = "font-family: system-ui, 'DejaVu Sans', sans-serif"
    print(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 512" role="img" '
        f'aria-label="Timelines of six rollout slots and the trainer, synchronous and ahead by '
        f'one version" style="{style}">'
    )
    print(f'<rect width="{WIDTH}" height="512" rx="6" fill="#ffffff"/>')
    print("\n".join(parts))
    print("</svg>")


if __name__ == "__main__":
    main()
