"""`areal-gym doctor`, `areal-gym bench` and `areal-gym completion`."""

from __future__ import annotations

import dataclasses
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
from areal_gym.cli.options import common_options, json_option
from areal_gym.cli.output import print_columns, print_data, print_json, talk
from areal_gym.errors import UsageError, choices


@click.command("doctor")
@json_option()
@common_options
def doctor_command(as_json: bool) -> int:
    """Check what works on this machine; for what is missing, say what to type.

    Exit code 1 if something required is missing.
    """
    from areal_gym.runs.machine_report import examine

    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            status = "ok" if finding.is_ok else "MISSING" if finding.is_required else "missing"
            rows = [(f"{finding.subject:<15}", f"{status:<7}", finding.detail)]
            if finding.advice:
                rows.append(("", "", f"-> {finding.advice}"))
            print_columns(rows)
            sys.stdout.flush()  # the next check may take a while
    missing = [finding for finding in findings if not finding.is_ok]
    is_broken = any(finding.is_required for finding in missing)
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        optional = "; what is missing is optional" if missing else ""
        talk("see MISSING above" if is_broken else f"everything required is here{optional}")
    return int(is_broken)


BENCHES = ("rollout", "env", "sandbox", "engine", "step")
_SLOW, _FAST = 0.7, 1.4
"""Ratios in between count as equal: machines are noisy."""


@click.command("bench")
@click.argument(
    "parts", nargs=-1, metavar=f"[{'|'.join(BENCHES)}]...", shell_complete=complete.one_of(*BENCHES)
)
@click.option(
    "--env",
    shell_complete=complete.ids("envs"),
    default="tir",
    help="The environment of the part `env`.",
)
@json_option()
@common_options
def bench_command(parts: tuple[str, ...], env: str, as_json: bool) -> None:
    """Measure the speed of each part of a run on this machine: half a minute for all parts.

    rollout: episodes with a scripted policy; env: the environment alone (--env dice);
    sandbox: a snippet of code in its own process; engine: sampling; step: one training step.
    Each is compared with the figure in docs/performance.md: two shared cores, one thread, no GPU.
    """
    from areal_gym.runs.speed import WITH_TORCH, Figure, bench

    figures: list[Figure] = []
    for figure in bench(parts, env=env):
        figures.append(figure)
        talk(f"{figure.part}: {figure.what.strip()}: {_number(figure.value)} {figure.unit}")
    if as_json:
        print_json([dataclasses.asdict(figure) | {"speed": figure.speed} for figure in figures])
        return
    rows = [("", "measured", "", "reference", "ratio")]
    for figure in figures:
        reference = "" if figure.reference is None else _number(figure.reference).rjust(6)
        measured = _number(figure.value).rjust(8)
        rows.append((figure.what, measured, figure.unit, reference, _verdict(figure.speed)))
    print_columns(rows)
    if not parts and not any(figure.part in WITH_TORCH for figure in figures):
        talk(f"not measured without torch: {', '.join(WITH_TORCH)}; pip install 'areal-gym[train]'")
    load, num_cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > num_cores + 1:
        talk(f"the machine is busy (load {load:.1f} on {num_cores} cores): measure again later")
    slow = [figure.part for figure in figures if figure.speed is not None and figure.speed < _SLOW]
    if "sandbox" in slow:
        talk("sandbox: areal-gym doctor says what it can use on this machine")


def _verdict(speed: float | None) -> str:
    if speed is None:
        return ""
    word = "slow" if speed < _SLOW else "fast" if speed > _FAST else "ok"
    return f"{speed:.2f}x, {word}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_INSTALL = {
    "bash": "echo 'eval \"$(areal-gym completion bash)\"' >> ~/.bashrc",
    "zsh": "echo 'eval \"$(areal-gym completion zsh)\"' >> ~/.zshrc",
    "fish": "areal-gym completion fish > ~/.config/fish/completions/areal-gym.fish",
}
"""How to install the script of each shell."""


# In both shells, completion adds no space after `trainer.lr=`, because the value comes next.
class _Bash(BashComplete):
    source_template = BashComplete.source_template.replace(
        "    return 0\n",
        "    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=:] ]]; then\n"
        "        compopt -o nospace\n"
        "    fi\n\n"
        "    return 0\n",
    )


class _Zsh(ZshComplete):
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
    metavar=f"[{'|'.join(_INSTALL)}]",
    shell_complete=complete.one_of(*_INSTALL),
)
@common_options
def completion_command(shell: str | None) -> None:
    """Print the script for TAB completion in your shell; by default the shell in $SHELL.

    It completes commands, options, ids (--env), runs, keys of settings (trainer.lr=) and the values
    of settings with a fixed choice (trainer.algorithm=).
    """
    from areal_gym.cli.app import VARIABLE, app

    name = shell or Path(os.environ.get("SHELL", "")).name
    completion = get_completion_class(name) if name in _INSTALL else None
    if completion is None:
        raise UsageError(f"no completion for the shell {name!r}", hints=choices(name, _INSTALL))
    print_data(completion(app, {}, "areal-gym", VARIABLE).source().rstrip())
    if sys.stdout.isatty():
        talk(f"to install it:  {_INSTALL[name]}")
