"""`areal-gym replay`."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click

from areal_gym.cli import complete
from areal_gym.cli.options import (
    PATH,
    POSITIVE,
    Options,
    common_options,
    json_option,
    overrides_argument,
    trust_option,
)
from areal_gym.cli.output import print_data, print_json
from areal_gym.cli.setting_flags import resolve, run_recipe
from areal_gym.config import RunConfig
from areal_gym.errors import UsageError


@click.command("replay")
@click.argument("run", type=PATH, shell_complete=complete.runs)
@overrides_argument
@click.option(
    "--refused", is_flag=True, help="Repeat the step whose loss or gradient was not finite."
)
@click.option("--steps", type=POSITIVE, help="Replay only this many steps.")
@click.option("--out", type=PATH, help="Save metrics and the policy in this directory.")
@trust_option
@json_option()
@common_options
@click.pass_obj
def replay_command(
    options: Options,
    run: Path,
    overrides: tuple[str, ...],
    refused: bool,
    steps: int | None,
    out: Path | None,
    trust: bool,
    as_json: bool,
) -> int:
    """Repeat the training of RUN from its recorded trajectories: no engine, no environment.

    With RUN's own settings the weights must be the same, bit for bit on a CPU; otherwise the exit
    code is 1. With other settings (key=value), it shows their effect on the same experience.

    --refused repeats the one step that ended RUN because its loss or gradient was not finite, from
    the checkpoint before it; the exit code is 1 if it is still not finite.
    """
    recipe = run_recipe(run)
    if overrides and out is None and not refused:
        raise UsageError(
            "other settings give another policy, which needs a directory",
            hints=["name one: --out runs/NAME"],
        )
    config = resolve(file=recipe, overrides=overrides, is_chosen=trust, plays=False)
    if refused:
        return _replay_refused(options, config, run, as_json)

    from areal_gym.runs.live_display import make_display
    from areal_gym.runs.replay import replay

    with contextlib.closing(make_display(is_plain=options.is_plain)) as display:
        report = replay(config, run, out=out, num_steps=steps, display=display)
    if as_json:
        print_json(report.to_dict())
    else:
        print_data(f"{report.num_steps} steps replayed from {run}")
        if report.first_difference is None:
            print_data("loss, gradient norm and reward of every step match the record")
        else:
            print_data(f"the first step that differs from the record: {report.first_difference}")
        if report.max_difference is None:
            print_data("weights not compared: the run has no checkpoint of that step")
        elif report.max_difference == 0:
            print_data(f"weights: identical to {report.checkpoint}, bit for bit")
        else:
            print_data(f"weights differ from {report.checkpoint} by {report.max_difference:.3g}")
    if out is not None:
        print_data(f"policy: {out / 'checkpoints'}")
    return 0 if overrides or report.is_identical else 1


def _replay_refused(options: Options, config: RunConfig, run: Path, as_json: bool) -> int:
    from areal_gym.runs.live_display import make_display
    from areal_gym.runs.replay import replay_refused

    with contextlib.closing(make_display(is_plain=options.is_plain)) as display:
        report = replay_refused(config, run, display=display)
    if as_json:
        print_json(report.to_dict())
    elif report.is_finite:
        print_data(f"step {report.step}: loss {report.loss:g}, gradient norm {report.grad_norm:g}")
    else:
        print_data(f"step {report.step}: {report.reason}")
        for trajectory in report.unscorable:
            print_data(f"  the policy's log-probabilities are not finite: {trajectory}")
    return 0 if report.is_finite else 1
