"""One episode, recorded token by token.

    agent.play(episode)
        episode.ask(messages)   bridge ids -> engine -> sampled ids -> text -> Message
        episode.act(message)    environment -> StepResult

The transcript is append-only: first prompt, sampled ids, bridge, sampled ids, ... The engine is
always given the whole of it, so a training row made of the spans is exactly what the engine saw
and sampled. Where history is rewritten, by the agent or by the chat template, a new branch begins
with a prompt of its own (see `areal_gym.rendering.Dialogue`); the old one is kept and trained on.

Limits. A turn that `max_new_tokens` cuts is still handed to the environment, which grades what
was written as it grades anything; but the episode ends there, with `MAX_TOKENS`: the policy has
not ended its turn, and an end written in its name would put it where it never chose to go. When
the context has no room for another turn, the episode ends with `MAX_TOKENS` too. Both are
truncations: kept and trained on. What fails is recorded at the boundary where it failed.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import struct
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from areal_gym.agents.base import Agent
from areal_gym.engines.base import Engine, Generation, SamplingParams
from areal_gym.envs.base import StepResult, TextEnv
from areal_gym.envs.tools import Tool
from areal_gym.errors import (
    AgentError,
    EngineError,
    EnvError,
    EpisodeError,
    EpisodeTimeoutError,
    UsageError,
)
from areal_gym.rendering import Dialogue, Renderer
from areal_gym.types import (
    FinishReason,
    Message,
    StopReason,
    Task,
    TokenSpan,
    Trajectory,
    Turn,
)

__all__ = ["InFlight", "derive_seed", "play_episode", "stop_reason_of"]

_STOP_REASONS = {
    "env": StopReason.ENV_ERROR,
    "agent": StopReason.AGENT_ERROR,
    "engine": StopReason.ENGINE_ERROR,
    "sandbox": StopReason.SANDBOX_ERROR,
    "worker": StopReason.WORKER_ERROR,
    "timeout": StopReason.TIMEOUT,
    "episode": StopReason.ENV_ERROR,  # an environment may raise the base class
}
_sessions = itertools.count()


def stop_reason_of(error: EpisodeError) -> StopReason:
    """Which boundary failed."""
    return _STOP_REASONS[error.boundary]


def derive_seed(*parts: int) -> int:
    """A 48-bit seed (JSON and every engine can hold it) that depends on all `parts`."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}Q", *parts), digest_size=6).digest()
    return int.from_bytes(digest, "little")


@dataclass(slots=True)
class InFlight:
    """How many episodes are being played, and what they wait for."""

    episodes: int = 0
    engine: int = 0
    env: int = 0

    @property
    def agent(self) -> int:
        """Those that are in the agent's own code."""
        return self.episodes - self.engine - self.env


async def play_episode(
    env: TextEnv,
    agent: Agent,
    engine: Engine,
    renderer: Renderer,
    *,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    params: SamplingParams | None = None,
    trajectory_id: str = "episode",
    group_id: str = "group",
    env_id: str | None = None,
    agent_id: str = "chat",
    timeout_s: float | None = None,
    in_flight: InFlight | None = None,
) -> Trajectory:
    """Play one episode and return what happened; failures are recorded, not raised.

    Args:
        env: one instance, used by this episode alone while it lasts.
        agent: how the policy is asked.
        engine: samples the policy.
        renderer: messages to ids.
        options: for `env.reset`, such as `{"task": task}` or `{"split": "test", "index": 3}`.
        seed: of the environment and of sampling.
        params: how to sample; `seed` and `stop_token_ids` are set here.
        trajectory_id: names the trajectory in files.
        group_id: names its group.
        env_id: the registered id; the class's name by default.
        agent_id: the agent's registered id.
        timeout_s: wall-clock limit; beyond it the episode has failed (`TIMEOUT`).
        in_flight: counters to keep up to date.

    Raises:
        UsageError: the request itself is wrong (no such split, roles that the template refuses).
    """
    played = _Played(env, engine, renderer, params or SamplingParams(), in_flight or InFlight())
    played.in_flight.episodes += 1
    played.seed = seed
    try:
        async with asyncio.timeout(timeout_s):
            with played.at(EnvError, "reset"):
                _, info = env.reset(seed=seed, options=options)
            played.first_messages = info["messages"]
            with played.at(AgentError, "play"):
                await agent.play(played)
    except EpisodeError as error:
        played.fail(error)
    except _EpisodeOver:
        pass
    except TimeoutError:
        played.fail(EpisodeTimeoutError(f"the episode took more than {timeout_s:g} s"))
    finally:
        engine.release(played.session)
        try:
            with played.at(EnvError, "aclose"):
                await env.aclose()
        except EpisodeError as error:
            played.fail(error)
        finally:
            played.in_flight.episodes -= 1
    return Trajectory(
        id=trajectory_id,
        group_id=group_id,
        task=played.task,
        env_id=env_id or type(env).__name__,
        agent_id=agent_id,
        seed=seed,
        **played.outcome(),
    )


