"""A run on one page, for people who have neither the run directory nor areal-gym."""

from __future__ import annotations

from pathlib import Path

from areal_gym.report.charts import draw
from areal_gym.report.comparison import Comparison, compare
from areal_gym.report.content import Report, collect
from areal_gym.report.html import as_html
from areal_gym.report.markdown import as_markdown, sheet
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.utils.files import write_atomic
from areal_gym.utils.markup import block, escaped, pairs, short

__all__ = [
    "Comparison",
    "Report",
    "collect",
    "compare",
    "keep_report",
    "summary_html",
    "write_report",
]

_SHOWN_CHARTS = 4


def write_report(run: RunDir, file: Path) -> list[Path]:
    """Write the page, in Markdown when `file` ends in .md and in HTML otherwise.

    Returns:
        The files that were written: Markdown has its curves in a picture beside it.

    Raises:
        NothingToDoError: there is no run.
    """
    report = collect(run)
    if file.suffix != ".md":
        write_atomic(file, as_html(report))
        return [file]
    picture = file.with_suffix(".svg")
    write_atomic(picture, sheet(report))
    write_atomic(file, as_markdown(report, picture.name))
    return [file, picture]


def summary_html(run: RunDir) -> str:
    """The run in a notebook: its outcome and its curves."""
    title = f"Run {short(run.path, 200)}"
    if not run.config_file.is_file():
        return block(title, "<div>nothing is in it yet</div>")
    report = collect(run)
    charts = "".join(map(draw, report.charts[:_SHOWN_CHARTS]))
    return block(
        title, f"<div>{escaped(report.lead)}</div>", pairs(report.facts), f"<div>{charts}</div>"
    )


def keep_report(run: RunDir) -> Path | str:
    """Write `report.html` into the run directory.

    Returns:
        Where it is, or why it is not: a run that has trained for days does not fail for want of a
        page about it.
    """
    try:
        return write_report(run, run.report_file)[0]
    except Exception as error:
        problem = f"none: {type(error).__name__}: {error}"
        run.append_log(f"report: {problem}")
        return problem
