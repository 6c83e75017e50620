"""`areal-gym train`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml

from areal_gym.cli import complete
from areal_gym.cli.options import (
    PATH,
    Options,
    common_options,
    mixed_env_option,
    overrides_argument,
    recipe_option,
    trust_option,
)
from areal_gym.cli.output import print_data
from areal_gym.cli.own_task import own_arguments, own_task_options, require_named_model
from areal_gym.cli.setting_flags import resolve, setting_flags, task_flags
from areal_gym.config import RunConfig, require_plain_sampling
from areal_gym.config.algorithm_settings import PRESETS
from areal_gym.config.objective_settings import OBJECTIVES, SUPERVISED
from areal_gym.errors import GymError, UsageError
from areal_gym.run_dir.provenance import entries_used

if TYPE_CHECKING:
    from areal_gym.run_dir.run_dir import RunDir, RunMode
    from areal_gym.runs.live_display import Examples


@click.command("train")
@overrides_argument
@mixed_env_option
@own_task_options
@recipe_option
@setting_flags(
    {
        "--model": "engine.model",
        "--objective": "objective",
        "--agent": "agent.id",
        "--engine": "engine.id",
        "--engine.url": "engine.url",
        "--steps": "steps",
        "--seed": "seed",
    }
)
@click.option(
    "--out", type=PATH, shell_complete=complete.runs, help="The run directory [runs/ENV-DATE-TIME]."
)
@click.option("--resume", is_flag=True, help="Continue the run in --out.")
@click.option(
    "--from-step", type=int, help="With --resume: the checkpoint to continue from [the newest]."
)
@trust_option
@click.option("--clean", is_flag=True, help="Replace the run in --out.")
@click.option(
    "--show-every",
    type=click.IntRange(min=0),
    default=10,
    metavar="STEPS",
    help="On a terminal: steps between two displays of the best and worst trajectory; 0 is never.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the settings and the size of a step, open --data and --reward, and do not train.",
)
@common_options
@click.pass_obj
def train_command(
    options: Options,
    overrides: tuple[str, ...],
    env: tuple[str, ...],
    data: str | None,
    reward: tuple[str, ...],
    tools: tuple[str, ...],
    recipe: Path | None,
    flags: Mapping[str, Any],
    out: Path | None,
    resume: bool,
    from_step: int | None,
    trust: bool,
    clean: bool,
    show_every: int,
    dry_run: bool,
) -> None:
    """Train a policy in an environment, on your own prompts, or on data.

    Your prompts and reward: areal-gym train --data prompts.jsonl --reward rewards.py:exact --model
    Qwen/Qwen3-0.6B

    key=value sets any setting: areal-gym train --env tir trainer.lr=1e-4 env.kwargs.level=3

    With --objective sft, dpo or rm, the policy learns from data.file=FILE (JSON lines) or from the
    environment's demonstrators; with distill, from teacher.model=DIR, in episodes.

    Precedence, lowest first: defaults, the recipe, flags, key=value.
    """
    from areal_gym.run_dir.run_dir import RunDir
    from areal_gym.run_dir.run_list import run_path

    mode = _mode(resume, clean, out)
    if from_step is not None and not resume:
        raise UsageError("--from-step needs --resume")
    is_chosen = True
    if mode == "resume" and recipe is None:
        assert out is not None
        recipe, is_chosen = RunDir(out).recipe(), trust
    has_file = any(text.startswith("data.file=") for text in overrides)
    own = own_arguments(data, reward, tools)
    flags = task_flags(env, own, flags, recipe, overrides, needs_env=not dry_run and not has_file)
    config = resolve(file=recipe, overrides=overrides, flags=flags, is_chosen=is_chosen)
    require_named_model(config, flags, overrides, recipe)
    if dry_run:
        from areal_gym.runs.early_checks import require_algorithm

        require_plain_sampling(config)
        require_algorithm(config)
        _check_fixed_roles(config)
        for line in [*_describe(config), *(_describe_own_tasks(config) if own else ())]:
            print_data(f"# {line}")
        print_data(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).rstrip())
        return

    from areal_gym.runs.live_display import make_display
    from areal_gym.runs.train import train

    with run_path(out, config.label) as run_dir:
        examples = _examples(RunDir(run_dir), show_every)
        live = make_display(is_plain=options.is_plain, examples=examples)
        with contextlib.closing(live) as display:
            train(config, run_dir=run_dir, mode=mode, from_step=from_step, display=display)


def _examples(run_dir: RunDir, every: int) -> Examples:
    """Return a function that reads the best and the worst trajectory of every N-th step."""
    from areal_gym.report.content import best_and_worst

    def examples(step: int) -> Sequence[tuple[str, Mapping[str, Any]]]:
        file = run_dir.trajectories_dir / f"step-{step:06d}.jsonl"
        if not every or step % every:
            return ()
        try:
            return best_and_worst(file, 1)
        except (GymError, OSError):  # training goes on without examples
            return ()

    return examples


def _mode(resume: bool, clean: bool, out: Path | None) -> RunMode:
    if resume and clean:
        raise UsageError("--resume and --clean exclude each other")
    if (resume or clean) and out is None:
        flag = "--resume" if resume else "--clean"
        raise UsageError(
            f"{flag} needs the run directory",
            hints=[f"name it: {flag} --out runs/NAME", "see all: areal-gym list runs"],
        )
    return "resume" if resume else "clean" if clean else "new"


# ---- --dry-run ---------------------------------------------------------------------------------


def _describe(config: RunConfig) -> list[str]:
    lines = _describe_supervised(config) if config.objective in SUPERVISED else _describe_rl(config)
    lines += _describe_memory(config)
    if config.objective != "rl":
        lines.insert(0, f"objective: {config.objective}: {OBJECTIVES[config.objective]}")
    lines += [
        f"{entry.spec.kind}: {entry.id}, from {entry.plugin.source}"
        for entry in entries_used(config)
    ]
    return lines


def _check_fixed_roles(config: RunConfig) -> None:
    """Make the environment and the policies of fixed roles, as a run does, if there are any."""
    from areal_gym.runs.components import Components

    has_fixed_roles = bool(config.env.fixed_roles or config.eval.fixed_roles)
    if has_fixed_roles and config.objective not in SUPERVISED:
        Components.of(config)


def _describe_own_tasks(config: RunConfig) -> list[str]:
    """Open the user's data and rewards, to report their errors before a run starts."""
    from areal_gym.runs.components import Components
    from areal_gym.runs.task_counts import announce_tasks

    lines: list[str] = []
    if config.objective not in SUPERVISED:
        announce_tasks(config, Components.of(config), lines.append)
    return lines


