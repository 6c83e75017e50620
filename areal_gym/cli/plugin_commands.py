"""`areal-gym plugins` and `areal-gym new`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from areal_gym.cli import complete
from areal_gym.cli.options import common_options, json_option
from areal_gym.cli.output import print_columns, print_data, print_json, talk
from areal_gym.errors import PluginError, UsageError
from areal_gym.plugins import Plugin, registry
from areal_gym.plugins.registry import as_kind
from areal_gym.scaffold import KINDS, Package, plan, plan_task
from areal_gym.utils.markup import counted


@click.command("plugins")
@click.option(
    *("--all", "show_all"),
    is_flag=True,
    help="Show blocked plugins, too, and what each plugin offers.",
)
@click.option("--strict", is_flag=True, help="Exit with 4 if a plugin has a problem.")
@json_option()
@common_options
def plugins_command(show_all: bool, strict: bool, as_json: bool) -> None:
    """List plugins with their distribution and status, and why a plugin failed.

    Plugins come from the entry-point group `areal_gym`. AREAL_GYM_PLUGINS=a,b loads only those;
    before the command, `-p no:NAME` blocks one and `-p MODULE` loads one that is not installed.
    """
    failed = registry().manager.failed
    shown = [p for p in registry().manager.plugins if show_all or as_json or not p.is_blocked]
    if as_json:
        print_json([_row(plugin) for plugin in shown])
    else:
        width = max((len(f"{plugin}") for plugin in shown), default=0)
        for plugin in shown:
            offers = _offers(plugin)
            if show_all:
                print_data(f"{plugin}  {plugin.status}  {plugin.module}")
            else:
                offered = counted(len(offers), "id")
                print_data(f"{plugin!s:<{width}}  {plugin.status}, offers {offered}")
            for problem in plugin.problems:
                print_data(f"    problem: {problem}")
            if show_all:
                rows = [(spec.kind, spec.id, spec.summary) for spec in offers]
                print_columns(rows, indent="    ")
        hint = "" if show_all else "; what each offers: areal-gym plugins --all"
        talk(f"{counted(len(shown), 'plugin')}, {len(failed)} with problems{hint}")
    if strict and failed:
        raise PluginError(f"plugins with problems: {', '.join(map(str, failed))}")


def _offers(plugin: Plugin) -> list[Any]:
    return [entry.spec for entry in registry().manager.registrations if entry.plugin is plugin]


def _row(plugin: Plugin) -> dict[str, Any]:
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "module": plugin.module,
        "status": plugin.status,
        "hooks": list(plugin.hooks),
        "problems": list(plugin.problems),
        "offers": [{"kind": spec.kind, "id": spec.id} for spec in _offers(plugin)],
    }


@click.command("new")
@click.argument("kind", metavar=f"[{'|'.join(KINDS)}]", shell_complete=complete.one_of(*KINDS))
@click.argument("name")
@click.option(
    *("--path", "parent"),
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    show_default=False,
    help="The parent of the package's directory [here].",
)
@click.option(
    *("--kind", "form"),
    type=click.Choice(["package", "harbor"]),
    default="package",
    show_default=True,
    help="For env: a package, or a task folder in Harbor's format.",
)
@common_options
def new_command(kind: str, name: str, parent: Path, form: str) -> None:
    """Make the package areal-gym-NAME with a working example and its tests, for you to change.

    areal-gym new env dice: an environment with the id `dice` that keeps the contract.
    areal-gym new env --kind harbor fix-words: a task folder that passes areal-gym check.
    """
    if form == "harbor":
        if kind != "env":
            raise UsageError(f"--kind harbor goes with env, not with {kind}")
        task = plan_task(name, parent)
        task.write()
        _say_what_was_written(task)
        talk(f"next:  areal-gym check harbor:{task.directory}\n       {task.use}")
        return
    package = plan(kind, name, parent)
    listed = as_kind(KINDS[kind].listed)
    for entry in registry().entries(listed):
        if entry.id == name:
            raise UsageError(
                f"{entry.spec.kind} {name!r} exists already, from {entry.plugin.source}",
                hints=[f"choose another name; names in use: areal-gym list {listed}"],
            )
    package.write()
    _say_what_was_written(package)
    talk(
        f"next:  cd {package.directory}\n"
        "       pip install -e . pytest && pytest\n"
        f"       areal-gym check {package.directory.name}\n"
        f"       {package.use}"
    )


def _say_what_was_written(package: Package) -> None:
    for path in package.files:
        print_data(str(package.directory / path))
