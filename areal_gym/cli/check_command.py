"""`areal-gym check`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_gym.cli import complete
from areal_gym.cli.output import (
    Options,
    common_options,
    print_columns,
    print_data,
    print_json,
    talk,
)
from areal_gym.errors import (
    GymError,
    NothingToDoError,
    PluginError,
    UnknownIdError,
    did_you_mean,
)
from areal_gym.plugins import Entry, EnvSpec, registry

if TYPE_CHECKING:
    from areal_gym.envs.checker import RuleResult


@click.command("check")
@click.argument("what", metavar="ENV|PACKAGE", shell_complete=complete.ids("envs"))
@click.argument(
    "settings", nargs=-1, metavar="[key=value]...", shell_complete=complete.env_arguments
)
@click.option(
    "-n",
    "--tasks",
    "num_tasks",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Tasks per rule.",
)
@click.option(
    "--concurrent",
    "num_concurrent",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="Episodes played concurrently.",
)
@click.option(
    "--fixtures",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="For tau2 and its domains: a directory of recorded verdicts to replay and compare.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@common_options
@click.pass_obj
def check_command(
    options: Options,
    what: str,
    settings: tuple[str, ...],
    num_tasks: int,
    num_concurrent: int,
    fixtures: Path | None,
    as_json: bool,
) -> int:
    """Check that an environment, or everything in a package, keeps its contract.

    ENV is an id (areal-gym list envs). PACKAGE is a plugin or a distribution (areal-gym plugins):
    its environments are checked, its other entry points are imported. key=value are arguments of
    the environment. Exit code 1 if a rule is broken.

    With --fixtures, compare our tau2 with the benchmark's own verdicts instead:
    areal-gym check tau2 --fixtures DIR. Exit code 1 if any verdict differs.
    """
    from areal_gym.config import parse_override

    kwargs = dict(map(parse_override, settings))
    if fixtures is not None:
        from areal_gym.cli.check_tau2_command import replay_fixtures

        return replay_fixtures(what, fixtures, kwargs, as_json=as_json)
    from areal_gym.envs.checker import check_env

    entries = _entries(what)
    reports: dict[str, list[RuleResult]] = {}
    for entry in entries:
        if isinstance(entry.spec, EnvSpec):
            talk(f"checking {entry.id}: {num_tasks} tasks per rule")
            reports[entry.id] = check_env(
                entry.id, num_tasks=num_tasks, num_concurrent=num_concurrent, kwargs=kwargs
            )
        else:
            reports[f"{entry.spec.kind} {entry.id}"] = [_check_import(entry)]
    if as_json:
        print_json({name: [dataclasses.asdict(r) for r in rs] for name, rs in reports.items()})
    else:
        _print_reports(reports, is_plain=options.is_plain)
    return int(any(not result.is_ok for report in reports.values() for result in report))


def _entries(what: str) -> list[Entry]:
    """Return the environment of that id, or the entries of the plugin or distribution."""
    known = registry()
    plugins = [p for p in known.manager.plugins if what in (p.name, p.distribution)]
    if any(entry.id == what for entry in known.entries("envs")) or not plugins:
        try:
            return [known.get("envs", what)]
        except UnknownIdError as error:
            packages = {name for p in known.manager.plugins for name in (p.name, p.distribution)}
            if (near := did_you_mean(what, sorted(packages))) is None:
                raise
            raise UnknownIdError(error.message, hints=[near, *error.hints]) from None
    broken = [plugin for plugin in plugins if plugin.problems]
    if broken:
        reasons = [f"{plugin}: {problem}" for plugin in broken for problem in plugin.problems]
        raise PluginError(f"{what} does not load", hints=reasons)
    entries = [
        Entry(*registration)
        for registration in known.manager.registrations
        if registration.plugin in plugins
    ]
    # An adapter is an environment only with a name after the colon.
    checkable = [entry for entry in entries if entry.spec.shown_id == entry.id]
    if not checkable:
        raise NothingToDoError(f"{what!r} offers nothing that can be checked")
    return checkable


def _check_import(entry: Entry) -> RuleResult:
    """Check that an entry of another kind imports; `areal_gym.testing` has further contracts."""
    from areal_gym.envs.checker import RuleResult

    summary = "Its entry point can be imported"
    try:
        entry.load()
    except GymError as error:
        return RuleResult(rule="import", summary=summary, is_ok=False, reason=str(error))
    return RuleResult(rule="import", summary=summary, is_ok=True)


def _print_reports(reports: Mapping[str, Sequence[RuleResult]], *, is_plain: bool) -> None:
    for name, report in reports.items():
        if sys.stdout.isatty() and not is_plain:
            _print_table(name, report)
        else:
            print_data(f"{name}:")
            print_columns([_row(result) for result in report], indent="  ")
    results = [result for report in reports.values() for result in report]
    num_broken = sum(not result.is_ok for result in results)
    num_skipped = sum(result.reason.startswith("skipped") for result in results)
    skipped = f", {num_skipped} skipped" if num_skipped else ""
    verdict = f"{num_broken} broken" if num_broken else "the contract is kept"
    print_data(f"{verdict} ({len(results)} rules{skipped})")


def _row(result: RuleResult) -> tuple[str, str, str, str]:
    verdict = "ok" if result.is_ok else "BROKEN"
    return result.rule, verdict, result.summary, result.reason or result.measured


def _print_table(name: str, report: Sequence[RuleResult]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=name, title_justify="left", show_lines=False)
    for column in ("rule", "", "requirement", "result"):
        table.add_column(column)
    for result in report:
        rule, verdict, summary, outcome = _row(result)
        style = "green" if result.is_ok else "bold red"
        cells: list[Any] = [Text(rule), Text(verdict, style=style), Text(summary), Text(outcome)]
        table.add_row(*cells)
    Console().print(table)
