"""`areal-gym data`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_gym.cli import complete
from areal_gym.cli.options import (
    PATH,
    POSITIVE,
    Options,
    common_options,
    json_option,
)
from areal_gym.cli.output import Group, print_columns, print_data, print_json, talk
from areal_gym.cli.own_task import env_with_arguments
from areal_gym.errors import UsageError, choices
from areal_gym.plugins import registry
from areal_gym.utils.markup import short

if TYPE_CHECKING:
    from areal_gym.envs.base import TextEnv

SOURCES = ("tau2",)
_MAX_SHOWN = 20
_EXCLUDED = {
    "num_skipped": "broken rows were skipped",
    "num_filtered": "rows were filtered out",
    "num_contaminated": "training rows were skipped: the test split has the same questions",
}
"""What is said about each count of rows in a data file that are not tasks."""


@click.group("data", cls=Group)
def data_command() -> None:
    """Show, check and download the data of environments."""


@data_command.command("pull")
@click.argument(
    "source", metavar="tau2|BENCHMARK", shell_complete=complete.ids("benchmarks", *SOURCES)
)
@click.option("--to", type=PATH, help="The target directory [the user's cache].")
@click.option("--base-url", help="The server [where the benchmark is published].")
@click.option("--force", is_flag=True, help="Download all files again.")
@common_options
@click.pass_obj
def pull_command(
    options: Options, source: str, to: Path | None, base_url: str | None, force: bool
) -> None:
    """Download the data of a benchmark: a pinned version with checksums; resumes if interrupted.

    Prints the directory. Environments find the default directory by themselves.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    is_shown = sys.stderr.isatty() and not options.is_plain
    with Progress(*columns, console=Console(stderr=True), disable=not is_shown) as bar:
        task = bar.add_task("")

        def on_progress(path: str, here: int, total: int) -> None:
            name = path.rpartition("/")[2]
            bar.update(task, description=name, completed=here, total=total)

        arguments: dict[str, Any] = {"force": force, "on_progress": on_progress}
        if base_url:
            arguments["base_url"] = base_url
        place, variable, root = _pull(source, to, arguments)
    print_data(str(place))
    if to is not None:
        talk(f"environments find it with: export {variable}={root}")


def _pull(
    source: str, to: Path | None, arguments: Mapping[str, Any]
) -> tuple[Path, str, Path | None]:
    """Download; return the data's directory, the variable that names it, and its value."""
    from areal_gym.envs.benchmarks.benchmark_pull import pull_benchmark
    from areal_gym.envs.benchmarks.left_out import require_not_left_out
    from areal_gym.envs.tau2.benchmark_data import manifest
    from areal_gym.envs.tau2.pull import pull

    known = [entry.id for entry in registry().entries("benchmarks")]
    if source not in (*SOURCES, *known):
        require_not_left_out(source)
        raise UsageError(
            f"no data {source!r} to download", hints=choices(source, (*SOURCES, *known))
        )
    benchmark = None if source in SOURCES else registry().load("benchmarks", source)
    if benchmark is not None and benchmark.data is not None:
        talk(f"{benchmark.data.source} ({benchmark.licence})")
        return pull_benchmark(benchmark, to, **arguments), "AREAL_GYM_DATA", to
    facts = manifest()
    talk(f"{facts['repository']} at {facts['commit'][:12]} ({facts['licence']})")
    folder = pull(to, **arguments)
    return folder, "TAU2_DATA_DIR", folder


@data_command.command("import-swe")
@click.argument("repository", type=PATH)
@click.argument("commit")
@click.option(
    "--test", "tests", multiple=True, required=True, help="A test, as pytest names it. Repeatable."
)
@click.option("--patch", type=PATH, help="The change [the commit itself, upon its parent].")
@click.option("--to", type=PATH, default=Path("tasks"), help="Where the folder is written [tasks].")
@click.option("--name", help="The task's name [swe/REPOSITORY-COMMIT].")
@click.option("--instruction", help="The agent's instruction [the commit's message].")
@click.option(
    "--package", "packages", multiple=True, help="A package that the tests need [pytest]."
)
@click.option(
    "--run", "commands", multiple=True, help="A command of the image's build. Repeatable."
)
@common_options
def import_swe_command(
    repository: Path,
    commit: str,
    tests: tuple[str, ...],
    patch: Path | None,
    to: Path,
    name: str | None,
    instruction: str | None,
    packages: tuple[str, ...],
    commands: tuple[str, ...],
) -> None:
    """Make a task folder from a commit of a git repository and a test that it makes pass.

    The agent gets the files before the change. With --patch, COMMIT is what the change is applied
    to. Prints the folder, which `areal-gym check harbor:FOLDER` checks and `--env harbor:` plays.
    """
    from areal_gym.envs.harbor.swe_import import SweImport, import_swe

    swe_import = SweImport(
        repository=repository,
        commit=commit,
        tests=tests,
        patch=patch,
        name=name,
        instruction=instruction,
        packages=tuple(dict.fromkeys(("pytest", *packages))),
        commands=commands,
    )
    print_data(str(import_swe(swe_import, to)))