class _EpisodeOver(Exception):
    """Unwinds the agent when there is no room for another turn."""


@dataclass(slots=True)
class _TurnDraft:
    """A turn whose reward is not known yet."""

    finish_reason: FinishReason
    engine_s: float
    env_s: float = 0.0
    tool_s: float = 0.0
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)


class _Played:
    """The other side of the `Episode` protocol: asks, acts, records."""

    def __init__(
        self,
        env: TextEnv,
        engine: Engine,
        renderer: Renderer,
        params: SamplingParams,
        in_flight: InFlight,
    ) -> None:
        self.env = env
        self.engine = engine
        self.renderer = renderer
        self.params = params
        self.in_flight = in_flight
        self.seed = 0
        self.session = f"episode-{next(_sessions)}"
        self.first_messages: Sequence[Message] = ()
        self.dialogue: Dialogue | None = None
        self.spans: list[TokenSpan] = []
        self.turns: list[_TurnDraft] = []
        self.messages: list[Message] = []
        self.unread: Sequence[Message] = ()
        self.metrics: dict[str, float] = {}
        self.stop_reason: StopReason | None = None
        self.error: EpisodeError | None = None
        self.is_full = False

    # ---- what the agent sees ------------------------------------------------------------------

    @property
    def tools(self) -> Sequence[Tool]:
        return self.env.tools

    async def ask(
        self, new_messages: Sequence[Message], *, replaces_history: bool = False
    ) -> Message:
        self._check_open("asks the policy")
        if self.dialogue is None:
            schemas = [tool.schema() for tool in self.env.tools]
            self.dialogue = Dialogue(self.renderer, schemas, dialect=self.env.tool_dialect)
        prompt = self.dialogue.prompt(new_messages, replaces_history=replaces_history)
        if len(prompt.token_ids) >= self.engine.max_context:
            self.stop_reason = StopReason.MAX_TOKENS
            self.is_full = True
            raise _EpisodeOver
        turn = len(self.turns)
        params = SamplingParams(
            max_new_tokens=self.params.max_new_tokens,
            temperature=self.params.temperature,
            top_p=self.params.top_p,
            top_k=self.params.top_k,
            stop_token_ids=self.renderer.stop_token_ids,
            seed=derive_seed(self.seed, turn),
        )
        start = time.perf_counter()
        with self.at(EngineError, "generate"):
            generation = await self.engine.generate(prompt.token_ids, params, session=self.session)
            sampled = _policy_spans(generation, turn, prompt.branch)
        self.spans.append(
            TokenSpan(
                origin="env" if prompt.num_kept else "prompt",
                token_ids=prompt.added,
                turn=turn,
                branch=prompt.branch,
            )
        )
        self.spans += sampled
        self.turns.append(_TurnDraft(generation.finish_reason, time.perf_counter() - start))
        message = self.dialogue.answer(prompt, generation.token_ids)
        self.unread = ()
        self.messages += new_messages
        self.messages.append(message)
        return message

    async def act(self, message: Message) -> StepResult:
        self._check_open("acts")
        if not self.turns:
            raise AgentError("the agent acts before it has asked the policy")
        turn = self.turns[-1]
        start = time.perf_counter()
        try:
            with self.at(EnvError, "step"):
                result = await self.env.astep(message)
        finally:
            turn.env_s += time.perf_counter() - start
            turn.tool_s += self.env.tool_s
        turn.reward += result.reward
        for name, part in result.info.get("reward_parts", {}).items():
            turn.reward_parts[name] = turn.reward_parts.get(name, 0.0) + part
        for name, value in result.info.get("metrics", {}).items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        self.unread = result.info["messages"]
        if turn.finish_reason is FinishReason.LENGTH:
            self.stop_reason = StopReason.MAX_TOKENS
            return result if result.terminated else result._replace(truncated=True)
        if result.terminated:
            self.stop_reason = StopReason.COMPLETED
        elif result.truncated:
            by_turns = result.info.get("truncated_by") == "max_turns"
            self.stop_reason = StopReason.MAX_TURNS if by_turns else StopReason.TRUNCATED
        return result

    def outcome(self) -> dict[str, Any]:
        """The fields of the trajectory that playing decides."""
        if self.stop_reason is None:
            self.fail(AgentError("the agent stopped before the environment had ended the episode"))
        return {
            "spans": tuple(self.spans),
            "turns": tuple(
                Turn(
                    finish_reason=turn.finish_reason,
                    reward=turn.reward,
                    reward_parts=turn.reward_parts,
                    engine_s=turn.engine_s,
                    env_s=turn.env_s,
                    tool_s=turn.tool_s,
                )
                for turn in self.turns
            ),
            "messages": (*self.messages, *self.unread),
            "stop_reason": self.stop_reason,
            "error": None if self.error is None else str(self.error),
            "metrics": self.metrics,
        }

    @property
    def task(self) -> Task:
        try:
            return self.env.task
        except UsageError:  # the very first reset failed
            return Task(id="unknown", data={})

    # ---- failures -----------------------------------------------------------------------------

    def at(self, error: type[EpisodeError], what: str) -> _Boundary:
        return _Boundary(self, error, what)

    def fail(self, error: EpisodeError) -> None:
        """Record the first failure; those that follow are its consequences."""
        if self.error is None:
            self.error = error
            self.stop_reason = stop_reason_of(error)

    def _check_open(self, what: str) -> None:
        if self.error is not None:
            raise self.error
        if self.is_full:
            raise _EpisodeOver
        if self.stop_reason is not None:
            raise AgentError(f"the agent {what} after the end of the episode")


