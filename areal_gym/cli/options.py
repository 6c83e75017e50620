"""Arguments and options that several commands take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from areal_gym.cli import complete

F = TypeVar("F", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)
POSITIVE = click.IntRange(min=1)


@dataclass(slots=True)
class Options:
    """The global options, which click passes to commands as `ctx.obj`."""

    is_verbose: bool = False
    is_plain: bool = False


def common_options(command: F) -> F:
    """Accept `-v` and `--plain` also after the command's name."""

    def note(ctx: click.Context, parameter: click.Parameter, is_set: bool) -> None:
        options = ctx.ensure_object(Options)
        options.is_verbose |= is_set and parameter.name == "verbose"
        options.is_plain |= is_set and parameter.name == "plain"

    hidden: dict[str, Any] = {"expose_value": False, "callback": note, "hidden": True}
    for flags in (("--plain",), ("-v", "--verbose")):
        command = click.option(*flags, is_flag=True, **hidden)(command)
    return command


def json_option(help: str = "Print JSON.") -> Callable[[F], F]:
    """Add the option `--json`."""
    return click.option("--json", "as_json", is_flag=True, help=help)


def run_option(help: str) -> Callable[[F], F]:
    """Add the options for a policy: a run, whose newest checkpoint is used, or a checkpoint."""
    run = click.option("--run", type=PATH, shell_complete=complete.runs, help=help)
    checkpoint = click.option("--checkpoint", type=PATH, help="A checkpoint directory.")
    return lambda command: run(checkpoint(command))


overrides_argument = click.argument(
    "overrides", nargs=-1, metavar="[key=value]...", shell_complete=complete.settings
)
mixed_env_option = click.option(
    "--env",
    multiple=True,
    shell_complete=complete.ids("envs"),
    help="The environment's id (areal-gym list envs), or FILE.py:CLASS. Repeat it with weights to "
    "mix several: A:0.7, B:0.3.",
)
recipe_option = click.option(
    "-c", "--config", "recipe", type=PATH, help="A recipe: settings as YAML."
)
trust_option = click.option(
    "--trust",
    is_flag=True,
    help="Accept all settings of the run, which can start programs: do you trust its author?",
)
