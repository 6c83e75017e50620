"""A teacher behind servers, which score the tokens that the student sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import compress
from typing import TypeVar

import numpy as np

from areal_gym.engines.base import ScoringEngine, TopScoringEngine
from areal_gym.errors import EngineError, EngineUnreachableError
from areal_gym.trainer.batch.examples import TokenRow
from areal_gym.types import TopTokens

_MAX_IN_FLIGHT = 64
_MAX_TRIES = 3
_MAX_PAUSE_S = 4.0
_T = TypeVar("_T")


class RemoteTeacher:
    """A teacher model on servers; a request that fails is repeated a few times.

    While no server answers, requests wait for `patience_s`, of which `say` tells people.
    """

    def __init__(
        self,
        engine: ScoringEngine,
        *,
        patience_s: float = 0.0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._engine = engine
        self._slots = asyncio.Semaphore(_MAX_IN_FLIGHT)
        self._patience_s = patience_s
        self._say = say
        self._lost_since_s: float | None = None
        """The time since which no server answers; None while one does."""

    async def score(self, rows: Sequence[TokenRow]) -> list[list[float]]:
        """Return the log-probabilities, at temperature 1, of the marked tokens of each row.

        Raises:
            EngineError: no server answered.
        """

        async def score_row(row: TokenRow) -> list[float]:
            return list(compress(await self._engine.score(row.token_ids), row.mask[1:]))

        return await self._of_rows(rows, score_row)

    async def score_top(self, rows: Sequence[TokenRow], top_k: int) -> list[TopTokens]:
        """Return the `top_k` likeliest tokens at each row's marked tokens; see `TopTeacher`.

        Raises:
            EngineError: no server answered.
        """
        engine = self._engine
        assert isinstance(engine, TopScoringEngine)  # `open_teacher` checks it

        async def score_row(row: TokenRow) -> TopTokens:
            is_marked = np.asarray(row.mask)
            start = int(is_marked.argmax())
            top = await engine.score_top(row.token_ids, top_k, start=start)
            return TopTokens.from_arrays(*(part[is_marked[start:]] for part in top.arrays()))

        return await self._of_rows(rows, score_row)

    async def _of_rows(
        self, rows: Sequence[TokenRow], score_row: Callable[[TokenRow], Awaitable[_T]]
    ) -> list[_T]:
        async def retried(row: TokenRow) -> _T:
            async with self._slots:
                num_failures = 0
                while True:
                    try:
                        scores = await score_row(row)
                    except EngineError as error:
                        num_failures += 1
                        if not self._may_wait(error) and num_failures >= _MAX_TRIES:
                            raise
                        await asyncio.sleep(min(0.25 * 2**num_failures, _MAX_PAUSE_S))
                    else:
                        self._lost_since_s = None
                        return scores

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(retried(row)) for row in rows]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    def _may_wait(self, error: EngineError) -> bool:
        """Return whether the servers are gone and may come back.

        Raises:
            EngineUnreachableError: they have been gone for longer than `patience_s`.
        """
        if not error.is_outage or not self._patience_s:
            return False
        now_s = asyncio.get_running_loop().time()
        if self._lost_since_s is None:
            self._lost_since_s = now_s
            self._say(
                f"the teacher's servers are lost, and the run waits for them ({error.message}); "
                f"at most {self._patience_s:g} s (rollout.outage_patience_s)"
            )
        waited_s = now_s - self._lost_since_s
        if waited_s < self._patience_s:
            return True
        raise EngineUnreachableError(
            f"the teacher's servers did not come back: waited {waited_s:.0f} s for them "
            f"(rollout.outage_patience_s = {self._patience_s:g}); {error.message}",
            hints=error.hints,
        ) from error