class _Boundary:
    """Attributes what fails inside to one boundary, once, and counts who is waited for.

    `EpisodeError`s that arrive keep their own attribution (a sandbox that fails inside an
    environment is the sandbox's failure); `UsageError`s are no failure of an episode and pass.
    """

    __slots__ = ("error", "played", "what")

    def __init__(self, played: _Played, error: type[EpisodeError], what: str) -> None:
        self.played = played
        self.error = error
        self.what = what

    def __enter__(self) -> None:
        self._count(1)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._count(-1)
        if error is None or not isinstance(error, Exception):
            return
        if isinstance(error, UsageError | _EpisodeOver):
            return
        if not isinstance(error, EpisodeError):
            wrapped = self.error(f"{self.error.boundary} failed in {self.what}: {error!r}")
            self.played.fail(wrapped)
            raise wrapped from error
        self.played.fail(error)

    def _count(self, change: int) -> None:
        if self.error is EngineError:
            self.played.in_flight.engine += change
        elif self.error is EnvError:
            self.played.in_flight.env += change


def _policy_spans(generation: Generation, turn: int, branch: int) -> list[TokenSpan]:
    """One span per run of tokens with the same version."""
    if generation.finish_reason is FinishReason.ABORT:
        raise EngineError("the engine aborted the turn")
    if not generation.token_ids:
        raise EngineError("the engine sampled no token")
    if len(generation.versions) != len(generation.token_ids):
        raise EngineError("the engine must give one policy version per token")
    if sorted(generation.versions) != list(generation.versions):
        raise EngineError("the policy version went back inside a turn")
    spans: list[TokenSpan] = []
    start = 0
    while start < len(generation.token_ids):
        version = generation.versions[start]
        end = bisect_right(generation.versions, version, lo=start)
        spans.append(
            TokenSpan(
                origin="policy",
                token_ids=generation.token_ids[start:end],
                logprobs=generation.logprobs[start:end],
                policy_version=version,
                turn=turn,
                branch=branch,
            )
        )
        start = end
    return spans
