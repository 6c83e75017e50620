"""`areal-gym train`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal_gym.cli import complete
from areal_gym.cli.output import Options, common_options, print_data
from areal_gym.config.objective_settings import OBJECTIVES
from areal_gym.errors import GymError, UsageError

if TYPE_CHECKING:
    from areal_gym.run_dir.run_dir import RunDir, RunMode
    from areal_gym.runs.live_display import Examples


@click.command("train")
@click.argument("overrides", nargs=-1, metavar="[key=value]...", shell_complete=complete.settings)
@click.option(
    "--env",
    multiple=True,
    shell_complete=complete.ids("envs"),
    help="The environment's id (areal-gym list envs); again, with weights, to mix: A:0.7, B:0.3.",
)
@click.option(
    "--objective",
    shell_complete=complete.one_of(*OBJECTIVES),
    help="What is learned: rl (a reward), sft, dpo, rm or distill [rl].",
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
@click.option("--steps", type=int, help="Training steps.")
@click.option("--seed", type=int, help="Of tasks, sampling and the model.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    shell_complete=complete.runs,
    help="The run's directory [runs/ENV-DATE-TIME].",
)
@click.option("--resume", is_flag=True, help="Continue the run in --out.")
@click.option(
    "--from-step", type=int, help="With --resume: the checkpoint to go on from [the newest]."
)
@click.option(
    "--trust", is_flag=True, help="Follow all settings of the run: its author may start programs."
)
@click.option("--clean", is_flag=True, help="Replace the run in --out.")
@click.option(
    "--show-every",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="STEPS",
    help="On a terminal: how often the best and the worst trajectory are shown; 0 is never.",
)
@click.option("--dry-run", is_flag=True, help="Print the settings and what a step amounts to.")
@common_options
@click.pass_obj
def train_command(
    options: Options,
    overrides: tuple[str, ...],
    env: tuple[str, ...],
    objective: str | None,
    recipe: Path | None,
    agent: str | None,
    engine: str | None,
    engine_url: tuple[str, ...],
    steps: int | None,
    seed: int | None,
    out: Path | None,
    resume: bool,
    from_step: int | None,
    trust: bool,
    clean: bool,
    show_every: int,
    dry_run: bool,
) -> None:
    """Improve a policy in an environment, or from data.

    key=value sets anything: areal-gym train --env tir trainer.lr=1e-4 env.kwargs.level=3

    With --objective sft, dpo or rm it learns from data.file=FILE (JSON lines), else from the
    environment's demonstrators; with distill from teacher.model=DIR, in episodes.

    The order of precedence is: defaults, the recipe, flags, key=value.
    """
    from areal_gym.cli.setting_flags import describe, env_flags, require_env, resolve, to_yaml
    from areal_gym.config import require_plain_sampling
    from areal_gym.run_dir.run_dir import RunDir
    from areal_gym.run_dir.run_list import run_path

    mode = _mode(resume, clean, out)
    if from_step is not None and not resume:
        raise UsageError("--from-step goes with --resume: it says where to go on")
    is_chosen = True
    if mode == "resume" and recipe is None:
        assert out is not None
        recipe, is_chosen = RunDir(out).recipe(), trust
    if not dry_run and not any(text.startswith("data.file=") for text in overrides):
        require_env(env, recipe, overrides)
    config = resolve(
        file=recipe,
        overrides=overrides,
        is_chosen=is_chosen,
        objective=objective,
        **env_flags(env),
        agent__id=agent,
        engine__id=engine,
        engine__url=engine_url or None,
        steps=steps,
        seed=seed,
    )
    if dry_run:
        require_plain_sampling(config)
        for line in describe(config).splitlines():
            print_data(f"# {line}")
        print_data(to_yaml(config).rstrip())
        return

    from areal_gym.runs.live_display import make_display
    from areal_gym.runs.train import train

    with run_path(out, config.label) as run_dir:
        examples = _examples(RunDir(run_dir), show_every)
        display = make_display(is_plain=options.is_plain, examples=examples)
        try:
            train(config, run_dir=run_dir, mode=mode, from_step=from_step, display=display)
        finally:
            display.close()


def _examples(run_dir: RunDir, every: int) -> Examples:
    """The best and the worst trajectory of every N-th step, from the run's record."""
    from areal_gym.report.content import best_and_worst

    def examples(step: int) -> Sequence[tuple[str, Mapping[str, Any]]]:
        file = run_dir.trajectories_dir / f"step-{step:06d}.jsonl"
        if not every or step % every:
            return ()
        try:
            return best_and_worst(file, 1)
        except (GymError, OSError):  # nothing to look at, which is no reason to stop training
            return ()

    return examples


def _mode(resume: bool, clean: bool, out: Path | None) -> RunMode:
    if resume and clean:
        raise UsageError("--resume and --clean exclude each other")
    if (resume or clean) and out is None:
        flag = "--resume" if resume else "--clean"
        raise UsageError(
            f"{flag} needs the run's directory",
            hints=[f"name it: {flag} --out runs/NAME", "all of them: areal-gym list runs"],
        )
    return "resume" if resume else "clean" if clean else "new"
