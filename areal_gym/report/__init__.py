"""A shareable one-page report about a run or an evaluation."""

from __future__ import annotations

from pathlib import Path

from areal_gym.report.comparison import Comparison, compare
from areal_gym.report.content import Report, collect
from areal_gym.report.evaluation_content import collect_evaluation
from areal_gym.report.html import as_html
from areal_gym.report.markdown import as_markdown, sheet
from areal_gym.run_dir.evaluations import EVALUATION_FILE, Evaluation
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.utils.files import write_atomic

__all__ = [
    "Comparison",
    "Report",
    "collect",
    "collect_any",
    "compare",
    "keep_report",
    "write_report",
]


def write_report(run: RunDir, file: Path) -> list[Path]:
    """Write the page, in Markdown when `file` ends in .md and in HTML otherwise; return the files.

    Markdown has its curves in a picture beside it. Raises UsageError if there is neither a run nor
    an evaluation.
    """
    report = collect_any(run)
    if file.suffix != ".md":
        write_atomic(file, as_html(report))
        return [file]
    picture = file.with_suffix(".svg")
    write_atomic(picture, sheet(report))
    write_atomic(file, as_markdown(report, picture.name))
    return [file, picture]


def collect_any(directory: RunDir) -> Report:
    """Read the content of a report about a run or an evaluation; raise UsageError for neither."""
    if (directory.path / EVALUATION_FILE).is_file():
        return collect_evaluation(Evaluation.open(directory.path))
    return collect(directory)


def keep_report(run: RunDir) -> Path | str:
    """Write `report.html` into the run directory; return its path, or why there is none.

    A run that has trained for days does not fail because of a report.
    """
    try:
        return write_report(run, run.report_file)[0]
    except Exception as error:
        problem = f"none: {type(error).__name__}: {error}"
        run.append_log(f"report: {problem}")
        return problem
