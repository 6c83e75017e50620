"""The `areal-gym` program: global options, lazily loaded commands, and one error renderer.

`areal_gym.cli.output.EXIT_CODES` lists the exit codes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

from areal_gym.cli.complete import matching
from areal_gym.cli.options import Options
from areal_gym.cli.output import (
    EXIT_BUG,
    Group,
    ReaderLeftError,
    has_reader_left,
    render_error,
    warn,
)
from areal_gym.errors import InfrastructureError
from areal_gym.version import __version__

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "Run": {
        "train": ("train_command", "Train a policy in an environment or on data."),
        "eval": ("eval_command", "Measure a policy on held-out tasks."),
        "serve": ("serve_commands", "Serve a policy over the APIs of OpenAI and Anthropic."),
        "serve-env": ("serve_commands", "Serve an environment to other machines."),
        "replay": ("replay_command", "Repeat a run's training from its recorded trajectories."),
    },
    "Inspect": {
        "list": ("list_command", "List environments, losses, engines, runs, ..."),
        "show": ("show_command", "Show one environment, loss, run, ... in detail."),
        "view": ("view_commands", "View runs in a browser: curves, trajectories, tokens."),
        "compare": ("view_commands", "Compare runs: settings, results, significance."),
        "report": ("view_commands", "Write a shareable one-page report of a run."),
    },
    "Data": {"data": ("data_command", "Show, check and download tasks of environments.")},
    "Try": {
        "play": ("play_command", "Play an environment yourself, in place of the policy."),
        "check": ("check_command", "Check that an environment keeps its contract."),
        "new": ("plugin_commands", "Make a plugin package: an environment, an agent, a loss, ..."),
    },
    "Setup": {
        "plan": ("plan_command", "Simulate what a run needs on GPUs, which need not be present."),
        "doctor": ("setup_commands", "Check what works on this machine."),
        "bench": ("setup_commands", "Measure the speed of each part of a run."),
        "plugins": ("plugin_commands", "List installed plugins and their problems."),
        "completion": ("setup_commands", "Print the script for TAB completion."),
    },
}
"""Section -> name -> (module of `areal_gym.cli`, summary). Help imports no command. A hyphen in a
name is an underscore in its function: `serve_env_command`."""
BUILT_IN = {name: row for section in COMMANDS.values() for name, row in section.items()}


class GymGroup(Group):
    """The group of all commands, including those of plugins; imports a command on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return built-in commands in the order of their sections, then plugins' commands."""
        return list(BUILT_IN | _plugin_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command; None if the name is unknown."""
        command: click.Command | None = None
        if cmd_name in BUILT_IN:
            module = import_module(f"areal_gym.cli.{BUILT_IN[cmd_name][0]}")
            command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        elif cmd_name in _plugin_commands():
            from areal_gym.plugins import registry

            command = registry().load("commands", cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a reader that closes our stdout is not an error."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError as error:
            if has_reader_left():
                raise ReaderLeftError from error
            raise InfrastructureError(f"a process at the other end has exited: {error}") from error
        return result

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Complete names of commands, without importing them, and options after a dash."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        built_in = {name: summary for name, (_, summary) in BUILT_IN.items()}
        return matching((_plugin_commands() | built_in).items(), incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections of `--help` without importing a command."""
        for title, section in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, summary) for name, (_, summary) in section.items()])
        if plugin_commands := _plugin_commands():
            with formatter.section("From plugins"):
                formatter.write_dl([*plugin_commands.items()])


def _plugin_commands() -> dict[str, str]:
    """Return plugins' commands and their summaries; load plugins only if there are any."""
    if "areal_gym.plugins" not in sys.modules and not _may_have_plugins():
        return {}
    from areal_gym.plugins import registry

    return {entry.id: entry.spec.summary for entry in registry().entries("commands")}


def _may_have_plugins() -> bool:
    """Return whether a distribution other than ours has an entry point for us.

    importlib.metadata and pluggy would take as long as the rest of `--help`; this takes a few
    milliseconds.
    """
    for folder in sys.path:
        try:
            names = os.listdir(folder or os.curdir)
        except FileNotFoundError:
            continue
        except OSError:  # an archive
            return True
        for name in names:
            if name.endswith(".egg"):
                return True
            is_ours = name.startswith(("areal_gym-", "areal_gym.egg-info"))
            if name.endswith((".dist-info", ".egg-info")) and not is_ours:
                file = os.path.join(folder, name, "entry_points.txt")
                with contextlib.suppress(OSError), open(file, "rb") as entry_points:
                    if b"[areal_gym]" in entry_points.read().replace(b" ", b""):
                        return True
    return False


def _choose_plugins(ctx: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> None:
    if names:
        from areal_gym.plugins import PluginManager, Registry, set_registry

        blocked = [name.removeprefix("no:") for name in names if name.startswith("no:")]
        modules = [name for name in names if not name.startswith("no:")]
        if modules and os.getcwd() not in sys.path:
            # As in `python -m`: a plugin in development is in the current directory.
            sys.path.append(os.getcwd())
        set_registry(Registry(PluginManager.installed(blocked=blocked, modules=modules)))


@click.group(
    cls=GymGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
        "show_default": True,
    },
    epilog="First steps:  list envs,  play tir,  train --env tir",
)
@click.option(
    "-p",
    "names",
    multiple=True,
    metavar="MODULE|no:NAME",
    is_eager=True,  # before --help, which lists plugins' commands
    expose_value=False,
    callback=_choose_plugins,
    help="Load a plugin module that is not installed, or block an installed plugin.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show the traceback of an error.")
@click.option("--plain", is_flag=True, help="Print no live display and no colors.")
@click.version_option(__version__, "--version", prog_name="areal-gym")
@click.pass_context
def app(ctx: click.Context, verbose: bool, plain: bool) -> None:
    """Train language-model agents by reinforcement learning in text environments."""
    options = ctx.ensure_object(Options)
    options.is_verbose |= verbose
    options.is_plain |= plain
    from areal_gym.plugins import registry

    manager = registry().manager
    for notice in manager.notices:
        warn(notice)
    # `areal-gym plugins` prints all problems itself.
    if ctx.invoked_subcommand != "plugins":
        for plugin in manager.failed:
            warn(f"plugin {plugin} {plugin.status}: {plugin.problems[0]}")


VARIABLE = "_AREAL_GYM_COMPLETE"
"""The environment variable by which a shell asks this program for completions."""


def run(argv: Sequence[str] | None = None) -> int:
    """Run the program and return the exit code; never raises."""
    options = Options(is_plain=bool(os.environ.get("NO_COLOR")))
    # Waiting OpenMP threads spin, which starves other processes. torch reads this when imported.
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
            return EXIT_BUG  # a shell asks for completions: print nothing
        return render_error(error, is_verbose=options.is_verbose)
    finally:
        if plugins := sys.modules.get("areal_gym.plugins"):
            plugins.set_registry(None)
