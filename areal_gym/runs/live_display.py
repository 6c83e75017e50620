"""The display of a running run: a live panel on a terminal, otherwise plain lines.

All of it goes to stderr; stdout is for data.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_gym.runs.incidents import describe_incidents
from areal_gym.runs.run_display import Display
from areal_gym.types import readable
from areal_gym.utils.markup import counted, visible

_BARS = "▁▂▃▄▅▆▇█"
_MOST_MESSAGES, _MOST_CHARACTERS = 5, 400

Examples = Callable[[int], Sequence[tuple[str, Mapping[str, Any]]]]
"""Returns example trajectories of a step, each labelled "best" or "worst"."""

_RECENT = 10
"""The number of steps behind the trend and the remaining time."""


def make_display(
    *, is_plain: bool = False, stream: TextIO | None = None, examples: Examples | None = None
) -> PlainDisplay:
    """Make a live panel if `stream` (by default stderr) is a capable terminal, else plain lines.

    `examples` returns trajectories to show below the panel after each step.
    """
    stream = stream or sys.stderr
    console = Console(file=stream)
    if is_plain or not console.is_terminal or console.is_dumb_terminal:
        return PlainDisplay(stream)
    return LiveDisplay(console, examples)


def sparkline(values: list[float], width: int = 40) -> str:
    """Return values as a row of bars, the newest last; the scale includes 0 to 1."""
    shown = values[-width:]
    if not shown:
        return ""
    low, high = min(0.0, *shown), max(1.0, *shown)
    return "".join(_BARS[round((v - low) / (high - low) * (len(_BARS) - 1))] for v in shown)


class PlainDisplay(Display):
    """Shows one line per event, for logs, pipes and CI."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._phase, self._total, self._done, self._detail = "", 0, 0, ""
        self._began_s = self._next_report_s = 0.0
        self._stepped_s = time.monotonic()
        self._step_s: deque[float] = deque(maxlen=_RECENT)

    def say(self, text: str) -> None:
        """Show a line of text."""
        print(text, file=self._stream, flush=True)

    def phase(self, name: str, total: int = 0) -> None:
        """Begin a new phase of the run with `total` units, or 0 if that is unknown."""
        self._phase, self._total, self._done, self._detail = name, total, 0, ""
        self._began_s = self._stepped_s = time.monotonic()
        self._next_report_s = self._began_s + 5.0

    def advance(self, done: int, detail: str = "") -> None:
        """Show that `done` units of the phase are done."""
        now_s = time.monotonic()
        if now_s >= self._next_report_s or done >= self._total:
            self._next_report_s = now_s + 5.0
            self.say(f"{self._phase}: {done}/{self._total or '?'} {detail}".rstrip())

    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        """Show a finished training step."""
        self._note_time(metrics)
        self.say(step_line(step, total, metrics, self._left_s(step, total)))

    def _note_time(self, metrics: Mapping[str, Any]) -> None:
        now_s = time.monotonic()
        # Steps of a replay do not record their time.
        self._step_s.append(float(metrics.get("time/step_s", now_s - self._stepped_s)))
        self._stepped_s = now_s

    def _left_s(self, step: int, total: int) -> float:
        return sum(self._step_s) / max(1, len(self._step_s)) * (total - step)


