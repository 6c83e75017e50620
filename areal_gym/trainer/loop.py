"""The training loop: take a batch, update, publish, again.

    source.next_batch() --groups--> learner.step() --weights--> weight_sync.publish(version + 1)
      waits for: enough            in a thread of its own,        waits for: the engine's next
      fresh, complete groups       rollouts go on meanwhile       pause between two tokens

Synchronous and asynchronous training are this one loop: how far rollouts run ahead is decided by
the source (`rollout.max_staleness`), not here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from areal_gym.engines.base import Engine
from areal_gym.errors import EngineError, InfrastructureError, NotFiniteError
from areal_gym.trainer.trainer import Trainer
from areal_gym.trainer.weight_sync import WeightSync, weights_for
from areal_gym.types import Group


class BatchSource(Protocol):
    """Where batches come from; the trainer knows nothing else about rollouts."""

    async def next_batch(self) -> Sequence[Group]:
        """The next groups to train on."""
        ...


OnStep = Callable[[int, dict[str, float], Sequence[Group]], Awaitable[None]]
"""Called after each step with (step, metrics, batch); weights are published already.

It records before it waits for anything: when the run is being cancelled, its first wait raises.
"""

Explain = Callable[[NotFiniteError, int, Sequence[Group]], NotFiniteError]
"""Called with (error, step, batch) when nothing can be learned from it; gives what to raise."""

_T = TypeVar("_T")
_LOOK_S = 1.0
"""Between two looks at an engine that has lost its servers."""


async def train_loop(
    source: BatchSource,
    learner: Trainer,
    weight_sync: WeightSync,
    *,
    num_steps: int,
    on_step: OnStep,
    explain: Explain = lambda error, step, groups: error,
    first_step: int = 1,
    num_threads: int = 1,
    engine: Engine | None = None,
    outage_patience_s: float = 0.0,
) -> None:
    """Train from `first_step` to `num_steps`; the version of the weights is the number of steps.

    When cancelled, the update under way is finished, published and recorded first: weights,
    engine and records never disagree about how many steps were taken.

    Where `engine` may lose all its servers, a publication waits for one to come back, for
    `outage_patience_s` at most; servers that came back without the weights get them again.

    Raises:
        InfrastructureError: no server came back in that time.
    """
    loop = asyncio.get_running_loop()
    # The number of torch's threads belongs to the thread that asks for it.
    with ThreadPoolExecutor(
        1,
        thread_name_prefix="areal-gym-trainer",
        initializer=torch.set_num_threads,
        initargs=(num_threads,),
    ) as thread:

        async def publish(version: int) -> None:
            def attempt() -> Awaitable[None]:
                return weight_sync.publish(weights_for(weight_sync, learner), version)

            await _through_outages(attempt, engine, outage_patience_s, version)

        async def update(groups: Sequence[Group], step: int) -> dict[str, float]:
            begin_s = time.perf_counter()
            try:
                metrics = await loop.run_in_executor(thread, learner.step, groups, step - 1)
            except NotFiniteError as error:
                raise explain(error, step, groups) from error
            trained_s = time.perf_counter()
            await publish(step)
            metrics["time/publish_s"] = time.perf_counter() - trained_s
            metrics["time/step_s"] = time.perf_counter() - begin_s
            return metrics

        for step in range(first_step, num_steps + 1):
            begin_s = time.perf_counter()
            if hasattr(engine, "needs_weights"):
                groups = await _next_batch(source, engine, partial(publish, step - 1))
            else:
                groups = await source.next_batch()
            wait_s = time.perf_counter() - begin_s
            metrics = await _unbroken(update(groups, step))
            metrics["time/wait_s"] = wait_s
            metrics["time/step_s"] += wait_s
            metrics["rollout/tokens_per_s"] = metrics["rollout/tokens"] / metrics["time/step_s"]
            await on_step(step, metrics, groups)
            await asyncio.sleep(0)  # where a cancellation that `_unbroken` put off is raised


async def _next_batch(
    source: BatchSource, engine: Any, publish: Callable[[], Awaitable[None]]
) -> Sequence[Group]:
    """The next batch; meanwhile, servers that came back get the weights that they lack."""
    asking = asyncio.ensure_future(source.next_batch())
    try:
        while not asking.done():
            await asyncio.wait({asking}, timeout=_LOOK_S)
            if engine.needs_weights and not asking.done():
                await publish()
        return asking.result()
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def _through_outages(
    attempt: Callable[[], Awaitable[None]], engine: Any, patience_s: float, version: int
) -> None:
    """Publish, and once more when a server is back, if all were lost meanwhile."""
    clock = asyncio.get_running_loop().time
    since_s = clock()
    while True:
        try:
            await attempt()
            return
        except EngineError as error:
            if getattr(engine, "outage_s", 0.0) == 0.0:
                raise
            if (waited_s := clock() - since_s) >= patience_s:
                raise InfrastructureError(
                    f"version {version} could not be published: waited {waited_s:.0f} s for "
                    f"servers (rollout.outage_patience_s = {patience_s:g}); {error.message}",
                    hints=error.hints,
                ) from error
        await asyncio.sleep(_LOOK_S)


async def _unbroken(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which a cancellation does not reach; the next wait raises it."""
    task = asyncio.create_task(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            is_cancelled = True
    current = asyncio.current_task()
    if is_cancelled and current is not None:
        current.cancel()
        current.uncancel()  # the request was counted when it was made
    return task.result()
