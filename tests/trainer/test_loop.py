from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Sequence

import pytest
from torch import Tensor

from areal_gym.config import TrainerConfig
from areal_gym.runs.train import take_steps
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import LossInputs, LossOutput, ppo_clip
from areal_gym.trainer.trainer import Trainer
from areal_gym.trainer.update import TrainerThread, WeightPublisher
from areal_gym.types import Group
from tests._support.tiny_training import batch, tiny_decoder


class Source:
    async def next_batch(self) -> Sequence[Group]:
        return batch()


class Versions:
    """A weight sync that remembers what it was given."""

    def __init__(self) -> None:
        self.published: list[int] = []

    async def publish(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        await asyncio.sleep(0)
        assert dict(weights)
        self.published.append(version)


def learner(in_update: Callable[[int], None] = lambda step: None) -> Trainer:
    """`in_update(step)` is called in the trainer's thread, in the middle of update `step`."""

    def loss(inputs: LossInputs) -> LossOutput:
        in_update(made.num_steps + 1)
        return ppo_clip(inputs)

    made = Trainer(tiny_decoder(), TrainerConfig(), advantage=grpo, loss=loss)
    return made


class SmallRun:
    """The phases of a step, with a trainer and nothing else around it."""

    def __init__(self, trained, sync, num_steps, first_step=1, source=None):
        self.trained = trained
        self.source = source or Source()
        self.steps = range(first_step, num_steps + 1)
        self.thread = TrainerThread()
        self.publisher = WeightPublisher(sync, trained)
        self.recorded = []
        self.followed = []

    def remaining_steps(self):
        return self.steps

    async def next_batch(self):
        return await self.source.next_batch()

    async def train_on(self, batch, step):
        return await self.thread.call(self.trained.step, batch, step - 1)

    async def publish(self, version):
        await self.publisher.publish(version)
        return {"time/publish_s": 0.0}

    async def record(self, step, batch, metrics):
        assert self.publisher._weight_sync.published[-1] == step
        assert len(batch) == 3
        assert {"train/loss", "time/publish_s"} <= set(metrics)
        self.recorded.append(step)

    async def checkpoint_and_evaluate(self, step):
        await asyncio.sleep(0)
        self.followed.append(step)


def test_version_is_the_step_and_publication_precedes_the_record():
    run = SmallRun(learner(), Versions(), num_steps=5, first_step=3)
    asyncio.run(take_steps(run))
    assert run.recorded == run.publisher._weight_sync.published == [3, 4, 5]


def test_rollouts_continue_during_training():
    async def play() -> int:
        loop = asyncio.get_running_loop()
        ticks = 0

        def wait_for_ticks(step: int) -> None:
            # Ends only if the event loop turns meanwhile.
            done = asyncio.run_coroutine_threadsafe(tick(), loop)
            done.result(timeout=30)

        async def tick() -> None:
            nonlocal ticks
            for _ in range(10):
                await asyncio.sleep(0)
                ticks += 1

        await take_steps(SmallRun(learner(wait_for_ticks), Versions(), num_steps=2))
        return ticks

    assert asyncio.run(play()) == 20


@pytest.mark.parametrize("times", [1, 2])
def test_cancelled_update_is_finished_published_and_recorded(times):
    sync = Versions()

    async def play() -> SmallRun:
        loop = asyncio.get_running_loop()

        def cancel(step: int) -> None:
            if step == 3:
                for _ in range(times):
                    loop.call_soon_threadsafe(training.cancel)

        run = SmallRun(learner(cancel), sync, num_steps=9)
        training = asyncio.create_task(take_steps(run))
        with pytest.raises(asyncio.CancelledError):
            await training
        return run

    run = asyncio.run(play())
    assert run.trained.num_steps == 3
    assert run.recorded == sync.published == [1, 2, 3]


def test_cancellation_during_publication_waits_for_the_record():
    class Cancelling(Versions):
        async def publish(self, weights, version):
            if version == 2:
                training.cancel()
            await super().publish(weights, version)

    async def play() -> SmallRun:
        nonlocal training
        run = SmallRun(learner(), Cancelling(), num_steps=9)
        training = asyncio.create_task(take_steps(run))
        with pytest.raises(asyncio.CancelledError):
            await training
        return run

    training = None
    run = asyncio.run(play())
    assert run.recorded == run.publisher._weight_sync.published == [1, 2]
    assert run.followed == [1]


def test_cancelled_run_does_not_wait_for_work_after_the_record():
    def interrupt(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    run = SmallRun(learner(interrupt), Versions(), num_steps=9)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(take_steps(run))
    assert run.recorded == [1, 2]
    assert run.followed == [1]


def test_failing_trainer_ends_the_loop():
    def fail(step: int) -> None:
        raise ArithmeticError("no")

    run = SmallRun(learner(fail), Versions(), num_steps=2)
    with pytest.raises(ArithmeticError):
        asyncio.run(take_steps(run))
    assert run.publisher._weight_sync.published == run.recorded == []
