"""`areal-gym check tau2 --fixtures DIR`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_gym.cli.output import print_data, print_json
from areal_gym.errors import UsageError

if TYPE_CHECKING:
    from areal_gym.envs.tau2.verdict_replay import Agreement


def replay_fixtures(what: str, folder: Path, settings: Mapping[str, Any], *, as_json: bool) -> int:
    """Replay a directory of recorded verdicts, print how many agree, return the exit code.

    Raises:
        UsageError: `what` has no verdicts, or a setting is unknown.
    """
    from areal_gym.envs.tau2.benchmark_data import DOMAINS
    from areal_gym.envs.tau2.verdict_replay import replay

    package, _, domain = what.partition("/")
    if package != "tau2" or domain not in ("", *DOMAINS):
        raise UsageError(
            f"{what!r} has no recorded verdicts to replay",
            hints=["available: tau2, " + ", ".join(f"tau2/{name}" for name in DOMAINS)],
        )
    unknown = set(settings) - {"data_dir"}
    if unknown:
        raise UsageError(f"--fixtures takes data_dir=DIR only, not {', '.join(sorted(unknown))}")
    agreements = replay(
        folder, domains=(domain,) if domain else DOMAINS, data_dir=settings.get("data_dir")
    )
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
    print_data(f"{num_differences} differences" if num_differences else "all verdicts agree")
