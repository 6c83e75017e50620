"""Rollouts that depend on nothing but the seed, to the last bit.

A matrix product's last digits depend on the size of its batch, and which turns share a batch
depends on when tools answer. Here turns go to the engine in waves: when every episode that plays
waits for the engine, all their turns are sampled together, in an order that the seeds decide, and
the next wave begins when the last of them has ended and its episode has come back.

Slower than a batch that is refilled all the time; for runs that must be repeatable exactly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from areal_gym.engines.base import Engine, Generation, SamplingParams
from areal_gym.errors import EngineError

_POLL_S = 0.0005


@runtime_checkable
class TogetherEngine(Engine, Protocol):
    """An engine whose batches can be decided."""

    async def generate_together(
        self, turns: Sequence[tuple[Sequence[int], SamplingParams, str]]
    ) -> list[Generation]:
        """Sample all of these turns, in one batch from the first step on."""
        ...


@dataclass(slots=True)
class _Waiting:
    prompt_ids: Sequence[int]
    params: SamplingParams
    session: str
    answer: asyncio.Future[Generation]


class Lockstep:
    """The engine as episodes of a repeatable run see it.

    Args:
        engine: that samples.
        num_playing: how many episodes have been started and have not ended.
    """

    def __init__(self, engine: TogetherEngine, num_playing: Callable[[], int]) -> None:
        self._engine = engine
        self._num_playing = num_playing
        self._waiting: list[_Waiting] = []
        self._waves: asyncio.Task[None] | None = None

    @property
    def policy_version(self) -> int:
        """See `Engine`."""
        return self._engine.policy_version

    @property
    def max_context(self) -> int:
        """See `Engine`."""
        return self._engine.max_context

    async def start(self) -> None:
        """The engine behind it has been started."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Generation:
        """Wait until all wait, and sample.

        Raises:
            EngineError: the wave could not be sampled.
        """
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(prompt_ids, params, session or "", answer)
        self._waiting.append(waiting)
        if self._waves is None or self._waves.done():
            self._waves = asyncio.create_task(self._serve())
        try:
            return await answer
        finally:
            if waiting in self._waiting:  # its episode was cancelled
                self._waiting.remove(waiting)

    def release(self, session: str) -> None:
        """See `Engine`."""
        self._engine.release(session)

    async def aclose(self) -> None:
        """End the waves; the engine behind goes on."""
        if self._waves is not None:
            self._waves.cancel()
            await asyncio.gather(self._waves, return_exceptions=True)

    async def _serve(self) -> None:
        while self._waiting:
            if len(self._waiting) < self._num_playing():
                await asyncio.sleep(_POLL_S)  # somebody is in the environment, or about to start
                continue
            # An episode's seed is its own, and a turn's comes from it.
            wave = sorted(self._waiting, key=lambda w: w.params.seed or 0)
            self._waiting.clear()
            try:
                found = await self._engine.generate_together(
                    [(w.prompt_ids, w.params, w.session) for w in wave]
                )
            except EngineError as error:
                for waiting in wave:
                    if not waiting.answer.done():
                        waiting.answer.set_exception(error)
                continue
            for waiting, generation in zip(wave, found, strict=True):
                if not waiting.answer.done():
                    waiting.answer.set_result(generation)
            await asyncio.sleep(0)  # let them go on
