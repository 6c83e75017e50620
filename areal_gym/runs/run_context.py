"""A run whose components have all started, with the phases of a step."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from areal_gym.errors import (
    DivergedError,
    LostRankError,
    MasteredError,
    NotFiniteError,
    StopTraining,
)
from areal_gym.runs.divergence_guard import DivergenceGuard
from areal_gym.runs.preparation import PreparedRun
from areal_gym.runs.restarts import RESTARTED
from areal_gym.runs.saving import Saver
from areal_gym.types import Group
from areal_gym.utils.command_words import quoted

if TYPE_CHECKING:
    from areal_gym.trainer.base import Trainer
    from areal_gym.trainer.update import TrainerThread, WeightPublisher


_Item = TypeVar("_Item")


class BatchStream(ABC, Generic[_Item]):
    """Supplies a run's batches, and handles what is recorded, kept and watched beside them.

    It is an async context manager, inside of which batches are made.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Stop making batches."""

    @abstractmethod
    async def next_batch(self, version: int) -> Sequence[_Item]:
        """Return the next batch; training on it makes the weights of `version + 1`."""

    def metrics(self, step: int, batch: Sequence[_Item], row: Mapping[str, Any]) -> dict[str, Any]:
        """Return metrics to add to the step's row, which has the trainer's metrics already."""
        return {}

    async def save(self, step: int, batch: Sequence[_Item]) -> Sequence[Group]:
        """Start to write what was trained on; return its groups, for callbacks.

        Raises:
            TrainError: an earlier write has failed.
        """
        return ()

    def finish_saving(self) -> None:
        """Block until everything that `save` started is on disk; raises as `save` does."""

    async def after_record(self, step: int) -> None:
        """Do slow work after a step; if it is cancelled, nothing of the step is lost."""

    def refuse(self, error: NotFiniteError, step: int, batch: Sequence[_Item]) -> NotFiniteError:
        """Return the error to raise when the trainer could not take the step."""
        return error

    def state(self) -> Mapping[str, Any]:
        """Return the state for a checkpoint, from which a resumed run continues."""
        return {}

    def on_checkpoint(self, state: Mapping[str, Any]) -> None:
        """React to a checkpoint with this state, which is on disk."""

    guard: DivergenceGuard | None = None
    """Judges each step's metrics; None if nothing can diverge."""

    def close(self) -> None:
        """Close files after the last checkpoint is written."""


class RunEvaluations(Protocol):
    """A run's evaluations: before training, on a schedule, and at the end; each step once."""

    async def measure_start(self, step: int) -> None:
        """Evaluate the policy before training, if the settings ask for it and no row has it."""

    async def measure_end(self, step: int) -> None:
        """Evaluate the policy after training, unless that is recorded."""

    def is_due(self, step: int) -> bool:
        """Return whether the settings ask for an evaluation at this step that is not recorded."""

    async def begin(self, step: int) -> None:
        """Evaluate the current policy; return when training may continue."""

    def scores(self) -> Mapping[int, float | tuple[float, ...] | None]:
        """Return each policy's score by step (more is better); None while it is measured."""


