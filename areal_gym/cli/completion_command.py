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
from areal_gym.errors import UsageError, did_you_mean

SHELLS = ("bash", "zsh", "fish")
_PLACES = {
    "bash": "echo 'eval \"$(areal-gym completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(areal-gym completion zsh)\"' >> ~/.zshrc",
    "fish": "areal-gym completion fish > ~/.config/fish/completions/areal-gym.fish",
}


class _Bash(BashComplete):
    """click's, but for `trainer.lr=`, where a value follows and no space."""

    source_template = BashComplete.source_template.replace(
        "    return 0\n",
        "    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=:] ]]; then\n"
        "        compopt -o nospace\n"
        "    fi\n\n"
        "    return 0\n",
    )


class _Zsh(ZshComplete):
    """The same for zsh."""

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
    """The script that teaches your shell to complete with TAB; without an argument, for $SHELL.

    Commands and options complete, and so do ids (--env), runs, keys of settings (trainer.lr=) and
    the values of those that have a choice (trainer.algorithm=).
    """
    from areal_gym.cli.app import VARIABLE, app

    name = shell or Path(os.environ.get("SHELL", "")).name
    made = get_completion_class(name) if name in SHELLS else None
    if made is None:
        near = did_you_mean(name, SHELLS) or f"there is: {', '.join(SHELLS)}"
        raise UsageError(f"no completion for the shell {name!r}", hints=[near])
    print_data(made(app, {}, "areal-gym", VARIABLE).source().rstrip())
    if sys.stdout.isatty():
        talk(f"to have it in every shell:  {_PLACES[name]}")
