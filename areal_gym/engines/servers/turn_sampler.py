"""Samples turns from a pool of servers: retries on failures, continues after publications."""

from __future__ import annotations

import asyncio
import itertools
import random
import uuid
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from areal_gym.engines.base import Generation, SamplingParams, adapter_name
from areal_gym.engines.servers.publication import PublicationGate
from areal_gym.engines.servers.replies import Reply, ScoreRequest, TurnRequest
from areal_gym.engines.servers.server_client import RefusedError, is_refused
from areal_gym.engines.servers.server_pool import ServerPool
from areal_gym.engines.servers.server_state import ServerState
from areal_gym.errors import EngineError, EngineUnreachableError, GrammarError
from areal_gym.message_types import ImageRef
from areal_gym.types import FinishReason, TopTokens
from areal_gym.utils.packed_numbers import Ints

_NOT_RETRIED = frozenset({400, 404, 405, 413, 422})
"""HTTP statuses that a retry does not change."""
_FIRST_WAIT_S = 0.25
"""The wait before a retry on the server that failed; doubles each time."""


class TurnSampler(ServerPool):
    """A pool of servers that samples turns whenever no publication is in progress.

    Args:
        servers: the servers, none of which serves yet.
        max_retries: retries of one turn after failures of servers.
        request_timeout_s: the time limit of one request.
        may_set_aside: whether publications may hold requests instead of aborting them.
        follows_adapters: whether requests name the LoRA adapter of the newest version that a
            server has reported, because another process publishes adapters.
        num_layers: the policy's number of layers.
        banned_ids: ids that must not be sampled.
        grace_s, interval_s, is_guest: see `ServerPool`.
    """

    def __init__(
        self,
        servers: Sequence[ServerState],
        *,
        max_retries: int,
        request_timeout_s: float,
        may_set_aside: bool,
        follows_adapters: bool,
        num_layers: int | None,
        banned_ids: tuple[int, ...],
        grace_s: float,
        interval_s: float,
        is_guest: bool,
    ) -> None:
        super().__init__(servers, grace_s=grace_s, interval_s=interval_s, is_guest=is_guest)
        self.fails_lost_turns = False
        """Whether a turn that was lost with the last server fails at once."""
        self._gate = PublicationGate(self, may_set_aside=may_set_aside)
        self._max_retries = max_retries
        self._follows_adapters = follows_adapters
        self._request_timeout_s = request_timeout_s
        self._num_layers = num_layers
        self._banned_ids = banned_ids
        self._call_name = uuid.uuid4().hex[:12]
        self._call_numbers = itertools.count()
        self._is_closed = False
        self._aborts: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        """Close connections and end the servers started here. Idempotent."""
        self._is_closed = True
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=5)
        await super().aclose()

    async def _sample(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        room: int,
        session: str | None,
        images: tuple[ImageRef, ...] = (),
    ) -> Generation:
        stats = self.stats
        stats.num_calls += 1
        draft = Reply()
        budget = _RetryBudget(self._max_retries)
        while (left := room - len(draft.token_ids)) > 0:
            state = await self._enter(session)
            if budget.failed_server is not None:
                stats.num_retries += 1
                stats.num_moved += state is not budget.failed_server
                budget.failed_server = None
            version = self.policy_version
            try:
                ids = [*prompt_ids, *draft.token_ids]
                reply = await self._request(state, ids, params, left, images)
                newest = reply.versions[-1] if reply.versions else version
                if self._follows_adapters:
                    # A request is sampled to its end by the adapter that it names.
                    reply.versions = Ints.repeated(version, len(reply.token_ids))
                elif newest < version:  # it was restarted unnoticed
                    self.lose(state)
                    raise EngineError(f"{state.client.url} lost the weights it was given")
                elif newest > version:  # held requests continue before the server is verified
                    await self._gate.wait()
                if newest == state.wrong_version:
                    raise EngineError(f"{state.client.url} has other weights than it reports")
                if self._follows_adapters and reply.finish == "abort":
                    newest = await state.reported_version()
            except EngineError as error:
                await self._handle_failure(error, state, params, version, budget)
                continue
            self.succeeded(state)
            draft.add(reply)
            if self.is_guest:
                self.learn(newest)
            if reply.finish == "stop":
                if reply.token_ids[-1] in params.stop_token_ids or params.grammar is not None:
                    return self._finish(draft, FinishReason.STOP)
                continue  # the model's own end of text, which is not a stop token here
            if reply.finish == "length":
                break
            if params.grammar is not None:  # a grammar cannot be resumed in the middle
                draft = Reply()
            if self._gate.is_open and self.policy_version == version:
                failure = EngineError(f"{state.client.url} aborted a request by itself")
                await budget.spend(failure, state)
            else:
                stats.num_continued += 1
        return self._finish(draft, FinishReason.LENGTH)

    async def _handle_failure(
        self,
        error: EngineError,
        state: ServerState,
        params: SamplingParams,
        version: int,
        budget: _RetryBudget,
    ) -> None:
        """Raise the error, unless the request, of that version, may be sent again."""
        if isinstance(error, RefusedError) and error.status in _NOT_RETRIED:
            if self._adapter is not None and await self._has_other_version(state, version):
                if not state.is_serving:
                    await budget.spend(error, state)
                return
            if params.grammar is not None:
                raise GrammarError(error.message) from error
            raise error
        self.failed(state, error)
        if is_refused(error):  # the server received nothing, so this attempt does not count
            budget.failed_server = state
            return
        is_cut_off = isinstance(error, EngineUnreachableError) and not isinstance(
            error.__cause__, TimeoutError
        )
        others = [other for other in self.serving if other is not state]
        if self.fails_lost_turns and is_cut_off and not others:
            raise EngineUnreachableError(
                f"the only server was lost while it sampled: {error}", hints=error.hints
            ) from error
        await budget.spend(error, state)

    @property
    def _adapter(self) -> str | None:
        """The adapter that requests name at the moment."""
        if not self._follows_adapters:
            return self.adapter
        version = self.policy_version
        return adapter_name(version) if version else None  # version 0 is the base itself

    async def _has_other_version(self, state: ServerState, version: int) -> bool:
        """Return whether the server lacks this version's adapter: it has a newer one or none."""
        with suppress(EngineError):
            reported = await state.reported_version()
            if reported == version:
                return False
            if self._follows_adapters and reported > version:
                self.learn(reported)
            else:
                self.lose(state)
            return True
        return False

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities of `token_ids[1:]` at temperature 1.

        Raises:
            EngineError: no server could score them.
        """
        state = await self._enter(None)
        timeout_s = self._request_timeout_s
        with state.request_in_flight():
            return await state.client.score(token_ids, adapter=self._adapter, timeout_s=timeout_s)

    async def score_top(self, token_ids: Sequence[int], top_k: int, *, start: int = 1) -> TopTokens:
        """Return the likeliest tokens in the places of `token_ids[start:]`; see `TopScoringEngine`.

        Raises:
            ConfigError: the server does not list as many tokens.
            EngineError: no server could score them.
        """
        state = await self._enter(None)
        request = ScoreRequest(token_ids=token_ids, top_k=top_k, start=start, adapter=self._adapter)
        with state.request_in_flight():
            return await state.client.score_top(request, timeout_s=self._request_timeout_s)

    async def _enter(self, session: str | None) -> ServerState:
        """Wait for the gate, and return a serving server."""
        while not self._is_closed:
            await self._gate.wait()
            state = await self.choose(session)
            if self._gate.is_open:  # it may have closed during the wait for a server
                return state
        raise EngineError("the engine was closed")

    async def _request(
        self,
        state: ServerState,
        prompt_ids: list[int],
        params: SamplingParams,
        max_new_tokens: int,
        images: tuple[ImageRef, ...],
    ) -> Reply:
        """Send one request; if the caller is cancelled, abort it on the server."""
        request = TurnRequest(
            id=f"{self._call_name}-{next(self._call_numbers)}",
            prompt_ids=prompt_ids,
            params=params,
            max_new_tokens=max_new_tokens,
            adapter=self._adapter,
            version=self.policy_version,
            num_layers=self._num_layers,
            images=images,
            banned_ids=self._banned_ids,
        )
        try:
            with state.request_in_flight():
                return await state.client.sample(request, timeout_s=self._request_timeout_s)
        except asyncio.CancelledError:
            abort = asyncio.create_task(_quietly(state.client.abort(request.id)))
            self._aborts.add(abort)
            abort.add_done_callback(self._aborts.discard)
            raise

    def _finish(self, draft: Reply, finish_reason: FinishReason) -> Generation:
        self.stats.num_tokens += len(draft.token_ids)
        return draft.generation(finish_reason)


class _RetryBudget:
    def __init__(self, max_retries: int) -> None:
        self._left = max_retries
        self._wait_s = _FIRST_WAIT_S
        self.failed_server: ServerState | None = None

    async def spend(self, error: EngineError, state: ServerState) -> None:
        """Use one retry, or raise if none is left; wait a little if the server still serves."""
        if self._left == 0:
            raise EngineError(f"the retry budget is spent: {error}", hints=error.hints) from error
        self._left -= 1
        self.failed_server = state
        if state.is_serving:
            await asyncio.sleep(self._wait_s * random.uniform(0.5, 1.0))
            self._wait_s *= 2


async def _quietly(request: Coroutine[Any, Any, object]) -> None:
    with suppress(EngineError):
        await request
