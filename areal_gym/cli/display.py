"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere.

Everything here goes to stderr; stdout is for data.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

__all__ = ["LiveDisplay", "PlainDisplay", "make_display", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"


def make_display(*, is_plain: bool = False, stream: TextIO | None = None) -> PlainDisplay:
    """The live panel when stderr is a terminal that can show it, else plain lines."""
    stream = stream or sys.stderr
    console = Console(file=stream)
    if is_plain or not console.is_terminal or console.is_dumb_terminal:
        return PlainDisplay(stream)
    return LiveDisplay(console)


def sparkline(values: list[float], width: int = 40) -> str:
    """Values between 0 and 1 (others are scaled) as a row of bars, the newest at the right."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(0.0, *shown), max(1.0, *shown)
    return "".join(_BARS[round((v - low) / (high - low) * (len(_BARS) - 1))] for v in shown)


class PlainDisplay:
    """One line per event: for logs, pipes and CI."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._phase = ""
        self._total = 0
        self._began_s = 0.0
        self._next_report_s = 0.0

    def say(self, text: str) -> None:
        """A line of talk."""
        print(text, file=self._stream, flush=True)

    def phase(self, name: str, total: int = 0) -> None:
        """A new part of the run begins; `total` is its number of units, 0 if unknown."""
        self._phase, self._total = name, total
        self._began_s = time.monotonic()
        self._next_report_s = self._began_s + 5.0

    def advance(self, done: int, detail: str = "") -> None:
        """`done` units of the phase are ready."""
        now_s = time.monotonic()
        if now_s < self._next_report_s and done < self._total:
            return
        self._next_report_s = now_s + 5.0
        self.say(f"{self._phase}: {done}/{self._total or '?'} {detail}".rstrip())

    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        """A training step ended."""
        self.say(step_line(step, total, metrics, _eta_s(step, total, metrics)))

    def watch(self, stats: Callable[[], str] | None) -> None:
        """Where episodes wait, asked for while the display refreshes; None to stop asking."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class LiveDisplay(PlainDisplay):
    """A panel that refreshes in place: phase, progress, reward trend, what episodes wait for."""

    def __init__(self, console: Console) -> None:
        super().__init__(console.file)  # type: ignore[arg-type]  # rich types it as IO[str]
        self._console = console
        self._done = 0
        self._detail = ""
        self._trend: list[float] = []
        self._last: Mapping[str, Any] = {}
        self._step = self._num_steps = 0
        self._stats: Callable[[], str] | None = None
        self._live = Live(
            console=console,
            get_renderable=self._panel,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def say(self, text: str) -> None:
        """A line of talk, above the panel."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def phase(self, name: str, total: int = 0) -> None:
        """A new part of the run begins."""
        super().phase(name, total)
        self._done, self._detail = 0, ""

    def advance(self, done: int, detail: str = "") -> None:
        """`done` units of the phase are ready."""
        self._done, self._detail = done, detail

    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        """A training step ended: the panel shows it; every tenth also stays on the screen."""
        self._step, self._num_steps, self._last = step, total, dict(metrics)
        self._trend.append(_progress(metrics)[1])
        self.advance(step)
        if step % 10 == 0 or step == total:
            self.say(step_line(step, total, metrics, _eta_s(step, total, metrics)))

    def watch(self, stats: Callable[[], str] | None) -> None:
        """Where episodes wait, asked for at each refresh."""
        self._stats = stats

    def close(self) -> None:
        """Take the panel off the screen."""
        self._live.stop()

    def _panel(self) -> Panel:
        elapsed_s = time.monotonic() - self._began_s
        rows: list[Table | Text] = []
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(self._phase, style="bold"),
            ProgressBar(total=self._total or None, completed=self._done, width=32),
            Text(f"{self._done}/{self._total}" if self._total else ""),
            Text(f"{elapsed_s:.0f} s", style="dim"),
            Text(self._eta(elapsed_s), style="dim"),
            Text(self._detail),
        )
        rows.append(bar)
        if self._trend:
            name, value = _progress(self._last)
            rows.append(
                Text.assemble(f"{name} ", (sparkline(self._trend), "green"), f" {value:.2f}")
            )
        if self._last:
            rows.append(Text(_numbers(self._last), style="dim"))
        if self._stats is not None:
            rows.append(Text(self._stats(), style="cyan"))
        return Panel(Group(*rows), border_style="dim", title="areal-gym", title_align="left")

    def _eta(self, elapsed_s: float) -> str:
        if not self._total or not self._done:
            return ""
        return f"eta {elapsed_s / self._done * (self._total - self._done):.0f} s"


def step_line(step: int, total: int, metrics: Mapping[str, Any], eta_s: float) -> str:
    """One training step on one line."""
    name, value = _progress(metrics)
    return (
        f"step {step:>{len(str(total))}}/{total}  {name} {value:.3f}  {_numbers(metrics)}  "
        f"eta {eta_s:.0f} s"
    )


def _progress(metrics: Mapping[str, Any]) -> tuple[str, float]:
    """The number by which a person sees whether it learns."""
    name = "accuracy" if "reward/mean" not in metrics else "reward"
    return name, metrics.get("reward/mean", metrics.get("train/accuracy", 0.0))


def _numbers(metrics: Mapping[str, Any]) -> str:
    shown = [
        *([] if "reward/mean" in metrics else [("loss", "train/loss", "{:.4f}")]),
        ("margin", "train/margin", "{:.3f}"),
        ("kl to teacher", "train/kl_teacher", "{:.4f}"),
        ("grad", "train/grad_norm", "{:.2f}"),
        ("clip", "train/clip_fraction", "{:.1%}"),
        ("entropy", "train/entropy", "{:.2f}"),
        ("kl", "train/approx_kl", "{:.4f}"),
        ("stale", "rollout/staleness_mean", "{:.1f}"),
        ("wait", "time/wait_s", "{:.2f}s"),
        ("train", "time/train_s", "{:.2f}s"),
        ("tok/s", "rollout/tokens_per_s", "{:.0f}"),
        ("overlap", "time/overlap_efficiency", "{:.0%}"),
    ]
    numbers = [
        f"{label} {form.format(metrics[key])}" for label, key, form in shown if key in metrics
    ]
    if "limited_by" in metrics:
        numbers.append(f"limited by {metrics['limited_by']}")
    return "  ".join(numbers)


def _eta_s(step: int, total: int, metrics: Mapping[str, Any]) -> float:
    return float(metrics.get("time/step_s", 0.0)) * (total - step)
