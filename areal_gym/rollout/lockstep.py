"""Makes rollouts depend on the seed only, to the last bit.

The last digits of a matrix product depend on the size of its batch, and which turns share a batch
depends on when tools answer. Here turns are sampled in waves: when every episode in flight waits
for the engine, all their turns are sampled together, in an order that the seeds decide. This is
slower than a batch that is refilled continuously.
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
        """Sample all of these turns as one batch."""


_Turn = (
    tuple[Sequence[int], SamplingParams, str]
    | tuple[Sequence[int], SamplingParams, str, Sequence[ImageRef]]
)
"""A prompt's ids, the sampling parameters, the session, and the images if there are any."""


class Lockstep:
    """Wraps an engine and samples the turns of all `num_playing()` episodes together, in waves.

    Raises:
        ConfigError: the engine cannot sample a given batch.
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
        """The most tokens that a prompt and its answer may have together."""
        return self._engine.max_context

    @property
    def takes_images(self) -> bool:
        """Whether the policy accepts images."""
        return bool(getattr(self._engine, "takes_images", False))

    async def start(self) -> None:
        """Do nothing: the wrapped engine has been started."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        images: Sequence[ImageRef] = (),
    ) -> Generation:
        """Sample once all episodes in flight wait for the engine; raise EngineError on failure."""
        generation: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        turn = prompt_ids, params, session or ""
        self._waiting[generation] = (*turn, images) if images else turn
        if self._waves is None or self._waves.done():
            self._waves = asyncio.create_task(self._sample_waves())
        try:
            return await generation
        finally:
            self._waiting.pop(generation, None)  # still there if the episode was cancelled

    def release(self, session: str) -> None:
        """Let the engine drop the cache of a session."""
        self._engine.release(session)

    async def aclose(self) -> None:
        """Stop sampling; the wrapped engine stays open."""
        if self._waves is not None:
            self._waves.cancel()
            await asyncio.gather(self._waves, return_exceptions=True)

    async def _sample_waves(self) -> None:
        while self._waiting:
            if len(self._waiting) < self._num_playing():
                await asyncio.sleep(_POLL_S)  # an episode is in the environment, or about to start
                continue
            # A turn's seed comes from its episode's seed, so this order does not depend on time.
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
