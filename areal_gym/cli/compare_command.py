"""`areal-gym compare`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_gym.cli import complete
from areal_gym.cli.output import common_options, print_columns, print_json, talk
from areal_gym.errors import UsageError
from areal_gym.utils.markup import number

if TYPE_CHECKING:
    from areal_gym.report import Comparison
    from areal_gym.report.comparison import Row


@click.command("compare")
@click.argument(
    "runs",
    nargs=-1,
    metavar="RUN RUN [RUN]...",
    type=click.Path(path_type=Path),
    shell_complete=complete.runs,
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@common_options
def compare_command(runs: tuple[Path, ...], as_json: bool) -> None:
    """Compare runs: settings that differ, results, and which differences are beyond noise.

    Each RUN (the directory of a run or of areal-gym eval) is compared with the first. A difference
    is beyond noise if its 95% interval excludes 0: for held-out accuracy, over the tasks that both
    have played, task by task; for other numbers, over the last ten common steps (Welch's t).
    The intervals do not include the variation between seeds.
    """
    from areal_gym.report import compare

    if len(runs) < 2:
        raise UsageError(
            "compare needs two runs or more",
            hints=["all runs: areal-gym list runs"],
        )
    comparison = compare(runs)
    if as_json:
        print_json(comparison.to_dict())
        return
    _print(comparison)
    for remark in comparison.remarks:
        talk(f"note: {remark}")
    talk("beyond noise: the 95% interval of the difference excludes 0; without seed variation")
    talk(f"view them:  areal-gym view {shlex.join(map(str, runs))}")


def _print(comparison: Comparison) -> None:
    runs = comparison.runs
    table = [
        ["", *_spread(["", *("against the first" for _ in runs[1:])], _names(comparison))],
        ["environment", *_spread([], [run["env"] for run in runs])],
        ["state", *_spread([], [_state(run) for run in runs])],
    ]
    blank = [""] * len(table[0])
    settings = [
        ["  " + key, *_spread([], [_setting(value) for value in values])]
        for key, values in comparison.settings.items()
    ]
    first, last = comparison.steps or (0, 0)
    for heading, rows in (
        ("settings that differ", settings),
        ("held out", [_cells(row) for row in comparison.heldout]),
        (f"mean of steps {first} to {last}", [_cells(row) for row in comparison.training]),
        ("in total", [_cells(row) for row in comparison.cost]),
    ):
        if rows:
            table += [blank, [heading, *blank[1:]], *rows]
    print_columns(table)


def _state(run: Mapping[str, Any]) -> str:
    if run["step"] is None:
        return "an evaluation"
    return f"{run['status']}, step {run['step']}"


def _names(comparison: Comparison) -> list[str]:
    return [run["name"] for run in comparison.runs]


def _cells(row: Row) -> list[str]:
    values = []
    for place, value in enumerate(row.values):
        text = number(value)
        if (bounds := row.intervals[place]) is not None:
            text += f" ±{(bounds[1] - bounds[0]) / 2:.2g}"
        if row.notes and row.notes[place]:
            text += f" ({row.notes[place]})"
        values.append(text)
    verdicts = []
    for verdict, difference in zip(row.verdicts, row.differences, strict=True):
        text = verdict or ""
        if verdict not in (None, "within noise") and difference is not None:
            text += f" by {number(abs(difference[0] + difference[1]) / 2)}"
        verdicts.append(text)
    return ["  " + row.label, *_spread(verdicts, values)]


def _spread(verdicts: Sequence[str], values: Sequence[str]) -> list[str]:
    """Return one column for the first run and two for the others: value and comparison."""
    cells = [values[0]]
    for place, value in enumerate(values[1:], 1):
        cells += [value, verdicts[place] if verdicts else ""]
    return cells


def _setting(value: object) -> str:
    return "–" if value is None else str(value)
