"""The steps of a run: episodes, updates, publications, and what is written down of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from areal_gym.chat import Renderer
from areal_gym.config import RunConfig
from areal_gym.config.online_settings import ONLINE
from areal_gym.engines.base import Engine, InterruptedEngine
from areal_gym.errors import DivergedError, NotFiniteError, StopTraining
from areal_gym.rollout.batch_metrics import batch_metrics
from areal_gym.rollout.episode_runners import EpisodeRunner, EpisodeSetup
from areal_gym.rollout.journal import Journal
from areal_gym.rollout.runner import GroupSelection, RolloutRunner
from areal_gym.rollout.stats import RolloutStats
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.callbacks import Callbacks
from areal_gym.runs.components import Components, make_curriculum, make_filters
from areal_gym.runs.divergence_guard import DivergenceGuard, NewestRewards
from areal_gym.runs.evaluation import Evaluations
from areal_gym.runs.incidents import IncidentCounter
from areal_gym.runs.logger_threads import Loggers
from areal_gym.runs.run_display import Display
from areal_gym.runs.saving import Saver
from areal_gym.runs.step_times import StepTimes
from areal_gym.runs.teacher import WithTeacher
from areal_gym.runs.waiting import ProgressLine, saying_outages
from areal_gym.sandbox import shared_calls, shared_reports
from areal_gym.types import Group, StopReason
from areal_gym.utils.garbage import relax_garbage_collection
from areal_gym.utils.statistics import rss_mb


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """What a run works with, once all of it has started."""

    config: RunConfig
    display: Display
    callbacks: Callbacks
    directory: RunDir
    parts: Components
    policy: Path
    """The checkpoint that the run began with; its tokenizer goes into others."""
    engine: Engine
    renderer: Renderer
    learner: Any
    weight_sync: Any
    evaluations: Evaluations
    loggers: Loggers
    teacher: Any
    """None unless the objective is distillation."""
    player: EpisodeRunner | None
    """Plays episodes elsewhere; None plays them here."""


async def take_steps(
    at: RunContext, done: int, rollout_state: Mapping[str, Any] | None
) -> tuple[int, float]:
    """Train to the end; saves what was learned, also when it is interrupted.

    Args:
        at: everything that is needed.
        done: steps that were taken before.
        rollout_state: what a checkpoint said of the tasks to come; None at the beginning.

    Returns:
        The last step, and seconds.
    """
    from areal_gym.trainer.loop import train_loop
    from areal_gym.trainer.weight_sync import weights_for

    first_step = done + 1

    async def on_step(step: int, metrics: dict[str, Any], groups: Sequence[Group]) -> None:
        nonlocal done
        done = step
        if step == first_step:
            # By now the episodes have used whatever sandboxes they use.
            reports = [asdict(report) for report in await shared_reports()]
            if reports:
                at.directory.add_provenance(sandboxes=reports)
        stats = runner.stats()
        row = {
            "step": step,
            **metrics,
            **batch_metrics(groups, step - 1),
            **times.measure(stats, metrics),
            **_counters(stats, at.engine),
            **at.loggers.metrics(),
            **newest.take(),
            "memory/rss_mb": rss_mb(),
        }
        row |= incidents.count(row)
        row |= guard.observe(row)
        at.directory.append_metrics(row)
        at.directory.save_trained(at.learner.trained_tokens(), step=step)
        at.directory.save_trajectories((t for group in groups for t in group), name=step)
        at.loggers.log(step, row)
        at.display.step(step, at.config.steps, row)
        at.callbacks.tell("on_step", step, row, groups)
        saver.settle()
        every = at.config.trainer.save_every
        if (every and step % every == 0) or guard.wants_checkpoint:
            await saver.save(step)
        if at.evaluations.is_due(step) and step < at.config.steps:
            await at.evaluations.begin(step)
        at.callbacks.raise_if_stopped()
        guard.raise_if_diverged()

    def on_saved(step: int, state: Mapping[str, Any]) -> None:
        if journal is not None:
            journal.checkpoint(state)
        at.callbacks.tell("on_checkpoint", step, at.directory.checkpoint(step))

    def explain(error: NotFiniteError, step: int, groups: Sequence[Group]) -> NotFiniteError:
        file = at.directory.save_refused((t for group in groups for t in group), step)
        return NotFiniteError(
            f"step {step}: {error.message}",
            hints=[
                f"the batch is in {file}",
                f"take the step again: areal-gym replay {at.directory.path} --refused",
                *error.hints,
            ],
        )

    newest = NewestRewards()
    guard = DivergenceGuard(at.config, at.directory, at.display, at.directory.read_metrics())
    at.display.phase("train", at.config.steps)
    start_s = time.perf_counter()
    # Groups from a journal were sampled in other company: to the last bit, they must be played.
    journal = None if at.config.deterministic else Journal(at.directory.journal_file)
    if journal is not None and journal.num_torn:
        words = f"{journal.num_torn} bytes that a crash has torn are cut off, and kept beside it"
        at.display.say(f"{journal.file.name}: {words}")
    if at.config.deterministic:  # what the engine has cached so far came in any order
        await at.weight_sync.publish(weights_for(at.weight_sync, at.learner), done)
    runner = RolloutRunner(
        EpisodeSetup(
            at.parts.make_env,
            at.parts.agent,
            at.engine,
            at.renderer,
            env_id=at.config.env.id,
            agent_id=at.config.agent.id,
        ),
        at.config.rollout,
        seed=at.config.seed,
        journal=journal,
        state=rollout_state,
        on_trajectory=newest.add,
        is_deterministic=at.config.deterministic,
        episode_runner=at.player,
        selection=GroupSelection(
            curriculum=make_curriculum(at.config), filters=make_filters(at.config)
        ),
    )
    incidents = IncidentCounter()
    if at.config.env.id == ONLINE and isinstance(at.engine, InterruptedEngine):
        at.engine.fails_lost_turns = False  # who plays is elsewhere, and waits for the turn
    times = StepTimes(at.config.rollout.max_in_flight, runner.stats())
    saver = Saver(
        at.learner,
        at.directory,
        at.policy,
        runner.state,
        on_saved=on_saved,
        scores=at.evaluations.scores,
        num_kept=at.config.trainer.keep_checkpoints,
        protected=lambda: guard.protected,
        saved_step=done or None,
    )
    collect_as_before = relax_garbage_collection()
    try:
        at.callbacks.raise_if_stopped()
        async with runner, AsyncExitStack() as stack:
            calls = partial(shared_calls, asyncio.get_running_loop())
            at.display.watch(ProgressLine(runner.stats, at.config.rollout.batch_groups, calls))
            await stack.enter_async_context(saying_outages(runner.stats, at.display.say))
            await train_loop(
                runner if at.teacher is None else WithTeacher(runner, at.teacher),
                at.learner,
                at.weight_sync,
                num_steps=at.config.steps,
                first_step=first_step,
                on_step=on_step,
                explain=explain,
                num_threads=at.config.trainer.num_threads,
                engine=at.engine,
                outage_patience_s=at.config.rollout.outage_patience_s,
            )
        saver.save_now(done)
    except StopTraining as stop:
        at.display.say(f"stopped after step {done}, as a callback wanted: {stop}")
        saver.save_now(done)
    except (asyncio.CancelledError, Exception) as error:
        if done:
            saver.save_now(done)
            at.display.say(f"stopped after step {done}; what was learned is in {at.directory.path}")
            if at.directory.is_intact and not isinstance(error, DivergedError):
                at.display.say(f"go on with: areal-gym train --resume --out {at.directory.path}")
        raise
    finally:
        collect_as_before()
        at.display.watch(None)
        saver.close()
        if journal is not None:
            journal.close()
    return done, time.perf_counter() - start_s


def _counters(stats: RolloutStats, engine: Engine) -> dict[str, float]:
    """What has been counted since the start (of this process, after a resume)."""
    found: dict[str, float] = {
        "rollout/failed_groups": stats.num_groups_failed,
        "rollout/stale_groups": stats.num_groups_stale,
        "rollout/acceptance": stats.acceptance_rate,
        "rollout/retries": stats.num_retries,
        "rollout/lost_episodes": stats.num_lost,
        "rollout/replayed_groups": stats.num_replayed_groups,
        "rollout/groups_ready": stats.groups_ready,
        "rollout/episodes_queued": stats.episodes_queued,
        "rollout/oldest_ready_s": stats.oldest_ready_s,
    }
    for name, count in stats.num_groups_rejected.items():
        found[f"rollout/rejected/{name}"] = count
    for reason in StopReason:
        if reason.is_failure:
            found[f"rollout/failures/{reason}"] = stats.num_failures.get(reason, 0)
    counters = getattr(engine, "stats", None)
    if is_dataclass(counters):
        found |= {f"engine/{f.name}": getattr(counters, f.name) for f in fields(counters)}
    return {name: float(value) for name, value in found.items()}
