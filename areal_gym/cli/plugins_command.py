"""`areal-gym plugins`."""

from __future__ import annotations

from typing import Any

import click

from areal_gym.cli.output import common_options, print_columns, print_data, print_json, talk
from areal_gym.errors import PluginError
from areal_gym.plugins import Plugin, registry
from areal_gym.utils.markup import counted


@click.command("plugins")
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help="Show blocked plugins, too, and what each plugin offers.",
)
@click.option("--strict", is_flag=True, help="Exit with 4 if a plugin has a problem.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@common_options
def plugins_command(show_all: bool, strict: bool, as_json: bool) -> None:
    """List plugins with their distribution and status, and why a plugin failed.

    Plugins come from the entry-point group `areal_gym`. AREAL_GYM_PLUGINS=a,b loads only those;
    before the command, `-p no:NAME` blocks one and `-p MODULE` loads one that is not installed.
    """
    manager = registry().manager
    shown = [p for p in manager.plugins if show_all or as_json or not p.is_blocked]
    if as_json:
        print_json([_row(plugin) for plugin in shown])
    elif show_all:
        for plugin in shown:
            print_data(f"{plugin}  {plugin.status}  {plugin.module}")
            _print_problems(plugin)
            print_columns(
                [(spec.kind, spec.id, spec.summary) for spec in _offers(plugin)], indent="    "
            )
    else:
        width = max((len(f"{plugin}") for plugin in shown), default=0)
        for plugin in shown:
            what = f"offers {counted(len(_offers(plugin)), 'id')}"
            print_data(f"{plugin!s:<{width}}  {plugin.status}, {what}")
            _print_problems(plugin)
    failed = manager.failed
    if not as_json:
        talk(
            f"{counted(len(shown), 'plugin')}, {len(failed)} with problems"
            + ("" if show_all else "; what each offers: areal-gym plugins --all")
        )
    if strict and failed:
        raise PluginError("plugins with problems: " + ", ".join(str(plugin) for plugin in failed))


def _print_problems(plugin: Plugin) -> None:
    for problem in plugin.problems:
        print_data(f"    problem: {problem}")


def _offers(plugin: Plugin) -> list[Any]:
    return [spec for spec, owner in registry().manager.registrations if owner is plugin]


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
