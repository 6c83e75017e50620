"""Writes a run's checkpoints: on a schedule beside training, and at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Never

from areal_gym.run_dir.run_dir import RunDir

if TYPE_CHECKING:
    from areal_gym.trainer.base import Trainer


class _Writing(NamedTuple):
    step: int
    rollout_state: Mapping[str, Any]
    end: Future[None]


@dataclass(slots=True)
class Saver:
    """Writes the trainer's checkpoints into a run directory, each step once.

    The run waits for `save` only until weights and states are copied; a thread writes the copies,
    one checkpoint at a time. `save_now` blocks, because a run that is being cancelled cannot wait
    on its event loop any more.

    Raises:
        TrainError: in methods, a checkpoint could not be written; earlier ones are unchanged.
    """

    trainer: Trainer[Never]
    directory: RunDir
    tokenizer_dir: Path
    """The directory with the policy's tokenizer files."""
    rollout_state: Callable[[], Mapping[str, Any]]
    """Returns the state from which rollouts continue after this step."""
    on_saved: Callable[[int, Mapping[str, Any]], None]
    """Called with step and state on the event loop's thread, when they are on disk."""
    delete_old: Callable[[], object]
    """Deletes checkpoints that are not to be kept; called in the writing thread."""
    saved_step: int | None = None
    """The step that is saved already, if any."""
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="areal-gym-saver")
    )
    _writing: _Writing | None = None

    async def save(self, step: int) -> None:
        """Begin the checkpoint of `step` after the one before, and wait until all is copied."""
        if self._writing is not None:
            await asyncio.to_thread(wait, [self._writing.end])
            self.settle()
        state = self.rollout_state()
        copied = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_copied(_: object = None) -> None:
            loop.call_soon_threadsafe(copied.set)

        end = self._thread.submit(self._write, step, state, on_copied)
        end.add_done_callback(on_copied)  # it may fail before everything is copied
        self._writing = _Writing(step, state, end)
        await copied.wait()

    def settle(self) -> None:
        """Report a checkpoint that was written meanwhile."""
        writing = self._writing
        if writing is not None and writing.end.done():
            self._writing = None
            writing.end.result()
            self.saved_step = writing.step
            self.on_saved(writing.step, writing.rollout_state)

    def save_now(self, step: int) -> None:
        """Write the checkpoint of `step` unless it exists; first wait for the one being written."""
        if self._writing is not None:
            wait([self._writing.end])
            if self._writing.end.exception() is None:
                self.settle()
        if step != self.saved_step:
            state = self.rollout_state()
            self._write(step, state)
            self.saved_step = step
            self.on_saved(step, state)

    def close(self) -> None:
        """End the thread after its current write."""
        self._thread.shutdown()

    def _write(
        self, step: int, state: Mapping[str, Any], on_copied: Callable[[], None] = lambda: None
    ) -> None:
        from areal_gym.trainer.checkpoint import save_trainer

        directory = self.directory.checkpoints_dir
        save_trainer(self.trainer, directory, step, self.tokenizer_dir, state, on_copied=on_copied)
        self.delete_old()
