"""Batches and evaluations of objectives on fixed data: sft, dpo, rm and others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from areal_gym.runs.preparation import PreparedRun
from areal_gym.runs.run_context import BatchStream
from areal_gym.utils.blocking import unbroken

if TYPE_CHECKING:
    from areal_gym.trainer.base import ExampleTrainer
    from areal_gym.trainer.batch.examples import Example
    from areal_gym.trainer.update import TrainerThread


class ExampleBatches(BatchStream["Example"]):
    """Gives examples in an order that the seed decides, epoch after epoch."""

    def __init__(self, prepared: PreparedRun) -> None:
        self._examples, _ = prepared.examples
        self._batch_size = prepared.config.data.batch_size
        self._seed = prepared.config.seed

    async def next_batch(self, version: int) -> Sequence[Example]:
        """Return the examples of the step."""
        from areal_gym.trainer.batch.examples import batch_of_step

        return batch_of_step(self._examples, version + 1, self._batch_size, self._seed)


@dataclass(slots=True)
class ExampleEvaluations:
    """Evaluates held-out examples in the trainer's thread, between two steps."""

    prepared: PreparedRun
    trainer: ExampleTrainer
    thread: TrainerThread
    log: Callable[[int, Mapping[str, float]], None]
    """Called with the step and the metrics of each evaluation."""

    def is_due(self, step: int) -> bool:
        """Return whether the settings ask for an evaluation at this step."""
        return self.prepared.config.eval.is_scheduled(step)

    async def measure_start(self, step: int) -> None:
        """Evaluate the policy before training, if the settings ask for it and no row has it."""
        if self.prepared.config.eval.at_start or self.is_due(step):
            await self.begin(step)

    async def begin(self, step: int) -> None:
        """Evaluate the current policy, unless that is recorded.

        A cancellation waits for its end, because the trainer does one thing at a time.
        """
        directory, (_, examples) = self.prepared.directory, self.prepared.examples
        if any(row["step"] == step for row in directory.read_evaluations()):
            return
        row = await unbroken(self.thread.call(self.trainer.evaluate, examples))
        directory.append_evaluation({"step": step, "heldout": row})
        self.log(step, {f"eval/{name}": value for name, value in row.items()})
        values = "  ".join(f"{name} {value:.3f}" for name, value in row.items())
        self.prepared.display.say(f"held-out at step {step}: {values} ({len(examples)} examples)")

    measure_end = begin

    def scores(self) -> dict[int, float | None]:
        """Return the negative held-out loss by step."""
        rows = self.prepared.directory.read_evaluations()
        return {row["step"]: -row["heldout"]["loss"] for row in rows}
