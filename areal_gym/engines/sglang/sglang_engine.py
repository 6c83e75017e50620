"""The SGLang engine: a policy served by other processes, as exact as one in this process.

    generate:  [gate] -> a server -> /generate -> stop, length      the turn is there
                  ^                     |
                  |                     +-- stop at a token that is no stop token: go on
                  |                     +-- abort, by a publication   keep what there is, go on
                  |                     +-- server lost, 5xx, timeout  again, within the budget
                  +---------------------+

    updating:  gate closes; generation is interrupted; weights change; each server must report
               the new version; gate opens

Generation is interrupted in one of two ways. "abort", on every version of SGLang: requests end
with what they have, and are sent again with it as part of their prompt. "retract": the server
sets them aside and computes their caches anew under the new weights; nothing is sent again.

No token gets a version that it was not sampled under. Servers since 0.5.19 say it per token. With
older ones the version is the one when the request was sent, and no request is in flight while
weights change: aborting is repeated until all have come back.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from areal_gym.config import EngineConfig
from areal_gym.engines.base import (
    Generation,
    Piece,
    SamplingParams,
    WeightServer,
    stream_in_chunks,
)
from areal_gym.engines.sglang.launch import LaunchedServer, ServerProcess
from areal_gym.engines.sglang.replies import Draft, Reply, read_answer, sampling_params
from areal_gym.engines.sglang.server_client import (
    RefusedError,
    SGLangServer,
    is_refused,
    vocab_size_of,
)
from areal_gym.engines.sglang.server_pool import ServerPool, ServerState
from areal_gym.errors import ConfigError, EngineError, EngineUnreachableError, GrammarError
from areal_gym.types import FinishReason

_OUR_FAULT = frozenset({400, 404, 405, 413, 422})
"""Of the refusals, those that asking again does not change."""
_DRAIN_S = 60.0
"""A server that has not given its requests back by then is lost."""
_TOLD_AT_A_TIME = 16
"""Tokens of a stream that come together; the server's prefix cache makes going on cheap."""
_FIRST_WAIT_S = 0.25
"""Before a request is sent again to a server that failed; doubles each time."""


@dataclass(slots=True)
class SGLangStats:
    """Counters since the start."""

    num_calls: int = 0
    num_tokens: int = 0
    num_retries: int = 0
    """Requests sent again because a server failed."""
    num_moved: int = 0
    """Of these, how many went to another server."""
    num_continued: int = 0
    """Requests that a publication interrupted."""
    num_servers_lost: int = 0
    num_relaunches: int = 0
    held_s: float = 0.0
    """How long calls waited for publications, all together."""
    publication_s: float = 0.0
    """How long generation stood still for publications."""


