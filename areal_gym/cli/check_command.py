"""`areal-gym check`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_gym.cli.options import POSITIVE, Options, common_options, json_option
from areal_gym.cli.output import print_columns, print_data, print_json, talk
from areal_gym.cli.own_task import env_with_arguments
from areal_gym.errors import (
    GymError,
    NothingToDoError,
    PluginError,
    UnknownIdError,
    UsageError,
    did_you_mean,
)
from areal_gym.plugins import Entry, EnvSpec, registry

if TYPE_CHECKING:
    from areal_gym.envs.checker import RuleResult
    from areal_gym.envs.tau2.verdict_replay import Agreement


@click.command("check")
@env_with_arguments("target", "ENV|PACKAGE")
@click.option("-n", "--tasks", "num_tasks", type=POSITIVE, default=16, help="Tasks per rule.")
@click.option(
    *("--concurrent", "num_concurrent"),
    type=POSITIVE,
    default=1024,
    help="Episodes played concurrently.",
)
@click.option(
    "--fixtures",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="For tau2 and its domains: a directory of recorded verdicts to replay and compare.",
)
@json_option()
@common_options
@click.pass_obj
def check_command(
    options: Options,
    target: str,
    settings: Mapping[str, Any],
    num_tasks: int,
    num_concurrent: int,
    fixtures: Path | None,
    as_json: bool,
) -> int:
    """Check that an environment, or everything in a package, keeps its contract.

    ENV is an id (areal-gym list envs). PACKAGE is a plugin or a distribution (areal-gym plugins):
    its environments are checked, its other entry points are imported. key=value are arguments of
    the environment. Exit code 1 if a rule is broken. Each task folder of harbor:PATH is played by
    its solution, by doing nothing, and by cheats.

    With --fixtures, compare our tau2 with the benchmark's own verdicts instead:
    areal-gym check tau2 --fixtures DIR. Exit code 1 if any verdict differs.
    """
    from areal_gym.envs.checker import check_env
    from areal_gym.envs.checker.task_folders import check_task_folders, is_of_task_folders

    if fixtures is not None:
        return _replay_fixtures(target, fixtures, settings, as_json=as_json)
    reports: dict[str, list[RuleResult]] = {}
    for entry in _entries(target):
        if is_of_task_folders(entry.spec):
            reports |= check_task_folders(
                entry.spec,
                settings,
                num_tasks=num_tasks,
                num_concurrent=num_concurrent,
                started=lambda task: talk(f"checking {task}"),
            )
        elif isinstance(entry.spec, EnvSpec):
            talk(f"checking {entry.id}: {num_tasks} tasks per rule")
            reports[entry.id] = check_env(
                entry.id, num_tasks=num_tasks, num_concurrent=num_concurrent, kwargs=settings
            )
        else:
            reports[f"{entry.spec.kind} {entry.id}"] = [_check_import(entry)]
    if as_json:
        print_json({name: [dataclasses.asdict(r) for r in rs] for name, rs in reports.items()})
    else:
        _print_reports(reports, is_plain=options.is_plain)
    for name, report in reports.items():
        if all(result.is_ok for result in report) and name in [e.id for e in _entries(target)]:
            _say_how_to_train(name, settings)
    return int(any(not result.is_ok for report in reports.values() for result in report))


def _say_how_to_train(env_id: str, settings: Mapping[str, Any]) -> None:
    """Tell how to train in a sound environment that the default small policy cannot learn."""
    from areal_gym.runs.early_checks import obstacle_to_warm_start

    if reason := obstacle_to_warm_start(env_id, settings):
        talk(f"to train in {env_id}, name a model, such as --model Qwen/Qwen3-0.6B: {reason}")


def _entries(target: str) -> list[Entry]:
    """Return the environment with this id, or the entries of the plugin or distribution."""
    plugin_registry = registry()
    plugins = [p for p in plugin_registry.manager.plugins if target in (p.name, p.distribution)]
    if any(entry.id == target for entry in plugin_registry.entries("envs")) or not plugins:
        try:
            return [plugin_registry.get("envs", target)]
        except UnknownIdError as error:
            every_plugin = plugin_registry.manager.plugins
            packages = {name for p in every_plugin for name in (p.name, p.distribution)}
            hints = [did_you_mean(target, sorted(packages)), *error.hints]
            raise UnknownIdError(error.message, hints=hints) from None
    broken = [plugin for plugin in plugins if plugin.problems]
    if broken:
        reasons = [f"{plugin}: {problem}" for plugin in broken for problem in plugin.problems]
        raise PluginError(f"{target} does not load", hints=reasons)
    entries = [entry for entry in plugin_registry.manager.registrations if entry.plugin in plugins]
    # An adapter needs a name after its colon to be an environment.
    checkable = [entry for entry in entries if entry.spec.shown_id == entry.id]
    if not checkable:
        raise NothingToDoError(f"{target!r} has nothing that can be checked")
    return checkable


def _check_import(entry: Entry) -> RuleResult:
    """Check that an entry of another kind can be imported (`areal_gym.testing` checks more)."""
    from areal_gym.envs.checker import RuleResult

    reason = ""
    try:
        entry.load()
    except GymError as error:
        reason = str(error)
    summary = "Its entry point can be imported"
    return RuleResult(rule="import", summary=summary, is_ok=not reason, reason=reason)


def _print_reports(reports: Mapping[str, Sequence[RuleResult]], *, is_plain: bool) -> None:
    for name, report in reports.items():
        if sys.stdout.isatty() and not is_plain:
            _print_report(name, report)
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


def _print_report(name: str, report: Sequence[RuleResult]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("rule", "", "requirement", "result", title=name, title_justify="left")
    for result in report:
        rule, verdict, summary, outcome = _row(result)
        style = "green" if result.is_ok else "bold red"
        table.add_row(Text(rule), Text(verdict, style=style), Text(summary), Text(outcome))
    Console().print(table)


# ---- tau2 --------------------------------------------------------------------------------------


def _replay_fixtures(
    target: str, folder: Path, settings: Mapping[str, Any], *, as_json: bool
) -> int:
    from areal_gym.envs.tau2.benchmark_data import DOMAINS
    from areal_gym.envs.tau2.verdict_replay import replay

    package, _, domain = target.partition("/")
    if package != "tau2" or domain not in ("", *DOMAINS):
        raise UsageError(
            f"{target!r} has no recorded verdicts to replay",
            hints=["available: tau2, " + ", ".join(f"tau2/{name}" for name in DOMAINS)],
        )
    if unknown := set(settings) - {"data_dir"}:
        raise UsageError(f"--fixtures takes data_dir=DIR only, not {', '.join(sorted(unknown))}")
    domains = (domain,) if domain else DOMAINS
    agreements = replay(folder, domains=domains, data_dir=settings.get("data_dir"))
    if as_json:
        print_json([dataclasses.asdict(agreement) for agreement in agreements])
    else:
        _print_agreements(agreements)
    return int(not all(agreement.is_complete for agreement in agreements))


def _print_agreements(agreements: list[Agreement]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    verdicts = list(dict.fromkeys(name for agreement in agreements for name in agreement.counts))
    table = Table("", *(Column(name, justify="right") for name in (*verdicts, "differences")))
    for agreement in agreements:
        counts = {name: f"{count:,}" for name, count in agreement.counts.items()}
        cells = [counts.get(name, "") for name in verdicts]
        table.add_row(agreement.name, *cells, f"{agreement.num_differences:,}")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    for agreement in agreements:
        for example in agreement.examples:
            print_data(f"{agreement.name}: {example}")
    num_differences = sum(agreement.num_differences for agreement in agreements)
    print_data(f"{num_differences} differences" if num_differences else "all verdicts agree")