class LiveDisplay(PlainDisplay):
    """A panel that refreshes in place: phase, progress, reward trend, what episodes wait for."""

    def __init__(self, console: Console, examples: Examples | None = None) -> None:
        super().__init__(console.file)  # type: ignore[arg-type]  # rich types it as IO[str]
        self._console = console
        self._examples = examples
        self._trend: list[float] = []
        self._last: Mapping[str, Any] = {}
        self._stats: Callable[[], str] | None = None
        self._live = Live(
            console=console,
            get_renderable=self._panel,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def say(self, text: str) -> None:
        """Show a line of text above the panel."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self, done: int, detail: str = "") -> None:
        """Show that `done` units of the phase are done."""
        self._done, self._detail = done, detail

    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        """Show a finished step in the panel; every tenth, and those with incidents, as a line."""
        self._last = dict(metrics)
        self._trend.append(_progress(metrics)[1])
        self._note_time(metrics)
        self.advance(step)
        if step % 10 == 0 or step == total or describe_incidents(metrics):
            self.say(step_line(step, total, metrics, self._left_s(step, total)))
        if self._examples is not None:
            for kind, trajectory in self._examples(step):
                for line in example_lines(kind, step, trajectory):
                    self._console.print(line, no_wrap=True, overflow="ellipsis")

    def watch(self, stats: Callable[[], str] | None) -> None:
        """Show at each refresh what episodes wait for."""
        self._stats = stats

    def close(self) -> None:
        """Remove the panel from the screen."""
        self._live.stop()

    def _panel(self) -> Panel:
        elapsed_s = time.monotonic() - self._began_s
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(self._phase, style="bold"),
            ProgressBar(total=self._total or None, completed=self._done, width=24),
            Text(f"{self._done}/{self._total}" if self._total else ""),
            Text(duration(elapsed_s), style="dim", no_wrap=True),
            Text(self._eta(elapsed_s), style="dim", no_wrap=True),
        )
        lines = [Text(self._detail)]
        if self._trend:
            lines.append(self._progress_so_far())
            lines += [Text(_learning(self._last), style="dim"), Text(_times(self._last), "dim")]
            if incidents := describe_incidents(self._last):
                lines.append(Text(f"! {incidents}", style="yellow"))
        if self._stats is not None:
            lines.append(Text(self._stats(), style="cyan"))
        rows = Group(bar, *filter(None, lines))
        return Panel(rows, border_style="dim", title="areal-gym", title_align="left")

    def _progress_so_far(self) -> Text:
        name, value = _progress(self._last)
        text = Text.assemble(f"{name} ", (sparkline(self._trend), "green"), f" {value:.3f}")
        if len(self._trend) > 1:
            before = self._trend[-_RECENT - 1 :]
            since = counted(len(before) - 1, "step")
            text.append(f"  {value - before[0]:+.3f} in {since}", "dim")
        return text

    def _eta(self, elapsed_s: float) -> str:
        if not self._total or not self._done:
            return ""
        left_s = elapsed_s / self._done * (self._total - self._done)
        return f"eta {duration(self._left_s(self._done, self._total) if self._step_s else left_s)}"


def duration(seconds: float) -> str:
    """Format a duration: 12 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def example_lines(kind: str, step: int, row: Mapping[str, Any]) -> list[Text]:
    """Return a trajectory in a few lines, each of which the terminal cuts at its width.

    Text from policies and environments is escaped, so that it cannot control the terminal.
    """
    parts: dict[str, float] = {}
    for turn in row["turns"]:
        for name, value in (turn.get("reward_parts") or {}).items():
            parts[name] = parts.get(name, 0.0) + value
    shown = "".join(f", {_one_line(name)} {value:.2f}" for name, value in parts.items())
    turns, task = counted(len(row["turns"]), "turn"), _one_line(row["task"]["id"])
    facts = (
        f"step {step}, {kind}: reward {row['reward']:.2f}{shown}; {turns}, {row['stop_reason']}; "
        f"{task}"
    )
    messages = [m for m in row["messages"] if m["role"] != "system"]
    skipped = len(messages) - _MOST_MESSAGES
    if skipped > 0:
        messages = [messages[0], *messages[1 - _MOST_MESSAGES :]]
    lines = []
    for message in messages:
        style = {"assistant": "", "user": "cyan"}.get(message["role"], "yellow")
        lines.append(Text.assemble((f"  {message['role']}: ", "dim"), (_shortened(message), style)))
    if skipped > 0:
        lines.insert(1, Text(f"  ... {skipped} messages ...", style="dim"))
    return [Text(facts, style="bold green" if kind == "best" else "bold red"), *lines]


def _shortened(message: Mapping[str, Any]) -> str:
    # The end of a long answer is shown, because it has the result.
    text = _one_line(readable(message.get("content") or ""))
    if message["role"] == "assistant" and len(text) > _MOST_CHARACTERS:
        text = "..." + text[-_MOST_CHARACTERS:]
    for call in message.get("tool_calls") or ():
        function = call["function"]
        text += f" {function['name']}({json.dumps(function['arguments'], ensure_ascii=False)})"
    return _one_line(text)[:_MOST_CHARACTERS]


def _one_line(text: str) -> str:
    return visible(" ".join(text.split()))


def step_line(step: int, total: int, metrics: Mapping[str, Any], eta_s: float) -> str:
    """Return a training step as one line."""
    name, value = _progress(metrics)
    numbers = "  ".join(filter(None, (_learning(metrics), _times(metrics))))
    incidents = describe_incidents(metrics)
    return (
        f"step {step:>{len(str(total))}}/{total}  {name} {value:.3f}  {numbers}  "
        f"eta {duration(eta_s)}" + (f"  ! {incidents}" if incidents else "")
    )


def _progress(metrics: Mapping[str, Any]) -> tuple[str, float]:
    name = "accuracy" if "reward/mean" not in metrics else "reward"
    return name, metrics.get("reward/mean", metrics.get("train/accuracy", 0.0))


def _learning(metrics: Mapping[str, Any]) -> str:
    return _shown(
        metrics,
        *([] if "reward/mean" in metrics else [("loss", "train/loss", "{:.4f}")]),
        ("margin", "train/margin", "{:z.3f}"),
        ("kl to teacher", "train/kl_teacher", "{:z.4f}"),
        ("grad", "train/grad_norm", "{:.2f}"),
        ("clip", "train/clip_fraction", "{:.1%}"),
        ("entropy", "train/entropy", "{:.2f}"),
        ("kl", "train/approx_kl", "{:z.4f}"),
        ("stale", "rollout/staleness_mean", "{:.1f}"),
    )


def _times(metrics: Mapping[str, Any]) -> str:
    text = _shown(
        metrics,
        ("wait", "time/wait_s", "{:.2f}s"),
        ("train", "time/train_s", "{:.2f}s"),
        ("tok/s", "rollout/tokens_per_s", "{:.0f}"),
        ("overlap", "time/overlap_efficiency", "{:.0%}"),
    )
    if "limited_by" in metrics:
        text += f"  limited by {metrics['limited_by']}"
    return text


def _shown(metrics: Mapping[str, Any], *forms: tuple[str, str, str]) -> str:
    return "  ".join(
        f"{label} {form.format(metrics[key])}"
        for label, key, form in forms
        if metrics.get(key) is not None
    )
