"""`areal-gym new`."""

from __future__ import annotations

from pathlib import Path

import click

from areal_gym.cli import complete
from areal_gym.cli.output import common_options, print_data, talk
from areal_gym.errors import UsageError
from areal_gym.plugins import registry
from areal_gym.plugins.registry import as_kind
from areal_gym.scaffold import KINDS, plan


@click.command("new")
@click.argument("kind", metavar=f"[{'|'.join(KINDS)}]", shell_complete=complete.one_of(*KINDS))
@click.argument("name")
@click.option(
    "--path",
    "parent",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="The parent of the package's directory [here].",
)
@common_options
def new_command(kind: str, name: str, parent: Path) -> None:
    """Make the package areal-gym-NAME with a working example and its tests, for you to change.

    areal-gym new env dice: an environment with the id `dice` that keeps the contract.
    """
    package = plan(kind, name, parent)
    listed = as_kind(KINDS[kind].listed)
    for entry in registry().entries(listed):
        if entry.id == name:
            raise UsageError(
                f"{entry.spec.kind} {name!r} exists already, from {entry.plugin.source}",
                hints=[f"choose another name; names in use: areal-gym list {listed}"],
            )
    package.write()
    for path in package.files:
        print_data(str(package.directory / path))
    talk(
        f"next:  cd {package.directory}\n"
        "       pip install -e . pytest && pytest\n"
        f"       areal-gym check {package.directory.name}\n"
        f"       {package.use}"
    )
