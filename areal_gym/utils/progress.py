"""Progress bars on terminals and in notebooks; nothing is shown elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from areal_gym.utils.markup import block, escaped

_PAUSE_S = 0.25  # the time between two updates of a panel, which browsers have to draw


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell: Any = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def is_terminal() -> bool:
    """Return whether stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


class Panel:
    """An output area in a notebook that is updated in place."""

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._handle = display(HTML(""), display_id=True)
        self._next_s = 0.0

    def show(self, html: Callable[[], str], *, is_last: bool = False) -> None:
        """Show what `html` returns, unless the panel was updated a moment ago."""
        now_s = time.monotonic()
        if is_last or now_s >= self._next_s:
            self._next_s = now_s + _PAUSE_S
            self._handle.update(self._html(html()))


@contextmanager
def progress_bar(
    label: str, total: int, shown: bool | None = None
) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar inside this context; by default on terminals and in notebooks only.

    Yields a function to call, from any thread, with (units done, total units).
    """
    if shown is False or not (shown or in_notebook() or is_terminal()):
        yield lambda done, total: None
    elif in_notebook():
        panel, start_s, state = Panel(), time.monotonic(), (0, total)

        def advance(done: int, total: int) -> None:
            nonlocal state
            state = done, total
            panel.show(look)

        def look() -> str:
            return block("", bar(label, *state, time.monotonic() - start_s))

        try:
            panel.show(look)
            yield advance
        finally:
            panel.show(look, is_last=True)
    else:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed
        from rich.progress import TimeRemainingColumn as Remaining

        columns = (TextColumn("{task.description}", markup=False), BarColumn())
        numbers = (MofNCompleteColumn(), Elapsed(), TextColumn("eta"), Remaining())
        console = Console(stderr=True)
        # If lines cannot be erased from the output, only the final state is written.
        with Progress(*columns, *numbers, console=console, transient=console.is_terminal) as rows:
            row = rows.add_task(label, total=total)
            yield lambda done, total: rows.update(row, completed=done, total=total)


def bar(label: str, done: int, total: int, elapsed_s: float) -> str:
    """Return a progress bar in HTML; a `total` of 0 means that it is unknown."""
    eta = f", eta {elapsed_s / done * (total - done):.0f} s" if 0 < done < total else ""
    size = f'value="{done}" max="{total}"' if total else ""
    return (
        f'<div><progress {size} style="width: 260px"></progress> {escaped(label)} '
        f"<small>{done:,}{f'/{total:,}' if total else ''}, {elapsed_s:.0f} s{eta}</small></div>"
    )
