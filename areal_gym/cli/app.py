"""The `areal-gym` program: global options, commands that load on use, one error renderer.

What exit codes mean is in `areal_gym.cli.output.EXIT_CODES`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from areal_gym.cli.output import (
    EXIT_BUG,
    Group,
    Options,
    ReaderLeftError,
    has_reader_left,
    render_error,
    warn,
)
from areal_gym.errors import InfrastructureError
from areal_gym.plugins import PluginManager, Registry, registry, set_registry
from areal_gym.version import __version__

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "Look": {
        "list": ("list_command", "What is there: environments, losses, engines, runs, ..."),
        "show": ("show_command", "One thing in full: an environment, a loss, a run."),
        "plugins": ("plugins_command", "What is installed, whose it is, what failed."),
        "view": ("view_command", "Look at runs in a browser: curves, trajectories, tokens."),
        "compare": ("compare_command", "Runs side by side: what differs, beyond noise?"),
        "report": ("report_command", "A run on one page, to be given away."),
        "completion": ("completion_command", "Teach your shell to complete with TAB."),
        "doctor": ("doctor_command", "What of this machine can be used, what is missing."),
        "bench": ("bench_command", "How fast this machine is at each part of a run."),
    },
    "Get": {
        "data": (
            "data_command",
            "Tasks of an environment: show, check for contamination, pull.",
        ),
    },
    "Try": {
        "play": ("play_command", "You are the policy."),
        "check": ("check_command", "Does an environment keep the contract?"),
        "new": ("new_command", "A package of your own: an environment, an agent, a loss, ..."),
    },
    "Run": {
        "train": ("train_command", "Improve a policy in an environment."),
        "eval": ("eval_command", "Measure a policy on held-out tasks."),
        "serve": ("serve_command", "Put a policy behind OpenAI's and Anthropic's APIs."),
        "serve-env": ("serve_env_command", "Let other machines play in an environment."),
        "replay": ("replay_command", "Train again from a run's record, without any engine."),
    },
}
"""Section -> name -> (module and function under `areal_gym.cli`, summary). Help imports none."""


class GymGroup(Group):
    """Loads a command when it is used; lists them by section; knows the commands of plugins."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Ours in the order of their sections, then those of plugins."""
        ours = [name for section in COMMANDS.values() for name in section]
        return ours + [entry.id for entry in registry().entries("commands") if entry.id not in ours]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; None when there is none of that name."""
        for section in COMMANDS.values():
            if cmd_name in section:
                module = section[cmd_name][0]
                command: click.Command = getattr(import_module(f"areal_gym.cli.{module}"), module)
                return command
        if any(entry.id == cmd_name for entry in registry().entries("commands")):
            loaded: click.Command = registry().load("commands", cmd_name)
            return loaded
        return None

    def invoke(self, ctx: click.Context) -> Any:
        """Click's, which would take a reader that leaves for a failure of the command."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError as error:
            if has_reader_left():
                raise ReaderLeftError from error
            raise InfrastructureError(f"a process that was talked to has ended: {error}") from error
        return result

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Names of commands, without importing one; options where the word begins like one."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        theirs = {entry.id: entry.spec.summary for entry in registry().entries("commands")}
        ours = {name: row[1] for section in COMMANDS.values() for name, row in section.items()}
        return [
            CompletionItem(name, help=summary)
            for name, summary in {**theirs, **ours}.items()
            if name.startswith(incomplete)
        ]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections without importing a command."""
        for title, section in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, summary) for name, (_, summary) in section.items()])
        theirs = registry().entries("commands")
        if theirs:
            with formatter.section("From plugins"):
                formatter.write_dl([(entry.id, entry.spec.summary) for entry in theirs])


def _choose_plugins(ctx: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> None:
    if names:
        blocked = [name.removeprefix("no:") for name in names if name.startswith("no:")]
        modules = [name for name in names if not name.startswith("no:")]
        if modules and os.getcwd() not in sys.path:
            # As `python -m` does: what is being written is in the directory where one types.
            sys.path.append(os.getcwd())
        set_registry(Registry(PluginManager.installed(blocked=blocked, modules=modules)))


@click.group(
    cls=GymGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="First steps:  list envs,  play tir,  train --env tir",
)
@click.option(
    "-p",
    "names",
    multiple=True,
    metavar="MODULE|no:NAME",
    is_eager=True,  # before --help, which lists the commands of plugins
    expose_value=False,
    callback=_choose_plugins,
    help="Load a plugin module that is not installed, or leave an installed plugin out.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of an error.")
@click.option("--plain", is_flag=True, help="No live display, no colours.")
@click.version_option(__version__, "--version", prog_name="areal-gym")
@click.pass_context
def app(ctx: click.Context, verbose: bool, plain: bool) -> None:
    """Train language-model agents by reinforcement learning in text environments."""
    options = ctx.ensure_object(Options)
    options.is_verbose |= verbose
    options.is_plain |= plain
    manager = registry().manager
    for notice in manager.notices:
        warn(notice)
    # `areal-gym plugins` says it in full.
    if ctx.invoked_subcommand != "plugins":
        for plugin in manager.failed:
            warn(f"plugin {plugin} {plugin.status}: {plugin.problems[0]}")


VARIABLE = "_AREAL_GYM_COMPLETE"
"""A shell asks for completions by running the program with this in its environment."""


def run(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code, and never raises."""
    options = Options(is_plain=bool(os.environ.get("NO_COLOR")))
    # OpenMP's threads spin while they wait, which starves whoever else wants the processor. Read
    # when torch is imported, so it must be said before.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        result: Any = app.main(
            args=None if argv is None else list(argv),
            prog_name="areal-gym",
            standalone_mode=False,
            obj=options,
        )
        return result if isinstance(result, int) else 0
    except BaseException as error:
        if VARIABLE in os.environ and not isinstance(error, SystemExit):
            return EXIT_BUG  # somebody is typing: nothing is printed into that
        return render_error(error, is_verbose=options.is_verbose)
    finally:
        set_registry(None)
