"""`areal-gym bench`."""

from __future__ import annotations

import dataclasses
import os

import click

from areal_gym.cli import complete
from areal_gym.cli.output import common_options, print_columns, print_json, talk

_NAMES = ("rollout", "env", "sandbox", "engine", "step")


@click.command("bench")
@click.argument(
    "parts", nargs=-1, metavar=f"[{'|'.join(_NAMES)}]...", shell_complete=complete.one_of(*_NAMES)
)
@click.option(
    "--env",
    shell_complete=complete.ids("envs"),
    default="tir",
    show_default=True,
    help="The environment of the part `env`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@common_options
def bench_command(parts: tuple[str, ...], env: str, as_json: bool) -> None:
    """Measure the speed of each part of a run on this machine: half a minute for all parts.

    rollout: episodes with a scripted policy; env: the environment alone (--env dice);
    sandbox: a snippet of code in its own process; engine: sampling; step: one training step.
    Each is compared with the figure in README's "Speed": two shared cores, one thread, no GPU.
    """
    from areal_gym.runs.speed import WITH_TORCH, Figure, bench

    figures: list[Figure] = []
    for figure in bench(parts, env=env):
        figures.append(figure)
        talk(f"{figure.part}: {figure.what.strip()}: {_number(figure.value)} {figure.unit}")
    if as_json:
        print_json([dataclasses.asdict(one) | {"speed": one.speed} for one in figures])
        return
    rows = [("", "measured", "", "README", "ratio")]
    rows += [
        (
            one.what,
            _number(one.value).rjust(8),
            one.unit,
            "" if one.reference is None else _number(one.reference).rjust(6),
            _verdict(one.speed),
        )
        for one in figures
    ]
    print_columns(rows)
    if not parts and not any(one.part in WITH_TORCH for one in figures):
        talk(f"not measured without torch: {', '.join(WITH_TORCH)}; pip install 'areal-gym[train]'")
    load, num_cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > num_cores + 1:
        talk(f"the machine is busy (load {load:.1f} on {num_cores} cores): measure again later")
    slow = [one for one in figures if one.speed is not None and one.speed < _SLOW]
    if any(one.part == "sandbox" for one in slow):
        talk("sandbox: areal-gym doctor says what it can use on this machine")


_SLOW, _FAST = 0.7, 1.4
"""Ratios in between count as equal: machines are noisy."""


def _verdict(speed: float | None) -> str:
    if speed is None:
        return ""
    word = "slow" if speed < _SLOW else "fast" if speed > _FAST else "ok"
    return f"{speed:.2f}x, {word}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
