"""`areal-gym eval`."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from areal_gym.cli import complete
from areal_gym.cli.output import Options, common_options, print_data, print_json, talk
from areal_gym.errors import UsageError, did_you_mean


@click.command("eval")
@click.argument("overrides", nargs=-1, metavar="[key=value]...", shell_complete=complete.settings)
@click.option(
    "--env",
    multiple=True,
    shell_complete=complete.ids("envs"),
    help="The environment's id (areal-gym list envs); again, with weights, to mix: A:0.7, B:0.3.",
)
@click.option(
    "-c", "--config", "recipe", type=click.Path(path_type=Path), help="A recipe: settings as YAML."
)
@click.option(
    "--agent", shell_complete=complete.ids("agents"), help="The agent's id (areal-gym list agents)."
)
@click.option(
    "--engine",
    shell_complete=complete.ids("engines"),
    help="The engine's id (areal-gym list engines).",
)
@click.option(
    "--engine.url", "engine_url", multiple=True, help="A server of the engine; several: again."
)
@click.option(
    "--run",
    type=click.Path(path_type=Path),
    shell_complete=complete.runs,
    help="A run: its newest checkpoint.",
)
@click.option("--checkpoint", type=click.Path(path_type=Path), help="A checkpoint's directory.")
@click.option("--model", help="A directory, 'starter', or a server's URL (OpenAI's API).")
@click.option(
    "--trust", is_flag=True, help="Follow all settings of the run: its author may start programs."
)
@click.option("-n", "num_tasks", type=click.IntRange(min=1), help="Held-out tasks.")
@click.option("-k", "num_samples", type=click.IntRange(min=1), help="Episodes per task.")
@click.option("--greedy", is_flag=True, help="Take the likeliest token instead of sampling.")
@click.option("--split", help="Which tasks; what there is says areal-gym show ENV.")
@click.option("--seed", type=int, help="Of tasks and sampling.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Where trajectories are written [the run, or runs/eval-ENV-DATE-TIME].",
)
@click.option(
    "--fail-under", metavar="[METRIC=]X", help="Exit with 1 when it (default: pass@1) is below X."
)
@common_options
@click.pass_obj
def eval_command(
    options: Options,
    overrides: tuple[str, ...],
    env: tuple[str, ...],
    recipe: Path | None,
    agent: str | None,
    engine: str | None,
    engine_url: tuple[str, ...],
    run: Path | None,
    checkpoint: Path | None,
    model: str | None,
    trust: bool,
    num_tasks: int | None,
    num_samples: int | None,
    greedy: bool,
    split: str | None,
    seed: int | None,
    as_json: bool,
    out: Path | None,
    fail_under: str | None,
) -> int:
    """Measure a policy on held-out tasks: pass@1 and pass@k with 95% intervals, and what failed.

    With --run, the settings are those of the run; without --run, --checkpoint and --model, the
    policy is the one that a run would start with. A URL as --model is asked in messages; its key is
    OPENAI_API_KEY, and engine.kwargs.model=NAME the model's name there.
    """
    from areal_gym.cli.setting_flags import (
        env_flags,
        existing,
        newest_checkpoint,
        require_env,
        resolve,
    )
    from areal_gym.run_dir.run_list import new_run_path

    bar = _parse_bar(fail_under)
    if sum(given is not None for given in (run, checkpoint, model)) > 1:
        raise UsageError("--run, --checkpoint and --model exclude each other")
    is_chosen = trust or recipe is not None
    if run is not None:
        recipe = recipe or existing(run / "config.yaml", f"{run} holds no run")
        checkpoint = newest_checkpoint(run)
    elif checkpoint is not None:
        existing(checkpoint / "config.json", f"{checkpoint} holds no checkpoint")
    require_env(env, recipe, overrides)
    config = resolve(
        file=recipe,
        overrides=overrides,
        is_chosen=is_chosen,
        **env_flags(env),
        agent__id=agent,
        engine__id=engine,
        engine__url=engine_url or None,
        engine__model=model,
        eval__num_tasks=num_tasks,
        eval__num_samples=num_samples,
        eval__split=split,
        seed=seed,
    )

    if bar is not None:
        _require_known(bar[0], config.eval.num_samples)

    from areal_gym.runs.evaluation import evaluate
    from areal_gym.runs.live_display import make_display

    display = make_display(is_plain=options.is_plain)
    place = out or run or new_run_path(f"eval-{config.env.id}")
    try:
        report = evaluate(
            config,
            checkpoint=checkpoint,
            out=place,
            num_tasks=config.eval.num_tasks,
            num_samples=config.eval.num_samples,
            greedy=greedy,
            display=display,
        )
    finally:
        display.close()
        # A name that was reserved for trajectories that never came.
        with contextlib.suppress(OSError):
            place.rmdir()
    numbers = report.to_dict()
    if as_json:
        print_json(numbers)
    else:
        print_data(report.to_text())
    code = 0 if bar is None else _judge(numbers, *bar)
    talk(f"see them: areal-gym view {shlex.quote(str(place))}")
    return code


def _parse_bar(text: str | None) -> tuple[str, float] | None:
    if text is None:
        return None
    metric, separator, raw = text.rpartition("=")
    try:
        return (metric if separator else "pass@1"), float(raw)
    except ValueError:
        raise UsageError(
            f"--fail-under {text!r} names no number", hints=["like --fail-under pass@1=0.8"]
        ) from None


def _require_known(metric: str, num_samples: int) -> None:
    """Refuse a metric that no evaluation has, before anything has been waited for."""
    ks = [2**i for i in range(num_samples.bit_length())]
    names = [f"pass@{k}{bound}" for k in ks for bound in ("", "_low", "_high")]
    names += [f"pass^{k}" for k in ks]
    names += ["reward", "mean_turns", "mean_policy_tokens", "num_episodes"]
    if metric not in names:
        near = did_you_mean(metric, names)
        hints = [*([near] if near else []), f"there is: {', '.join(names)}"]
        raise UsageError(f"--fail-under: no metric {metric!r}", hints=hints)


def _judge(numbers: Mapping[str, Any], metric: str, least: float) -> int:
    """The exit code: 1 when the metric is below the bar."""
    if numbers[metric] >= least:
        return 0
    talk(f"areal-gym: {metric} is {numbers[metric]:.4f}, below {least:g}")
    return 1
