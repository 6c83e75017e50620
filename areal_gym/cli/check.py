"""`areal-gym check`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from areal_gym.cli.output import common_options, print_columns, print_data, print_json, talk
from areal_gym.errors import NothingToDoError, PluginError
from areal_gym.plugins import registry

if TYPE_CHECKING:
    from areal_gym.envs.checker import RuleResult

__all__ = ["check_command"]


@click.command("check")
@click.argument("what", metavar="ENV|PLUGIN")
@click.argument("settings", nargs=-1, metavar="[key=value]...")
@click.option(
    "-n", "--tasks", "num_tasks", type=click.IntRange(min=1), default=16, show_default=True
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@common_options
def check_command(what: str, settings: tuple[str, ...], num_tasks: int, as_json: bool) -> int:
    """Does an environment, or every environment of a plugin, keep the contract?

    key=value are arguments of the environment. Exit code 1 when a rule is broken.
    """
    from areal_gym.config import parse_override
    from areal_gym.envs.checker import check_env

    kwargs = dict(map(parse_override, settings))
    reports: dict[str, list[RuleResult]] = {}
    for env_id in _env_ids(what):
        talk(f"checking {env_id} with {num_tasks} tasks per rule")
        reports[env_id] = check_env(env_id, num_tasks=num_tasks, kwargs=kwargs)
    num_broken = sum(not result.is_ok for report in reports.values() for result in report)
    if as_json:
        print_json(
            {env_id: [dataclasses.asdict(r) for r in report] for env_id, report in reports.items()}
        )
    else:
        for env_id, report in reports.items():
            print_data(f"{env_id}:")
            print_columns(
                [(r.rule, "ok" if r.is_ok else "BROKEN", r.summary, r.reason) for r in report],
                indent="  ",
            )
        print_data(f"{num_broken} broken" if num_broken else "the contract is kept")
    return int(num_broken > 0)


def _env_ids(what: str) -> list[str]:
    """The environment of that id, or those of the plugin of that name."""
    entries = registry().entries("envs")
    plugins = [plugin for plugin in registry().manager.plugins if plugin.name == what]
    if any(entry.id == what for entry in entries) or not plugins:
        return [registry().get("envs", what).id]
    for plugin in plugins:
        if plugin.problems:
            raise PluginError(f"plugin {plugin} is {plugin.status}: {'; '.join(plugin.problems)}")
    ids = [entry.id for entry in entries if entry.plugin in plugins]
    if not ids:
        raise NothingToDoError(f"plugin {what!r} offers no environment")
    return ids
