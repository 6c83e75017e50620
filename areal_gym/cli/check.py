"""`areal-gym check`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from areal_gym.cli.output import common_options, print_columns, print_data, print_json, talk
from areal_gym.errors import NothingToDoError, PluginError, UsageError
from areal_gym.plugins import registry

if TYPE_CHECKING:
    from areal_gym.envs.checker import RuleResult
    from areal_gym.envs.tau2.replay import Agreement

__all__ = ["check_command"]


@click.command("check")
@click.argument("what", metavar="ENV|PLUGIN")
@click.argument("settings", nargs=-1, metavar="[key=value]...")
@click.option(
    "-n", "--tasks", "num_tasks", type=click.IntRange(min=1), default=16, show_default=True
)
@click.option(
    "--fixtures",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="For tau2 and its domains: a folder of recorded verdicts, to replay and compare.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@common_options
def check_command(
    what: str, settings: tuple[str, ...], num_tasks: int, fixtures: Path | None, as_json: bool
) -> int:
    """Does an environment, or every environment of a plugin, keep the contract?

    key=value are arguments of the environment. Exit code 1 when a rule is broken.

    With --fixtures it says how far our tau2 agrees with the benchmark's own verdicts instead:
    areal-gym check tau2 --fixtures DIR. Exit code 1 when anything differs.
    """
    if fixtures is not None:
        return _replay(what, fixtures, settings, as_json=as_json)
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


def _replay(what: str, folder: Path, settings: tuple[str, ...], *, as_json: bool) -> int:
    from areal_gym.config import parse_override
    from areal_gym.envs.tau2.data import DOMAINS
    from areal_gym.envs.tau2.replay import replay

    package, _, domain = what.partition("/")
    if package != "tau2" or domain not in ("", *DOMAINS):
        raise UsageError(
            f"{what!r} has no recorded verdicts to replay",
            hints=["there are those of: tau2, " + ", ".join(f"tau2/{name}" for name in DOMAINS)],
        )
    options = dict(map(parse_override, settings))
    data_dir = options.pop("data_dir", None)
    if options:
        raise UsageError(f"--fixtures takes data_dir=DIR only, not {', '.join(options)}")
    agreements = replay(folder, domains=(domain,) if domain else DOMAINS, data_dir=data_dir)
    if as_json:
        print_json([dataclasses.asdict(agreement) for agreement in agreements])
    else:
        _print_agreements(agreements)
    return int(not all(agreement.is_complete for agreement in agreements))


def _print_agreements(agreements: list[Agreement]) -> None:
    from rich.console import Console
    from rich.table import Table

    kinds = list(dict.fromkeys(kind for agreement in agreements for kind in agreement.counts))
    table = Table()
    table.add_column("")
    for kind in kinds:
        table.add_column(kind, justify="right")
    table.add_column("differences", justify="right")
    for agreement in agreements:
        counts = [
            f"{agreement.counts[kind]:,}" if kind in agreement.counts else "" for kind in kinds
        ]
        table.add_row(agreement.name, *counts, f"{agreement.num_differences:,}")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    for agreement in agreements:
        for example in agreement.examples:
            print_data(f"{agreement.name}: {example}")
    num_differences = sum(agreement.num_differences for agreement in agreements)
    print_data(f"{num_differences} differences" if num_differences else "all of it agrees")


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
