"""When a run's checkpoints are written: on a schedule without stopping rollouts, and at its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from areal_gym.rundir import RunDir

__all__ = ["Saver"]


class Saver:
    """Writes the learner's checkpoints into a run directory, each step once.

    `save` writes in a thread, for the event loop has rollouts to serve; the trainer waits, for it
    must not change what is being written. When the run is being cancelled nobody can wait on the
    loop any more: `save_now` blocks.

    Args:
        learner: what is saved.
        directory: the run's.
        tokenizer_dir: whose tokenizer belongs to the policy.
        rollout_state: what the runner needs to go on after this step.
        on_saved: called with that state, on the event loop's thread, once it is on the disk.
        saved_step: the step that is saved already.
    """

    def __init__(
        self,
        learner: Any,
        directory: RunDir,
        tokenizer_dir: Path,
        rollout_state: Callable[[], Mapping[str, Any]],
        on_saved: Callable[[Mapping[str, Any]], None],
        *,
        saved_step: int = 0,
    ) -> None:
        self._learner = learner
        self._directory = directory.checkpoints_dir
        self._tokenizer_dir = tokenizer_dir
        self._rollout_state = rollout_state
        self._on_saved = on_saved
        self._saved_step = saved_step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="areal-gym-saver")
        self._writing: Future[None] | None = None

    async def save(self, step: int) -> None:
        """Write the checkpoint of `step`; rollouts go on meanwhile.

        Raises:
            TrainError: the disk is full or not writable; earlier checkpoints are as they were.
        """
        state = self._rollout_state()
        self._writing = self._thread.submit(self._write, step, state)
        await asyncio.wrap_future(self._writing)
        self._on_saved(state)

    def save_now(self, step: int) -> None:
        """Write the checkpoint of `step` unless it is there, or on its way.

        Raises:
            TrainError: the disk is full or not writable; earlier checkpoints are as they were.
        """
        if self._writing is not None:
            self._writing.exception()  # whoever waits for it hears of it; here it only has to end
        if step != self._saved_step:
            state = self._rollout_state()
            self._write(step, state)
            self._on_saved(state)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _write(self, step: int, rollout_state: Mapping[str, Any]) -> None:
        from areal_gym.trainer.checkpoint import save_learner

        save_learner(self._learner, self._directory, step, self._tokenizer_dir, rollout_state)
        self._saved_step = step
