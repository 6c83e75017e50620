"""The display of `areal_gym.train`: on a terminal, in a notebook, or none."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from areal_gym.report.chart_table import charts_of
from areal_gym.report.charts import draw
from areal_gym.runs.live_display import make_display
from areal_gym.runs.run_display import Display
from areal_gym.utils.markup import block, escaped
from areal_gym.utils.progress import Panel, bar, in_notebook, is_terminal

_NUM_LINES = 8
_MOST_ROWS = 600
_CHARTS = ("Reward", "Loss", "KL", "Entropy", "Time of a step")


class NotebookDisplay(Display):
    """The output of a notebook cell: progress, charts and the last messages of the run.

    `show` replaces the HTML in the cell by what a function returns; it may skip updates, except
    one with `is_last`.
    """

    def __init__(self, show: Callable[..., None]) -> None:
        self._show = show
        self._lines: deque[str] = deque(maxlen=_NUM_LINES)
        self._rows: list[Mapping[str, Any]] = []
        self._phase, self._done, self._total, self._detail = "", 0, 0, ""
        self._began_s = time.monotonic()

    def say(self, text: str) -> None:
        """Show a line of text; the newest lines stay."""
        self._lines.append(text)
        self._show(self.page)

    def phase(self, name: str, total: int = 0) -> None:
        """Begin a new phase of the run."""
        self._phase, self._done, self._total, self._detail = name, 0, total, ""
        self._began_s = time.monotonic()
        self._show(self.page)

    def advance(self, done: int, detail: str = "") -> None:
        """Show that `done` units of the phase are done."""
        self._done, self._detail = done, detail
        self._show(self.page)

    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        """Add a finished training step to the charts."""
        self._rows.append(dict(metrics))
        if len(self._rows) > _MOST_ROWS:  # the charts are drawn on each update
            self._rows = self._rows[::2]
        self.advance(step)

    def close(self) -> None:
        """Show the final state."""
        self._show(self.page, is_last=True)

    def page(self) -> str:
        """Return the whole output as HTML."""
        charts = {chart.title: draw(chart) for chart in charts_of(self._rows)}
        curves = "".join(charts[title] for title in _CHARTS if title in charts)
        messages = "\n".join(self._lines)
        label = f"{self._phase} {self._detail}".strip()
        return block(
            "",
            bar(label, self._done, self._total, time.monotonic() - self._began_s),
            f"<div>{curves}</div>" if curves else "",
            f"<pre><small>{escaped(messages)}</small></pre>",
        )


@contextmanager
def shown_display(progress: bool | None) -> Iterator[Display]:
    """Yield the display that fits; a silent one for False, and for None without a screen."""
    display: Display = Display()  # shows nothing
    if progress or (progress is None and (in_notebook() or is_terminal())):
        display = NotebookDisplay(Panel().show) if in_notebook() else make_display()
    try:
        yield display
    finally:
        display.close()
