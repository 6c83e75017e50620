"""`areal-gym data`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from areal_gym.cli.output import Options, common_options, print_data, talk
from areal_gym.errors import UsageError, did_you_mean

__all__ = ["data_command"]

SOURCES = ("tau2",)


@click.group("data")
def data_command() -> None:
    """Data that environments use and that areal-gym does not contain."""


@data_command.command("pull")
@click.argument("source", metavar="tau2")
@click.option("--to", type=click.Path(path_type=Path), help="The folder [the user's cache].")
@click.option("--base-url", help="Of the server [the one where the benchmark is published].")
@click.option("--force", is_flag=True, help="Fetch everything anew.")
@common_options
@click.pass_obj
def pull_command(
    options: Options, source: str, to: Path | None, base_url: str | None, force: bool
) -> None:
    """Fetch the data of a benchmark: a pinned version, checked sums; it can be continued.

    Prints the folder, which environments find by themselves if it is the default one.
    """
    if source not in SOURCES:
        near = did_you_mean(source, SOURCES) or f"there is: {', '.join(SOURCES)}"
        raise UsageError(f"no data {source!r} to fetch", hints=[near])
    from areal_gym.envs.tau2.data import manifest
    from areal_gym.envs.tau2.pull import BASE_URL, pull

    facts = manifest()
    talk(f"{facts['repository']} at {facts['commit'][:12]} ({facts['licence']})")
    url = base_url or BASE_URL
    if options.is_plain or not sys.stderr.isatty():
        folder = pull(to, base_url=url, force=force)
    else:
        folder = _pull_with_bar(to, url, force=force)
    print_data(str(folder))
    if to is not None:
        talk(f"tell environments: export TAU2_DATA_DIR={folder}")


def _pull_with_bar(to: Path | None, url: str, *, force: bool) -> Path:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from areal_gym.envs.tau2.pull import pull

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("")
        return pull(
            to,
            base_url=url,
            force=force,
            on_progress=lambda path, here, total: bar.update(
                task, description=path.rpartition("/")[2], completed=here, total=total
            ),
        )