@dataclass(kw_only=True, slots=True)
class RunContext(Generic[_Item]):
    """A run whose components have all started; `areal_gym.runs.train` drives it."""

    prepared: PreparedRun
    trainer: Trainer[_Item]
    trainer_thread: TrainerThread
    publisher: WeightPublisher | None
    """None for objectives on fixed data, for which no engine samples."""
    evaluations: RunEvaluations
    make_batches: Callable[[], BatchStream[_Item]]
    """Called when training begins."""
    step: int
    """The number of steps taken."""
    train_s: float = 0.0
    _batches: BatchStream[_Item] = field(init=False)
    _saver: Saver = field(init=False)
    _begin_s: float = field(init=False)
    _wait_s: float = field(init=False)

    def remaining_steps(self) -> range:
        """Return the steps to take; raise StopTraining if a callback wants none."""
        self.prepared.callbacks.raise_if_stopped()
        return range(self.step + 1, self.prepared.config.steps + 1)

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Make batches inside of the context; on the way out, save the policy, whatever ends it.

        What stops training in an orderly way ends the context without an error: a callback, or
        that nothing is left to learn.
        """
        display, directory = self.prepared.display, self.prepared.directory
        display.phase("train", self.prepared.config.steps)
        start_s = time.perf_counter()
        self._batches = self.make_batches()
        self._saver = self._make_saver()
        try:
            async with self._batches:
                yield
            self._batches.finish_saving()
            self._saver.save_now(self.step)
        except StopTraining as stop:
            display.say(f"ended after step {self.step} of {self.prepared.config.steps}: {stop}")
            self._saver.save_now(self.step)
            self._batches.finish_saving()
        except LostRankError:  # the steps since the newest checkpoint are lost
            raise
        except (asyncio.CancelledError, Exception) as error:
            if self.step:
                self._saver.save_now(self.step)
                display.say(
                    f"stopped after step {self.step}; what was learned is in {directory.path}"
                )
                if directory.is_intact and not isinstance(error, DivergedError):
                    display.say(
                        f"go on with: areal-gym train --resume --out {quoted(directory.path)}"
                    )
            raise
        finally:
            self._saver.close()
            self._batches.close()
        self.train_s = time.perf_counter() - start_s

    async def next_batch(self) -> Sequence[_Item]:
        """Return the next batch, and measure how long the trainer waited for it.

        Raises:
            StopTraining: the policy has learned to solve the tasks, and no others are found.
        """
        self._begin_s = time.perf_counter()
        try:
            batch = await self._batches.next_batch(self.step)
        except MasteredError as error:
            if not self.step:
                raise
            raise self.prepared.callbacks.stop(error.message) from None
        self._wait_s = time.perf_counter() - self._begin_s
        return batch

    async def train_on(self, batch: Sequence[_Item], step: int) -> dict[str, float]:
        """Take the optimizer step in the trainer's thread, and return its metrics."""
        if self.publisher is not None:
            await self.publisher.begin_step()
        try:
            return await self.trainer_thread.call(self.trainer.step, batch, step - 1)
        except NotFiniteError as error:
            raise self._batches.refuse(error, step, batch) from error

    async def publish(self, version: int) -> dict[str, float]:
        """Publish the new weights to the engine, and return how long that took."""
        if self.publisher is None:
            return {}
        begin_s = time.perf_counter()
        await self.publisher.publish(version)
        return {"time/publish_s": time.perf_counter() - begin_s}

    async def record(self, step: int, batch: Sequence[_Item], metrics: dict[str, float]) -> None:
        """Record the step, and inform loggers, display and callbacks; a thread writes files."""
        self.step = step
        row: dict[str, Any] = {"step": step, **metrics}
        row[RESTARTED] = float(self.prepared.restarts.count_in(step))
        row["time/step_s"] = time.perf_counter() - self._begin_s
        if self.publisher is not None:
            row["time/wait_s"] = self._wait_s
        row |= self._batches.metrics(step, batch, row)
        prepared = self.prepared
        prepared.directory.append_metrics(row)
        groups = await self._batches.save(step, batch)
        prepared.loggers.log(step, row)
        prepared.display.step(step, prepared.config.steps, row)
        prepared.callbacks.call("on_step", step, row, groups)

    async def checkpoint_and_evaluate(self, step: int) -> None:
        """Save and evaluate after a step if the schedule says so.

        A pending cancellation is raised at the beginning, before anything is saved.

        Raises:
            StopTraining: a callback wants the run to end.
            DivergedError: the policy has diverged.
        """
        await asyncio.sleep(0)
        self._saver.settle()
        config, guard = self.prepared.config, self._batches.guard
        every = config.trainer.save_every
        if (every and step % every == 0) or (guard is not None and guard.wants_checkpoint):
            # Written first, so that a run resumed from the checkpoint has its trajectories.
            await asyncio.to_thread(self._batches.finish_saving)
            await self._saver.save(step)
        if self.evaluations.is_due(step) and step < config.steps:
            await self.evaluations.begin(step)
        await self._batches.after_record(step)
        self.prepared.callbacks.raise_if_stopped()
        if guard is not None:
            guard.raise_if_diverged()

    def keep_checkpoints(self, *, protects: bool = False) -> str | None:
        """Delete checkpoints that are not to be kept, and return the best one's name.

        If `protects`, the last good checkpoint of a policy that may diverge is kept, too.
        """
        from areal_gym.trainer.checkpoint import keep_checkpoints

        guard = self._batches.guard
        return keep_checkpoints(
            self.prepared.directory.checkpoints_dir,
            self.prepared.config.trainer.keep_checkpoints,
            self.evaluations.scores(),
            protected=guard.protected if protects and guard is not None else (),
        )

    def _make_saver(self) -> Saver:
        directory = self.prepared.directory

        def on_saved(step: int, state: Mapping[str, Any]) -> None:
            self._batches.on_checkpoint(state)
            self.prepared.callbacks.call("on_checkpoint", step, directory.checkpoint(step))

        return Saver(
            self.trainer,
            directory,
            self.prepared.policy,
            self._batches.state,
            on_saved=on_saved,
            delete_old=lambda: self.keep_checkpoints(protects=True),
            saved_step=self.step or None,
        )
