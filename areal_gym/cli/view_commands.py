"""`areal-gym view`, `areal-gym compare` and `areal-gym report`."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shlex
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from areal_gym.cli import complete
from areal_gym.cli.options import PATH, common_options, json_option
from areal_gym.cli.output import print_columns, print_data, print_json, talk
from areal_gym.errors import UsageError
from areal_gym.run_dir.run_list import no_run_hints
from areal_gym.utils.markup import counted, number

if TYPE_CHECKING:
    from areal_gym.report import Comparison
    from areal_gym.report.comparison import Row


@click.command("view")
@click.argument("runs", nargs=-1, metavar="[RUN]...", type=PATH, shell_complete=complete.runs)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=7576,
    help="Port to listen on; 0 is any free one.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    help="Address to listen on; beyond this machine, the URL has a token.",
)
@click.option(
    "--browser/--no-browser",
    default=True,
    show_default=False,
    help="Open a browser, if there is one.",
)
@click.option("--export", "file", type=PATH, help="Write one HTML file.")
@click.option(
    "--read-only", is_flag=True, help="Refuse to tag, annotate or delete runs on the page."
)
@json_option("Print the URL and the runs as JSON.")
@common_options
def view_command(
    runs: tuple[Path, ...],
    port: int,
    host: str,
    browser: bool,
    file: Path | None,
    read_only: bool,
    as_json: bool,
) -> None:
    """View runs in a browser: curves, trajectories, tokens; live while a run is training.

    RUN is a run directory or a directory of runs; the default is runs/. --export writes the
    page to one file that opens anywhere, also without a network.
    """
    from areal_gym.viewer import Catalog, export

    for path in runs:
        if not path.exists():
            raise UsageError(f"there is no run {path}", hints=no_run_hints(path))
    catalog = Catalog(runs or (Path("runs"),))
    if file is not None:
        num_bytes = export(catalog, file)
        if as_json:
            names = [run.name for run in catalog.runs()]
            print_json({"file": str(file), "bytes": num_bytes, "runs": names})
        else:
            print_data(f"{file}: {num_bytes / 1e6:.1f} MB")
        return

    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise UsageError(
            "the viewer needs starlette and uvicorn", hints=["pip install 'areal-gym[viewer]'"]
        )
    from areal_gym.utils.http_servers.addresses import http_address, is_loopback, listen
    from areal_gym.viewer.viewer_server import make_app, serve

    token = None if is_loopback(host) else secrets.token_urlsafe(16)
    app = make_app(catalog, token=token, is_read_only=read_only)
    with listen(host, port) as listener:
        query = f"?token={token}" if token else ""
        url = f"{http_address(host, listener.getsockname()[1])}/{query}"
        shown = catalog.runs()
        names = [run.name for run in shown if not run.is_evaluation]
        evaluations = catalog.evaluation_paths()
        if as_json:
            print_json({"url": url, "runs": [run.name for run in shown]})
        else:
            if len(names) == 1:
                url += f"#/run/{quote(names[0])}"
            elif not names:
                is_one = len(shown) == len(evaluations) == 1
                url += f"#/eval/{quote(shown[0].name)}" if is_one else "#/evals"
            print_data(url)
        sys.stdout.flush()  # the reader of a pipe needs it now
        parts = [counted(len(names), "run")] if names or not evaluations else []
        parts += [counted(len(evaluations), "evaluation")] if evaluations else []
        talk(f"{' and '.join(parts)}; Ctrl-C stops the viewer")
        if browser and not as_json:
            webbrowser.open(url)
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how the viewer ends
            asyncio.run(serve(app, listener))


@click.command("report")
@click.argument("run", type=PATH, shell_complete=complete.runs)
@click.option(
    "--out", type=PATH, help="The file; Markdown if it ends in .md.  [default: report.html in RUN]"
)
@json_option("Print the report as JSON, write no file.")
@common_options
def report_command(run: Path, out: Path | None, as_json: bool) -> None:
    """Write a shareable one-page report: outcome, curves, examples, settings, plugins, versions.

    RUN is the directory of a run or of areal-gym eval. Every run writes its report at the end.
    """
    from areal_gym.report import collect_any, write_report
    from areal_gym.run_dir.run_dir import RunDir

    directory = RunDir(run)
    if as_json:
        print_json(asdict(collect_any(directory)))
    else:
        for file in write_report(directory, out or directory.report_file):
            print_data(str(file))


@click.command("compare")
@click.argument(
    "runs", nargs=-1, metavar="RUN RUN [RUN]...", type=PATH, shell_complete=complete.runs
)
@json_option()
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
        raise UsageError("compare needs two runs or more", hints=["all runs: areal-gym list runs"])
    comparison = compare(runs)
    if as_json:
        print_json(comparison.to_dict())
        return
    print_columns(_table(comparison))
    for remark in comparison.remarks:
        talk(f"note: {remark}")
    talk("beyond noise: the 95% interval of the difference excludes 0; without seed variation")
    talk(f"view them:  areal-gym view {shlex.join(map(str, runs))}")


def _table(comparison: Comparison) -> list[list[str]]:
    runs = comparison.runs
    verdicts = ["against the first"] * (len(runs) - 1)
    states = [
        "an evaluation" if run["step"] is None else f"{run['status']}, step {run['step']}"
        for run in runs
    ]
    table = [
        ["", *_columns([run["name"] for run in runs], verdicts)],
        ["environment", *_columns([run["env"] for run in runs])],
        ["state", *_columns(states)],
    ]
    settings = [
        ["  " + key, *_columns(["–" if value is None else str(value) for value in values])]
        for key, values in comparison.settings.items()
    ]
    first, last = comparison.steps or (0, 0)
    blank = [""] * len(table[0])
    for heading, rows in (
        ("settings that differ", settings),
        ("held out", [_cells(row) for row in comparison.heldout]),
        (f"mean of steps {first} to {last}", [_cells(row) for row in comparison.training]),
        ("in total", [_cells(row) for row in comparison.cost]),
    ):
        if rows:
            table += [blank, [heading, *blank[1:]], *rows]
    return table


def _cells(row: Row) -> list[str]:
    values = []
    for index, value in enumerate(row.values):
        text = number(value)
        if (bounds := row.intervals[index]) is not None:
            text += f" ±{(bounds[1] - bounds[0]) / 2:.2g}"
        if row.notes and row.notes[index]:
            text += f" ({row.notes[index]})"
        values.append(text)
    verdicts = []
    for verdict, difference in zip(row.verdicts, row.differences, strict=True):
        text = verdict or ""
        if verdict not in (None, "within noise") and difference is not None:
            text += f" by {number(abs(difference[0] + difference[1]) / 2)}"
        verdicts.append(text)
    return ["  " + row.label, *_columns(values, verdicts[1:])]


def _columns(values: Sequence[str], verdicts: Sequence[str] = ()) -> list[str]:
    """Return one column for the first run and two for each other: value and verdict."""
    cells = [values[0]]
    for index, value in enumerate(values[1:]):
        cells += [value, verdicts[index] if verdicts else ""]
    return cells
