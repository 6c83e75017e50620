"""`areal-gym report`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from areal_gym.cli import complete
from areal_gym.cli.output import common_options, print_data, print_json


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path), shell_complete=complete.runs)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The file; Markdown if it ends in .md.  [default: report.html in RUN]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, write no file.")
@common_options
def report_command(run: Path, out: Path | None, as_json: bool) -> None:
    """Write a shareable one-page report: outcome, curves, examples, settings, plugins, versions.

    Every run writes its report at the end.
    """
    from areal_gym.report import collect, write_report
    from areal_gym.run_dir.run_dir import RunDir

    directory = RunDir(run)
    if as_json:
        print_json(asdict(collect(directory)))
        return
    for file in write_report(directory, out or directory.report_file):
        print_data(str(file))