class SGLangEngine:
    """Samples a policy that SGLang serves; see the module.

    Args:
        policy: the checkpoint directory that the servers serve at the start.
        urls: the servers; without any, `num_servers` are started here and ended by `aclose`.
        max_context: tokens of one sequence; never more than the servers take.
        interrupt: how a publication interrupts generation, "abort" or "retract".
        max_retries: how often one call is sent again after failures of servers.
        request_timeout_s: of one request; the only limit in time there is.
        grace_s: how long calls wait when no server lives.
        health_interval_s: seconds between two looks at each server.
        take_over: servers may hold other weights at the start; training gives them its own.
        is_guest: somebody else publishes to these servers; versions are what they say. Whoever
            publishes must pause generation ("retract"), for guests are not asked to wait.
        num_servers: how many to start.
        command: what starts one; `python -m sglang.launch_server` by default.
        server_args: further arguments of it.
        gpus: CUDA_VISIBLE_DEVICES of each server that is started.
        log_dir: keeps their logs; else they are removed when all went well.
        start_timeout_s: a started server must serve by then.
        processes: servers that are placed elsewhere, for this engine to start and to end.

    Raises:
        ConfigError: arguments that do not fit together.
    """

    def __init__(
        self,
        policy: Path,
        *,
        urls: Sequence[str] = (),
        max_context: int = 4096,
        interrupt: Literal["abort", "retract"] = "abort",
        max_retries: int = 3,
        request_timeout_s: float = 3600.0,
        grace_s: float = 60.0,
        health_interval_s: float = 5.0,
        take_over: bool = False,
        is_guest: bool = False,
        num_servers: int = 1,
        command: str | Sequence[str] | None = None,
        server_args: str | Sequence[str] = (),
        gpus: Sequence[str] = (),
        log_dir: str | Path | None = None,
        start_timeout_s: float = 600.0,
        processes: Sequence[ServerProcess] = (),
    ) -> None:
        if interrupt not in ("abort", "retract"):
            raise ConfigError(f"no interrupt {interrupt!r}; there is: abort, retract")
        if gpus and len(gpus) != num_servers:
            raise ConfigError(
                f"gpus names {len(gpus)} servers' devices, and num_servers = {num_servers}"
            )
        self.policy_version = 0
        self.max_context = max_context
        self.takes_grammars = True
        self.adapter: str | None = None
        """The LoRA adapter that the policy is sampled with, by its name on the servers."""
        self.take_over = take_over
        self.fails_lost_turns = False
        self._is_guest = is_guest
        self._policy = policy
        self._interrupt = interrupt
        self._max_retries = max_retries
        self._request_timeout_s = request_timeout_s
        self._stats = SGLangStats()
        self._call_name = uuid.uuid4().hex[:12]
        self._call_numbers = itertools.count()
        self._is_closed = False
        self._gate = asyncio.Event()
        self._gate.set()
        self._aborts: set[asyncio.Task[None]] = set()
        members = [ServerState(SGLangServer(url, policy=policy)) for url in dict.fromkeys(urls)]
        members += [ServerState(SGLangServer(p.url, policy=policy), p) for p in processes]
        for index in range(0 if members else num_servers):
            process = LaunchedServer(
                policy,
                command=command,
                server_args=server_args,
                gpus=str(gpus[index]) if gpus else None,
                log=None if log_dir is None else Path(log_dir, f"sglang-{index}.log"),
                start_timeout_s=start_timeout_s,
            )
            members.append(ServerState(SGLangServer(process.url, policy=policy), process))
        self._fleet = ServerPool(
            members,
            grace_s=grace_s,
            interval_s=health_interval_s,
            policy_version=lambda: self.policy_version,
            is_guest=is_guest,
        )

    @classmethod
    def from_settings(cls, policy: Path, settings: EngineConfig) -> Self:
        """An engine as a run's settings want it; `engine.kwargs` are the constructor's arguments.

        Raises:
            ConfigError: arguments that do not fit together.
            TypeError: arguments that there are not.
        """
        return cls(policy, urls=settings.url, max_context=settings.max_context, **settings.kwargs)

    @property
    def stats(self) -> SGLangStats:
        """Counters; read only."""
        self._stats.num_servers_lost = self._fleet.num_lost
        self._stats.num_relaunches = self._fleet.num_relaunches
        return self._stats

    @property
    def members(self) -> Sequence[ServerState]:
        """The servers, those that do not serve included; read only."""
        return self._fleet.members

    @property
    def num_outages(self) -> int:
        """How often no server was left; see `InterruptedEngine`."""
        return self._fleet.num_outages

    @property
    def outage_s(self) -> float:
        """For how long no server has served, though one did before."""
        return self._fleet.outage_s

    @property
    def needs_weights(self) -> bool:
        """Whether nobody serves for want of weights that only a publication brings."""
        return self._fleet.needs_weights

    async def start(self) -> None:
        """Start servers where none were named; look at all of them.

        Raises:
            EngineError: one does not answer, or ended while starting.
            ConfigError: one is no SGLang server, or cannot do what the settings want.
        """
        members = self._fleet.members
        await asyncio.gather(*(m.process.start() for m in members if m.process is not None))
        try:
            await self._fleet.start()
        except EngineUnreachableError:
            raise
        except EngineError as error:
            raise ConfigError(error.message, hints=error.hints) from error
        for member in members:
            facts = member.facts
            assert facts is not None
            self.max_context = min(self.max_context, facts.max_context)
            if (self._is_guest or self._interrupt == "retract") and not facts.can_retract:
                raise ConfigError(
                    f"SGLang {facts.version} at {member.server.url} cannot set requests aside "
                    "while weights change",
                    hints=[
                        "SGLang 0.5.21 and later can",
                        "engine.kwargs.interrupt=abort works with every version, where only one "
                        "process samples",
                    ],
                )
            vocab_size = vocab_size_of(self._policy)
            if None not in (vocab_size, facts.vocab_size) and vocab_size != facts.vocab_size:
                raise ConfigError(
                    f"{member.server.url} serves {facts.model_path}, whose vocabulary has "
                    f"{facts.vocab_size} tokens; that of {self._policy} has {vocab_size}",
                    hints=[f"start the server with the policy: {member.server.start_command}"],
                )

    async def aclose(self) -> None:
        """End connections, and the servers that were started here. Idempotent."""
        self._is_closed = True
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=5)
        await self._fleet.aclose()

    # ---- generation ---------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Generation:
        """Sample a continuation; see `Engine.generate`.

        Raises:
            EngineError: the prompt does not fit, or the retry budget is spent.
            EngineUnreachableError: no server has lived for the grace period.
        """
        room = min(params.max_new_tokens, self.max_context - len(prompt_ids))
        if not prompt_ids or room <= 0:
            raise EngineError(
                f"a prompt of {len(prompt_ids)} tokens; 1 to {self.max_context - 1} fit"
            )
        self._stats.num_calls += 1
        draft = Draft()
        budget = _Budget(self._max_retries)
        while (left := room - len(draft.token_ids)) > 0:
            member = await self._enter(session)
            if budget.failed_at is not None:
                self._stats.num_retries += 1
                self._stats.num_moved += member is not budget.failed_at
                budget.failed_at = None
            version = self.policy_version
            try:
                answer = await self._sample(member, [*prompt_ids, *draft.token_ids], params, left)
                if answer.versions and answer.versions[-1] < version:
                    # It was restarted behind our back. What it sampled is no use to anybody.
                    self._fleet.lose(member)
                    raise EngineError(f"{member.server.url} lost the weights it was given")
            except EngineError as error:
                if isinstance(error, RefusedError) and error.status in _OUR_FAULT:
                    if params.grammar is not None:
                        raise GrammarError(error.message) from error
                    raise
                self._fleet.failed(member, error)
                if is_refused(error):  # the server got nothing: this is no failed attempt
                    budget.failed_at = member
                    continue
                self._require_not_lost(member, error)
                await budget.spend(error, member)
                continue
            self._fleet.succeeded(member)
            draft.add(answer, version)
            if self._is_guest and answer.versions:
                self.policy_version = max(version, answer.versions[-1])
            if answer.finish == "stop":
                if answer.token_ids[-1] in params.stop_token_ids or params.grammar is not None:
                    return self._finish(draft, FinishReason.STOP)
                continue  # the model's own end of text, which nobody asked for
            if answer.finish == "length":
                break
            if params.grammar is not None:  # it would begin anew in the middle
                draft = Draft()
            if self._gate.is_set() and self.policy_version == version:
                why = EngineError(f"{member.server.url} aborted a request by itself")
                await budget.spend(why, member)
            else:
                self._stats.num_continued += 1
        return self._finish(draft, FinishReason.LENGTH)

    def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Tell of the tokens some at a time; see `StreamingEngine.stream`.

        Under a grammar all come at once: going on would begin it anew.

        Raises:
            EngineError: as `generate`.
        """
        return stream_in_chunks(
            self,
            prompt_ids,
            params,
            session=session,
            chunk_tokens=_TOLD_AT_A_TIME if params.grammar is None else self.max_context,
        )

    def release(self, session: str) -> None:
        """The session's next call, if any, may go to any server."""
        self._fleet.release(session)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of `token_ids[1:]`, each given those before it, at temperature 1.

        Raises:
            EngineError: no server could say.
        """
        member = await self._enter(None)
        body = {
            "input_ids": list(token_ids),
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
        }
        answer = await self._post(member, body)
        try:
            return [row[0] for row in answer["meta_info"]["input_token_logprobs"][1:]]
        except KeyError:
            raise EngineError(f"{member.server.url} did not score: {str(answer)[:200]}") from None

    async def _enter(self, session: str | None) -> ServerState:
        """Past the gate, to a server that serves."""
        clock = asyncio.get_running_loop().time
        while not self._is_closed:
            if not self._gate.is_set():
                since_s = clock()
                await self._gate.wait()
                self._stats.held_s += clock() - since_s
            member = await self._fleet.choose(session)
            if self._gate.is_set():  # it may have closed while we waited for a server
                return member
        raise EngineError("the engine was closed")

    async def _sample(
        self,
        member: ServerState,
        prompt_ids: list[int],
        params: SamplingParams,
        max_new_tokens: int,
    ) -> Reply:
        assert member.facts is not None
        body = {
            "input_ids": prompt_ids,
            "sampling_params": sampling_params(
                params, max_new_tokens, has_seeds=member.facts.has_seeds
            ),
            "return_logprob": True,
        }
        return read_answer(await self._post(member, body))

    async def _post(self, member: ServerState, body: dict[str, Any]) -> dict[str, Any]:
        """`/generate`, counted; the server hears of it when nobody waits any more."""
        rid = body["rid"] = f"{self._call_name}-{next(self._call_numbers)}"
        if self.adapter is not None:
            body["lora_path"] = self.adapter
        member.num_in_flight += 1
        try:
            return await member.server.post("/generate", body, timeout_s=self._request_timeout_s)
        except asyncio.CancelledError:
            self._spawn_abort(member, rid)
            raise
        finally:
            member.num_in_flight -= 1
            if not member.num_in_flight:
                member.drained.set()

    def _require_not_lost(self, member: ServerState, error: EngineError) -> None:
        """Fail a turn that went down with the last server, where that is wanted.

        Raises:
            EngineUnreachableError: it did, and `fails_lost_turns`.
        """
        is_cut_off = isinstance(error, EngineUnreachableError) and not isinstance(
            error.__cause__, TimeoutError
        )
        others = [other for other in self._fleet.serving if other is not member]
        if self.fails_lost_turns and is_cut_off and not others:
            raise EngineUnreachableError(
                f"the only server was lost while it sampled: {error}", hints=error.hints
            ) from error

    def _finish(self, draft: Draft, finish_reason: FinishReason) -> Generation:
        self._stats.num_tokens += len(draft.token_ids)
        return draft.finished(finish_reason)

    def _spawn_abort(self, member: ServerState, rid: str) -> None:
        """Nobody waits for the request any more; let the server know."""
        task = asyncio.create_task(_quietly(member.server.post("/abort_request", {"rid": rid})))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    # ---- publication --------------------------------------------------------------------------

    @asynccontextmanager
    async def updating(
        self, version: int, *, must_abort: bool = False
    ) -> AsyncIterator[Sequence[WeightServer]]:
        """Interrupt generation for new weights; see `RemoteEngine.updating`.

        Raises:
            EngineError: no server took the new weights.
            EngineUnreachableError: no server has lived for the grace period.
        """
        clock = asyncio.get_running_loop().time
        async with self._fleet.lock:
            members = await self._fleet.reachable()
            since_s = clock()
            self._gate.clear()
            try:
                may_retract = self._interrupt == "retract" and not must_abort
                is_quiet = await asyncio.gather(
                    *(self._pause(member, may_retract=may_retract) for member in members)
                )
                members = [m for m, quiet in zip(members, is_quiet, strict=True) if quiet]
                if not members:
                    raise EngineUnreachableError("every server was lost at the publication")
                published: int | None = None
                try:
                    yield [member.server for member in members]
                    published = version
                finally:
                    await self._resume(members, published)
            finally:
                self._gate.set()
                self._stats.publication_s += clock() - since_s
        if self.policy_version != version:
            raise EngineError(f"no server reports version {version} after its publication")

    async def _pause(self, member: ServerState, *, may_retract: bool) -> bool:
        """Until `_resume`, nothing is sampled there. False when the server had to be given up."""
        try:
            if may_retract:
                await member.server.post("/pause_generation", {"mode": "retract"})
                member.is_paused = True
            else:
                async with asyncio.timeout(_DRAIN_S):
                    await self._drain(member)
        except (EngineError, TimeoutError):
            self._fleet.lose(member)
            return False
        return True

    async def _drain(self, member: ServerState) -> None:
        """Abort until every request is back: one may have been on its way to the server."""
        wait_s = 0.05
        while True:
            member.drained.clear()
            # `/pause_generation` with mode "abort" does the same, but looks only once a second.
            await member.server.post("/abort_request", {"rid": "", "abort_all": True})
            if not member.num_in_flight:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(member.drained.wait(), wait_s)
            wait_s = min(2 * wait_s, 1.0)

    async def _resume(self, members: Sequence[ServerState], published: int | None) -> None:
        """Servers with the right weights serve, all others do not."""
        reports = await asyncio.gather(
            *(member.reported_version() for member in members), return_exceptions=True
        )
        if published in reports and published is not None:
            self.policy_version = published
        for member, report in zip(members, reports, strict=True):
            if report == self.policy_version:
                self._fleet.admit(member)
            else:
                self._fleet.lose(member)
        await asyncio.gather(*(self._unpause(member) for member in members if member.is_paused))

    async def _unpause(self, member: ServerState) -> None:
        member.is_paused = False
        try:
            await member.server.post("/continue_generation", {})
        except EngineError:
            self._fleet.lose(member)


class _Budget:
    """How often one call may be sent again."""

    def __init__(self, max_retries: int) -> None:
        self._left = max_retries
        self._wait_s = _FIRST_WAIT_S
        self.failed_at: ServerState | None = None

    async def spend(self, error: EngineError, member: ServerState) -> None:
        """Wait a little, unless the next attempt goes to another server anyway.

        Raises:
            EngineError: the budget is spent.
        """
        if self._left == 0:
            raise EngineError(f"the retry budget is spent: {error}", hints=error.hints) from error
        self._left -= 1
        self.failed_at = member
        if member.is_serving:
            await asyncio.sleep(self._wait_s * random.uniform(0.5, 1.0))
            self._wait_s *= 2


async def _quietly(request: Coroutine[Any, Any, object]) -> None:
    with suppress(EngineError):
        await request
