"""`areal-gym completion`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
from click.shell_completion import (
    BashComplete,
    ZshComplete,
    add_completion_class,
    get_completion_class,
)

from areal_gym.cli import complete
from areal_gym.cli.output import common_options, print_data, talk
from areal_gym.errors import UsageError, choices

SHELLS = ("bash", "zsh", "fish")
_INSTALL = {
    "bash": "echo 'eval \"$(areal-gym completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(areal-gym completion zsh)\"' >> ~/.zshrc",
    "fish": "areal-gym completion fish > ~/.config/fish/completions/areal-gym.fish",
}


class _Bash(BashComplete):
    """Completion for bash that adds no space after `trainer.lr=`."""

    source_template = BashComplete.source_template.replace(
        "    return 0\n",
        "    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=:] ]]; then\n"
        "        compopt -o nospace\n"
        "    fi\n\n"
        "    return 0\n",
    )


class _Zsh(ZshComplete):
    """Completion for zsh that adds no space after `trainer.lr=`."""

    source_template = (
        ZshComplete.source_template.replace(
            "    local -a response\n", "    local -a response\n    local -a suffix\n"
        )
        .replace(
            "    for type key descr in ${response}; do\n",
            "    for type key descr in ${response}; do\n"
            '        [[ "$key" == *[=:] ]] && suffix=(-S "")\n',
        )
        .replace(" -U\n", ' -U "${suffix[@]}"\n')
        .replace("compadd -U ", 'compadd -U "${suffix[@]}" ')
    )


add_completion_class(_Zsh)
add_completion_class(_Bash)


@click.command("completion")
@click.argument(
    "shell",
    required=False,
    metavar=f"[{'|'.join(SHELLS)}]",
    shell_complete=complete.one_of(*SHELLS),
)
@common_options
def completion_command(shell: str | None) -> None:
    """Print the script for TAB completion in your shell; by default the shell in $SHELL.

    It completes commands, options, ids (--env), runs, keys of settings (trainer.lr=) and the values
    of settings with a fixed choice (trainer.algorithm=).
    """
    from areal_gym.cli.app import VARIABLE, app

    name = shell or Path(os.environ.get("SHELL", "")).name
    completion = get_completion_class(name) if name in SHELLS else None
    if completion is None:
        raise UsageError(f"no completion for the shell {name!r}", hints=choices(name, SHELLS))
    print_data(completion(app, {}, "areal-gym", VARIABLE).source().rstrip())
    if sys.stdout.isatty():
        talk(f"to install it:  {_INSTALL[name]}")
