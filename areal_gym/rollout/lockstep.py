"""Rollouts that depend on nothing but the seed, to the last bit.

The last digits of a matrix product depend on the size of its batch, and which turns share a batch
depends on when tools answer. Here turns are sampled in waves: when every episode in flight waits
for the engine, all their turns are sampled together, in an order that the seeds decide. This is
slower than a batch that is refilled all the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from areal_gym.engines.base import Engine, Generation, SamplingParams
from areal_gym.errors import ConfigError, EngineError
from areal_gym.message_types import ImageRef

_POLL_S = 0.0005


@runtime_checkable
class TogetherEngine(Engine, Protocol):
    """An engine that can sample a given batch of turns."""

    async def generate_together(self, turns: Sequence[_Turn]) -> list[Generation]:
        """Sample all of these turns, in one batch from the first step on."""


_Turn = (
    tuple[Sequence[int], SamplingParams, str]
    | tuple[Sequence[int], SamplingParams, str, Sequence[ImageRef]]
)
"""The ids of a prompt, how to sample, the session, and the pictures if there are any."""


class Lockstep:
    """An engine that samples the turns of all `num_playing()` episodes in waves, by `engine`.

    Raises:
        ConfigError: the engine decides its batches itself.
    """

    def __init__(self, engine: Engine, num_playing: Callable[[], int]) -> None:
        if not isinstance(engine, TogetherEngine):
            raise ConfigError(
                f"deterministic rollouts need an engine that samples given batches, and "
                f"{type(engine).__name__} decides its batches itself",
                hints=["engine.id=embedded can", "deterministic=false"],
            )
        self._engine: TogetherEngine = engine
        self._num_playing = num_playing
        self._waiting: dict[asyncio.Future[Generation], _Turn] = {}
        self._waves: asyncio.Task[None] | None = None

    @property
    def policy_version(self) -> int:
        """The version that the engine serves."""
        return self._engine.policy_version

    @property
    def max_context(self) -> int:
        """The most tokens of a prompt and its answer."""
        return self._engine.max_context

    @property
    def takes_images(self) -> bool:
        """Whether the engine's policy sees pictures."""
        return bool(getattr(self._engine, "takes_images", False))

    async def start(self) -> None:
        """Do nothing: the engine behind it has been started."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        images: Sequence[ImageRef] = (),
    ) -> Generation:
        """Wait until all episodes in flight wait, and sample; raise EngineError if that fails."""
        generation: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        turn = prompt_ids, params, session or ""
        self._waiting[generation] = (*turn, images) if images else turn
        if self._waves is None or self._waves.done():
            self._waves = asyncio.create_task(self._sample_waves())
        try:
            return await generation
        finally:
            self._waiting.pop(generation, None)  # its episode was cancelled

    def release(self, session: str) -> None:
        """Let the engine forget what it has cached for a session."""
        self._engine.release(session)

    async def aclose(self) -> None:
        """End the waves; the engine behind continues."""
        if self._waves is not None:
            self._waves.cancel()
            await asyncio.gather(self._waves, return_exceptions=True)

    async def _sample_waves(self) -> None:
        while self._waiting:
            if len(self._waiting) < self._num_playing():
                await asyncio.sleep(_POLL_S)  # an episode is in the environment, or about to start
                continue
            # An episode's seed is its own, and a turn's comes from it.
            wave = dict(sorted(self._waiting.items(), key=lambda item: item[1][1].seed or 0))
            self._waiting.clear()
            try:
                generations = await self._engine.generate_together([*wave.values()])
            except EngineError as error:
                for waiting in wave:
                    if not waiting.done():
                        waiting.set_exception(error)
                continue
            for waiting, generation in zip(wave, generations, strict=True):
                if not waiting.done():
                    waiting.set_result(generation)
            await asyncio.sleep(0)  # let their episodes continue
