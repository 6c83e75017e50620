"""Batches from rollouts, and the records of each: metrics, trajectories, incidents."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from areal_gym.config.online_settings import ONLINE
from areal_gym.engines.base import CountingEngine, Engine, InterruptedEngine
from areal_gym.errors import NotFiniteError
from areal_gym.rollout.episode_runners import EpisodeRunner, EpisodeSetup
from areal_gym.rollout.journal import BackgroundJournal
from areal_gym.rollout.runner import RolloutRunner
from areal_gym.rollout.stats import RolloutStats, batch_metrics
from areal_gym.runs.components import make_curriculum, make_filters
from areal_gym.runs.divergence_guard import DivergenceGuard, NewestRewards
from areal_gym.runs.incidents import IncidentCounter
from areal_gym.runs.preparation import PreparedRun
from areal_gym.runs.run_context import BatchStream
from areal_gym.runs.waiting import ProgressLine, saying_outages
from areal_gym.sandbox import shared_calls, shared_reports
from areal_gym.types import Group, StopReason
from areal_gym.utils.background_writer import BackgroundWriter
from areal_gym.utils.command_words import quoted
from areal_gym.utils.garbage import relax_garbage_collection
from areal_gym.utils.statistics import rss_mb

if TYPE_CHECKING:
    from areal_gym.runs.teacher import Annotate
    from areal_gym.trainer.base import GroupTrainer
    from areal_gym.trainer.update import WeightPublisher


class RolloutBatches(BatchStream[Group]):
    """Plays episodes while it is open, and returns groups as batches.

    Args:
        prepared: the run.
        setup: environment, agent, engine and renderer of the episodes.
        trainer: trains on the batches.
        publisher: publishes weights to servers that come back.
        annotate: adds a teacher's log-probabilities, or other values, to the groups.
        episode_runner: plays episodes in other processes; None plays them here.
        state: the rollouts' state in the checkpoint from which the run continues.
    """

    guard: DivergenceGuard

    def __init__(
        self,
        prepared: PreparedRun,
        setup: EpisodeSetup,
        trainer: GroupTrainer,
        publisher: WeightPublisher,
        annotate: Annotate | None,
        episode_runner: EpisodeRunner | None,
        state: Mapping[str, Any] | None,
    ) -> None:
        config, directory = prepared.config, prepared.directory
        self._prepared = prepared
        self._engine = setup.engine
        self._trainer = trainer
        self._publisher = publisher
        self._annotate = annotate
        self._first_step = prepared.step + 1
        self._open = AsyncExitStack()
        self._newest = NewestRewards()
        self._incidents = IncidentCounter()
        self._writer = BackgroundWriter("trajectories")
        self.guard = DivergenceGuard(config, directory, prepared.display, directory.read_metrics())
        self._journal = self._open_journal()
        if config.env.id == ONLINE and isinstance(setup.engine, InterruptedEngine):
            setup.engine.fails_lost_turns = False  # the user of an online run waits for the turn
        self._runner = RolloutRunner(
            setup,
            config.rollout,
            seed=config.seed,
            curriculum=make_curriculum(config),
            filters=make_filters(config),
            journal=self._journal,
            state=state,
            on_trajectory=self._newest.add,
            on_dropped_task=self._say_dropped,
            is_deterministic=config.deterministic,
            episode_runner=episode_runner,
        )
        self._times = StepTimes(config.rollout.max_in_flight, self._runner.stats())

    def _say_dropped(self, task_id: str, error: str) -> None:
        line = f"dropped from this run: the task {task_id}, whose verifier gave no reward: {error}"
        self._prepared.directory.append_log(line)
        self._prepared.display.say(line)

    def _open_journal(self) -> BackgroundJournal | None:
        if self._prepared.config.deterministic:
            # Episodes depend on what was sampled beside them, to the last bit: all must be played.
            return None
        journal = BackgroundJournal(self._prepared.directory.journal_file)
        if journal.num_torn:
            self._prepared.display.say(
                f"{journal.file.name}: {journal.num_torn} bytes of an unfinished line, left by a "
                f"crash, are moved to {journal.file.name}.torn"
            )
        return journal

    async def __aenter__(self) -> Self:
        prepared, runner = self._prepared, self._runner
        if prepared.config.deterministic:  # empties the engine's cache, whose order is arbitrary
            await self._publisher.publish(self._first_step - 1)
        async with AsyncExitStack() as stack:
            stack.callback(relax_garbage_collection())
            stack.callback(prepared.display.watch, None)
            await stack.enter_async_context(runner)
            calls = partial(shared_calls, asyncio.get_running_loop())
            line = ProgressLine(runner.stats, prepared.config.rollout.batch_groups, calls)
            prepared.display.watch(line)
            await stack.enter_async_context(saying_outages(runner.stats, prepared.display.say))
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._open.aclose()

    async def next_batch(self, version: int) -> Sequence[Group]:
        """Return the next groups, annotated if the run has a teacher."""
        return await self._publisher.publish_while(self._next_groups(), version)

    async def _next_groups(self) -> Sequence[Group]:
        groups = await self._runner.next_batch()
        return groups if self._annotate is None else await self._annotate(groups)

    def metrics(self, step: int, batch: Sequence[Group], row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics of rollouts, engine, loggers, incidents and guard."""
        stats = self._runner.stats()
        rollout_metrics: dict[str, Any] = {
            "rollout/tokens_per_s": row["rollout/tokens"] / row["time/step_s"],
            **batch_metrics(batch, step - 1),
            **self._times.measure(stats, row),
            **_counters(stats, self._engine),
            **self._prepared.loggers.metrics(),
            **self._newest.take(),
            "memory/rss_mb": rss_mb(),
        }
        rollout_metrics |= self._incidents.count({**row, **rollout_metrics})
        return rollout_metrics | self.guard.observe({**row, **rollout_metrics})

    async def save(self, step: int, batch: Sequence[Group]) -> Sequence[Group]:
        """Start to write the trajectories, with the trainer's values for their tokens."""
        trained = await asyncio.to_thread(self._trainer.trained_tokens)
        await self._writer.write(partial(self._write, step, trained, batch))
        return batch

    def _write(
        self, step: int, trained: Sequence[Mapping[str, Any]], batch: Sequence[Group]
    ) -> None:
        directory = self._prepared.directory
        directory.save_trained(trained, step=step)
        directory.save_trajectories((t for group in batch for t in group), name=step)

    def finish_saving(self) -> None:
        """Block until the trajectories and the journal's lines are on disk."""
        self._writer.finish()
        if self._journal is not None:
            self._journal.finish()

    async def after_record(self, step: int) -> None:
        """Record the sandboxes after the first step, when episodes have started them."""
        if step == self._first_step:
            reports = [asdict(report) for report in await shared_reports()]
            if reports:
                self._prepared.directory.add_provenance(sandboxes=reports)

    def refuse(self, error: NotFiniteError, step: int, batch: Sequence[Group]) -> NotFiniteError:
        """Keep the batch, so that the step can be repeated (`areal-gym replay --refused`)."""
        directory = self._prepared.directory
        file = directory.save_refused((t for group in batch for t in group), step)
        return NotFiniteError(
            f"step {step}: {error.message}",
            hints=[
                f"the batch is in {file}",
                f"repeat the step: areal-gym replay {quoted(directory.path)} --refused",
                *error.hints,
            ],
        )

    def state(self) -> Mapping[str, Any]:
        """Return the state of rollouts: which groups are settled, and which come next."""
        return self._runner.state()

    def on_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Let the journal delete the groups that this checkpoint has settled."""
        if self._journal is not None:
            self._journal.checkpoint(state)

    def close(self) -> None:
        """Close the journal after everything is written."""
        self._writer.close()
        if self._journal is not None:
            self._journal.close()


def _counters(stats: RolloutStats, engine: Engine) -> dict[str, float]:
    """Return counts since the start of this process."""
    counts: dict[str, float] = {
        "rollout/failed_groups": stats.num_groups_failed,
        "rollout/stale_groups": stats.num_groups_stale,
        "rollout/dropped_tasks": stats.num_dropped_tasks,
        "rollout/acceptance": stats.acceptance_rate,
        "rollout/retries": stats.num_retries,
        "rollout/lost_episodes": stats.num_lost,
        "rollout/replayed_groups": stats.num_replayed_groups,
        "rollout/groups_ready": stats.groups_ready,
        "rollout/episodes_queued": stats.episodes_queued,
        "rollout/oldest_ready_s": stats.oldest_ready_s,
    }
    for name, count in stats.num_groups_rejected.items():
        counts[f"rollout/rejected/{name}"] = count
    for reason in StopReason:
        if reason.is_failure:
            counts[f"rollout/failures/{reason}"] = stats.num_failures.get(reason, 0)
    if isinstance(engine, CountingEngine) and is_dataclass(engine.stats):
        for field in fields(engine.stats):
            counts[f"engine/{field.name}"] = getattr(engine.stats, field.name)
    return {name: float(value) for name, value in counts.items()}


@dataclass(slots=True)
class StepTimes:
    """Turns two snapshots of the runner, and the trainer's times, into a step's metrics.

        T_train   the trainer's own time: how long a step takes if a batch is always ready
        T_gen     how long a batch takes if no episode ever waits to start:
                  episode-seconds played during the step / episodes that may be in flight
        overlap efficiency = max(T_gen, T_train) / the step's wall time

    At 1, the slower of the two works all the time and hides the other. A synchronous run adds the
    two up, and also waits for its slowest episode.
    """

    max_in_flight: int
    before: RolloutStats

    def measure(self, now: RolloutStats, metrics: Mapping[str, float]) -> dict[str, float | str]:
        """Return the metrics of the step that has ended; `now` has the runner's counters.

        `metrics` has the trainer's `time/step_s`, `time/wait_s`, `time/train_s` and
        `time/publish_s`.
        """
        before, self.before = self.before, now
        wall_s = max(now.elapsed_s - before.elapsed_s, 1e-9)
        engine_s, env_s = now.engine_s - before.engine_s, now.env_s - before.env_s
        played_s = engine_s + env_s + now.agent_s - before.agent_s
        generation_s = played_s / self.max_in_flight
        best_s = max(generation_s, metrics["time/train_s"])
        return {
            "time/generation_s": generation_s,
            "time/overlap_efficiency": min(1.0, best_s / wall_s),
            "time/share_engine": engine_s / max(played_s, 1e-9),
            "time/share_env": env_s / max(played_s, 1e-9),
            "rollout/in_flight_mean": played_s / wall_s,
            "rollout/generated_tokens_per_s": (now.num_tokens - before.num_tokens) / wall_s,
            "limited_by": _limited_by(metrics, engine_s=engine_s, env_s=env_s),
        }


def _limited_by(metrics: Mapping[str, float], *, engine_s: float, env_s: float) -> str:
    wait_s, train_s = metrics["time/wait_s"], metrics["time/train_s"]
    publish_s = metrics["time/publish_s"]
    if wait_s >= max(train_s, publish_s):  # the trainer waited for rollouts for most of the step
        return "environment" if env_s > engine_s else "generation"
    return "training" if train_s >= publish_s else "publication"
