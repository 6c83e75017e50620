from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Sequence

import pytest
from torch import Tensor

from areal_gym.config import TrainerConfig
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import LossInputs, LossOutput, ppo_clip
from areal_gym.trainer.loop import train_loop
from areal_gym.trainer.trainer import Trainer
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


def test_version_is_the_step_and_publication_precedes_the_record():
    sync, recorded = Versions(), []

    async def on_step(step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        assert sync.published[-1] == step
        assert len(groups) == 3
        recorded.append(metrics)

    asyncio.run(train_loop(Source(), learner(), sync, num_steps=5, first_step=3, on_step=on_step))
    assert sync.published == [3, 4, 5]
    for metrics in recorded:
        parts = metrics["time/wait_s"] + metrics["time/train_s"] + metrics["time/publish_s"]
        assert 0 < parts <= metrics["time/step_s"]


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

        async def on_step(step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
            pass

        trained = learner(wait_for_ticks)
        await train_loop(Source(), trained, Versions(), num_steps=2, on_step=on_step)
        return ticks

    assert asyncio.run(play()) == 20


@pytest.mark.parametrize("times", [1, 2])
def test_cancelled_update_is_finished_published_and_recorded(times):
    sync, recorded = Versions(), []

    async def on_step(step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        recorded.append(step)

    async def play() -> Trainer:
        loop = asyncio.get_running_loop()

        def cancel(step: int) -> None:
            if step == 3:
                for _ in range(times):
                    loop.call_soon_threadsafe(training.cancel)

        trained = learner(cancel)
        training = asyncio.create_task(
            train_loop(Source(), trained, sync, num_steps=9, on_step=on_step)
        )
        with pytest.raises(asyncio.CancelledError):
            await training
        return trained

    assert asyncio.run(play()).num_steps == 3
    assert recorded == sync.published == [1, 2, 3]


def test_cancelled_run_does_not_wait_for_work_after_the_record():
    recorded, evaluated = [], []

    async def on_step(step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        recorded.append(step)
        await asyncio.sleep(0)
        evaluated.append(step)

    def interrupt(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(
            train_loop(Source(), learner(interrupt), Versions(), num_steps=9, on_step=on_step)
        )
    assert recorded == [1, 2]
    assert evaluated == [1]


def test_failing_trainer_ends_the_loop():
    def fail(step: int) -> None:
        raise ArithmeticError("no")

    async def on_step(step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
        raise AssertionError("nothing was learned")

    sync = Versions()
    with pytest.raises(ArithmeticError):
        asyncio.run(train_loop(Source(), learner(fail), sync, num_steps=2, on_step=on_step))
    assert sync.published == []