@data_command.command("show")
@env_with_arguments()
@click.option("--split", default="train", help="The split.")
@click.option("-n", "num_tasks", type=POSITIVE, default=10, help="Number of tasks.")
@click.option("--first", type=click.IntRange(min=0), default=0, help="Index of the first task.")
@json_option("Print JSON, with the full tasks.")
@common_options
def show_command(
    env: str, settings: Mapping[str, Any], split: str, num_tasks: int, first: int, as_json: bool
) -> None:
    """Show the tasks of an environment: how many there are, and the first ones.

    key=value are arguments of the environment: areal-gym data show math tasks=questions.jsonl
    """
    instance: TextEnv = registry().make("envs", env, **settings)
    limit = instance.num_tasks(split)
    end = first + num_tasks if limit is None else min(first + num_tasks, limit)
    rows = []
    for index in range(first, end):
        _, info = instance.reset(seed=0, options={"split": split, "index": index})
        rows.append({"index": index, **info["task"], "messages": list(info["messages"])})
    source = instance.tasks
    counts = {name: instance.num_tasks(name) for name in ("train", "test")}
    num_excluded = {name: getattr(source, name, 0) for name in _EXCLUDED}
    instance.close()
    if as_json:
        facts = {"env": env, "num_tasks": counts, **num_excluded}
        print_json({**facts, "split": split, "tasks": rows})
        return
    if rows:
        header = ("index", "task", "question", "data")
        print_columns([header, *map(_line, rows)])
    for name, count in counts.items():
        talk(f"{name}: {'generated, without limit' if count is None else f'{count:,} tasks'}")
    for note in getattr(source, "notes", ()):
        talk(note)
    for name, number in num_excluded.items():
        if number:
            talk(f"{number:,} {_EXCLUDED[name]}")


@data_command.command("check")
@env_with_arguments()
@click.option("--train", default="train", help="The training split.")
@click.option("--heldout", default="test", help="The held-out split.")
@click.option(
    "--threshold",
    type=click.FloatRange(0, 1),
    default=0.8,
    help="Share of common eight-word passages above which two questions count as similar.",
)
@json_option()
@common_options
def check_command(
    env: str, settings: Mapping[str, Any], train: str, heldout: str, threshold: float, as_json: bool
) -> int:
    """Find test questions that leak into the training set.

    Exit code 1 if a held-out question, or one that is nearly the same, is in the training split.
    """
    from areal_gym.envs.contamination import find_contamination

    instance: TextEnv = registry().make("envs", env, **settings)
    contamination = find_contamination(instance, train=train, heldout=heldout, threshold=threshold)
    overlaps = contamination.overlaps
    if as_json:
        print_json(dataclasses.asdict(contamination))
        return int(bool(overlaps))
    if overlaps:
        shown = sorted(overlaps, key=lambda overlap: -overlap.similarity)[:_MAX_SHOWN]
        rows = [
            (f"{o.similarity:.2f}", o.heldout_id, o.train_id, short(o.question, 80)) for o in shown
        ]
        print_columns([("similarity", heldout, train, "question"), *rows])
        if len(overlaps) > _MAX_SHOWN:
            talk(f"the {_MAX_SHOWN} most similar; --json prints all")
    talk(
        f"{len(overlaps)} of {contamination.num_heldout:,} questions in {heldout} are in {train} "
        f"({contamination.num_train:,} tasks), or similar ones: {contamination.num_same} are "
        "identical"
    )
    return int(bool(overlaps))


def _line(row: dict[str, Any]) -> tuple[str, str, str, str]:
    question = row["messages"][-1]["content"]
    rest = {key: value for key, value in row["data"].items() if value != question}
    data = "  ".join(f"{key}={short(value, 30)}" for key, value in rest.items())
    return str(row["index"]), row["id"], short(question, 70), short(data, 90)