def _describe_memory(config: RunConfig) -> list[str]:
    if config.engine.model == "starter":
        return []  # it fits anywhere
    if find_spec("torch") is None or find_spec("transformers") is None:
        return ["memory: not estimated, because torch or transformers is not installed"]
    from areal_gym.plan.plan_lines import describe_memory

    return describe_memory(config)


def _describe_supervised(config: RunConfig) -> list[str]:
    data, demonstrators = config.data, f"the demonstrators of {config.env.id}"
    source = data.file or f"{data.num_examples:,} examples from {demonstrators}"
    num_shown = f"{config.steps * data.batch_size:,}"
    return [
        f"per step: {data.batch_size} examples, micro-batches of "
        f"{config.trainer.tokens_per_microbatch:,} tokens; 1 optimizer update",
        f"the run:  {config.steps} steps = {num_shown} examples, from {source}",
    ]


def _describe_rl(config: RunConfig) -> list[str]:
    rollout, trainer = config.rollout, config.trainer
    num_trajectories = rollout.batch_groups * rollout.group_size
    most_tokens = num_trajectories * config.engine.max_context
    num_microbatches = math.ceil(most_tokens / trainer.tokens_per_microbatch)
    updates = f"{trainer.minibatches} optimizer update{'s' * (trainer.minibatches > 1)}"
    return [
        f"per step: {rollout.batch_groups} groups x {rollout.group_size} = {num_trajectories} "
        f"trajectories, at most {most_tokens:,} tokens = {num_microbatches} micro-batches of "
        f"{trainer.tokens_per_microbatch:,}; {updates}",
        f"the run:  {config.steps} steps = {config.steps * num_trajectories:,} trajectories; "
        f"{rollout.max_in_flight} in flight, staleness at most {rollout.max_staleness}",
        f"algorithm: {trainer.algorithm}, {PRESETS[trainer.algorithm].summary}",
    ]
