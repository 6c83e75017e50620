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
    help="What the part `env` plays.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@common_options
def bench_command(parts: tuple[str, ...], env: str, as_json: bool) -> None:
    """How fast is this machine at each part of a run? Half a minute for all of them.

    rollout: episodes against a scripted policy; env: an environment's own pace (--env dice);
    sandbox: a snippet of code in a process of its own; engine: sampling; step: one training step.
    Each is set beside the figure of README's "Speed": two shared cores, one thread, no GPU.
    """
    from areal_gym.runs.speed import WITH_TORCH, Figure, bench

    figures: list[Figure] = []
    for figure in bench(parts, env=env):
        figures.append(figure)
        talk(f"{figure.part}: {figure.what.strip()}: {_number(figure.value)} {figure.unit}")
    if as_json:
        print_json([dataclasses.asdict(one) | {"speed": one.speed} for one in figures])
        return
    rows = [("", "measured", "", "README", "next to it")]
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
        talk(f"other work is going on here (load {load:.1f} on {num_cores} cores): measure again")
    slow = [one for one in figures if one.speed is not None and one.speed < _SLOW]
    if any(one.part == "sandbox" for one in slow):
        talk("sandbox: what it can use here, and what is missing: areal-gym doctor")


_SLOW, _FAST = 0.7, 1.4
"""What lies between is as good as the same: machines are noisy."""


def _verdict(speed: float | None) -> str:
    if speed is None:
        return ""
    word = "slow" if speed < _SLOW else "fast" if speed > _FAST else "ok"
    return f"{speed:.2f}x, {word}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
