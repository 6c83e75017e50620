"""Plays one episode and records it token by token.

    agent.play(episode)
        episode.ask(messages)   bridge ids -> engine -> sampled ids -> text -> Message
        episode.act(message)    environment -> StepResult

The token transcript is append-only: first prompt, sampled ids, bridge, sampled ids, ... (a bridge
is the tokens between two sampled turns). Each engine call gets the whole transcript, so a training
row made of the spans is exactly what the engine saw and sampled. When the agent or the chat
template rewrites history, a new branch begins with its own prompt; the old branch is trained on.

Limits: the environment still grades a turn that `max_new_tokens` cuts off, but the episode ends
there with `MAX_TOKENS`, because the policy did not end its turn. It also ends with `MAX_TOKENS`
when the context has no room for another turn. Both kinds of episodes are kept and trained on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from areal_gym.agents.base import Agent, PolicyEndpoint
from areal_gym.chat import Dialogue, Renderer
from areal_gym.engines.base import Engine, InterruptedEngine, SamplingParams
from areal_gym.envs.base import StepResult, TextEnv
from areal_gym.envs.tools import Tool
from areal_gym.errors import (
    AgentError,
    EngineError,
    EngineUnreachableError,
    EnvError,
    EpisodeError,
    EpisodeTimeoutError,
    RewardError,
    UsageError,
)
from areal_gym.recording import ContextFullError, InFlight, Recorder, TurnDraft
from areal_gym.rollout.fixed_roles import play_fixed_roles
from areal_gym.rollout.outside_play import PlaysItself, is_failure, play_outside, require_no_agent
from areal_gym.rollout.tool_runs import ToolRuns
from areal_gym.types import FinishReason, Message, StopReason, Task, ToolCall, Trajectory

if TYPE_CHECKING:
    from areal_gym.gateway.session import Session
    from areal_gym.places import ProgramPlace

_T = TypeVar("_T")


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
    """Play one episode and return its trajectory; failures are recorded in it, not raised.

    Args:
        env: the environment instance; no other episode may use it meanwhile.
        agent: decides how the policy is prompted.
        engine: samples from the policy.
        renderer: turns messages into token ids.
        options: passed to `env.reset`: `{"task": task}` or `{"split": "test", "index": 3}`.
        seed: seeds the environment and sampling.
        params: sampling parameters; this function sets `seed` and `stop_token_ids`.
        trajectory_id, group_id: the ids of the trajectory and of its group in files.
        env_id: the environment's registered id; by default the name of its class.
        agent_id: the agent's registered id.
        timeout_s: the wall-clock limit in seconds; an episode that exceeds it fails (`TIMEOUT`).
        in_flight: counters that this function keeps up to date.

    Raises:
        UsageError: the request is invalid (no such split, roles that the template refuses).
    """
    require_no_agent(env, agent_id)
    params = params or SamplingParams()
    recorder = Recorder(engine, renderer, params, seed=seed, in_flight=in_flight)
    episode = _RecordedEpisode(env, recorder, group_id)
    recorder.in_flight.episodes += 1
    reset = partial(env.areset, seed=seed, options=options)
    try:
        await _play_to_end(episode, agent, reset, timeout_s)
    finally:
        episode.close()
        try:
            await episode.call_env(env.aclose, "aclose")
        except EpisodeError as error:
            recorder.fail(error)
        finally:
            recorder.in_flight.episodes -= 1
    if not recorder.is_over:
        recorder.fail(AgentError("the agent stopped before the environment had ended the episode"))
    return Trajectory(
        id=trajectory_id,
        group_id=group_id,
        task=episode.task,
        env_id=env.played_id or env_id or type(env).__name__,
        agent_id=agent_id,
        seed=seed,
        **recorder.outcome(),
    )


async def _play_to_end(
    episode: _RecordedEpisode,
    agent: Agent,
    reset: Callable[[], Awaitable[Any]],
    timeout_s: float | None,
) -> None:
    engine = episode.recorder.engine
    num_outages = getattr(engine, "num_outages", 0)  # isinstance of a protocol is slow
    try:
        async with asyncio.timeout(timeout_s) as episode.deadline:
            _, info = await episode.call_env(reset, "reset")
            await episode.begin(info["messages"])
            if episode.is_over:
                return
            try:
                if isinstance(episode.env, PlaysItself):
                    await play_outside(episode, episode.env)
                else:
                    await agent.play(episode)
            except BaseException as error:
                if is_failure(error):
                    episode.blame_agent(error)
                raise
    except EpisodeError as error:
        episode.recorder.fail(error)
    except _EpisodeOver:
        with suppress(EpisodeError):  # `conclude` has recorded it
            await episode.conclude()
    except TimeoutError:
        failure: EpisodeError = EpisodeTimeoutError(f"the episode took more than {timeout_s:g} s")
        if isinstance(engine, InterruptedEngine) and (
            engine.outage_s > 0 or engine.num_outages != num_outages
        ):
            failure = EngineUnreachableError(f"{failure}, and no server was there for part of it")
        episode.recorder.fail(failure)


class _EpisodeOver(Exception):
    """Unwinds the agent when there is no room for another turn."""


class _RecordedEpisode:
    """Implements the agent's `Episode`: samples, acts in the environment, records everything."""

    def __init__(self, env: TextEnv, recorder: Recorder, group_id: str) -> None:
        self.env = env
        self.recorder = recorder
        self.group_id = group_id
        self.deadline: asyncio.Timeout | None = None
        self.first_messages: Sequence[Message] = ()
        self._dialogues: dict[str | None, Dialogue] = {}
        self._is_full = False
        self._session: Session | None = None
        self._acting = asyncio.Lock()
        self._tool_runs = ToolRuns()

    # ---- the agent's side: see `Episode` ------------------------------------------------------

    @property
    def tools(self) -> Sequence[Tool]:
        return self.env.tools

    @property
    def roles(self) -> Sequence[str]:
        return [role for role in self.env.roles if role not in self.env.fixed_roles]

    @property
    def role(self) -> str | None:
        return self.env.role

    async def ask(
        self, new_messages: Sequence[Message], *, replaces_history: bool = False
    ) -> Message:
        self._check_open("asks the policy")
        role = self.env.role
        if role not in self._dialogues:
            schemas = [tool.schema() for tool in self.env.tools]
            renderer = self.recorder.renderer
            self._dialogues[role] = Dialogue(renderer, schemas, dialect=self.env.tool_dialect)
        dialogue = self._dialogues[role]
        prompt = dialogue.prompt(new_messages, replaces_history=replaces_history)
        try:
            message, _ = await self.recorder.sample(dialogue, prompt, role=role)
        except ContextFullError:
            self.recorder.stop_reason = StopReason.MAX_TOKENS
            self._is_full = True
            raise _EpisodeOver from None
        except BaseException as error:
            if is_failure(error):
                self.blame(error, EngineError, "generate")
            raise
        self.recorder.unread = ()
        return message

    async def act(self, message: Message, *, turn: TurnDraft | None = None) -> StepResult:
        self._check_open("acts")
        turn = turn or self.recorder.turn_of(message, self.env.role)
        start = time.perf_counter()
        try:
            result = await self.call_env(partial(self.env.astep, message), "step")
        finally:
            turn.env_s += time.perf_counter() - start
            turn.tool_s += self.env.tool_s
        result = self.recorder.add_step(turn, result)
        if turn.finish_reason is FinishReason.LENGTH:
            await self.conclude()
        return await play_fixed_roles(self.env, self.recorder, result, self.call_env)

    async def begin(self, messages: Sequence[Message]) -> None:
        """Record the first messages; fixed roles play until it is the policy's turn."""
        step = StepResult("", 0.0, False, False, {"messages": messages})
        step = await play_fixed_roles(self.env, self.recorder, step, self.call_env)
        self.first_messages = step.info["messages"]

    async def conclude(self) -> None:
        """Let the environment grade an episode that it has not ended itself."""
        record, stop_reason = self.recorder, self.recorder.stop_reason
        if not record.turns or record.error is not None:
            return
        result = await self.call_env(self.env.aconclude, "conclude")
        if result is not None:
            record.add_step(record.turns[-1], result)
            record.stop_reason = stop_reason or record.stop_reason

    async def access(self, *, max_calls: int) -> PolicyEndpoint:
        if self._session is None:
            from areal_gym.gateway.session import SessionOptions
            from areal_gym.gateway.shared_gateway import shared_gateway

            gateway = await shared_gateway()
            options = SessionOptions(group_id=self.group_id, max_calls=max_calls)
            self._session = gateway.open_session(self.recorder, options, episode=self)
        return self._session

    async def program_place(self) -> ProgramPlace | None:
        return await self.call_env(self.env.program_place, "program_place")

    async def call_tool(self, call_id: str) -> str:
        message = None if self._session is None else self._session.message_with(call_id)
        if message is None:
            raise AgentError(f"the policy has not made a call {call_id!r}")
        names = {tool.name for tool in self.env.tools}
        return await self._tool_runs.output_of(message, call_id, names, self._act_on)

    async def reply(self, answer: str) -> Sequence[Message]:
        async with self._acting:
            if self.is_over:
                return ()
            await self.act({"role": "assistant", "content": answer})
            return () if self.is_over else self.recorder.unread

    async def finish(
        self, answer: str | None = None, *, reward: float | None = None, is_truncated: bool = False
    ) -> None:
        record = self.recorder
        if record.error is not None:
            raise record.error
        limit = None if self._session is None else self._session.limit
        if not record.turns and limit is None:
            raise AgentError("the agent has finished without asking the policy")
        if answer is not None and record.turns:
            await self.reply(answer)
        if reward is not None:
            self.give_reward(reward)
        if not record.is_over or limit is not None:
            if reward is None:
                await self.conclude()
            own = StopReason.MAX_TURNS if is_truncated else StopReason.COMPLETED
            record.stop_reason = limit or own

    def give_reward(self, reward: float, *, turn: TurnDraft | None = None) -> None:
        if not isinstance(reward, bool | int | float) or not math.isfinite(reward):
            error = AgentError(f"the agent gave the reward {reward!r}; a finite number is needed")
            error.boundary = RewardError.boundary
            raise error
        if not self.recorder.turns:
            raise AgentError("the agent gave a reward without asking the policy")
        (turn or self.recorder.turns[-1]).reward += reward

    @contextmanager
    def idle(self) -> Iterator[None]:
        when = None if self.deadline is None else self.deadline.when()
        if self.deadline is None or when is None:
            yield
            return
        clock = asyncio.get_running_loop().time
        since_s = clock()
        self.deadline.reschedule(None)
        try:
            yield
        finally:
            self.deadline.reschedule(when + clock() - since_s)

    @property
    def is_over(self) -> bool:
        return self.recorder.is_over

    async def _act_on(self, message: Message, calls: list[ToolCall]) -> StepResult | None:
        async with self._acting:
            if self.is_over:
                return None
            turn = self.recorder.turn_of(message)
            return await self.act({**message, "tool_calls": calls}, turn=turn)

    @property
    def task(self) -> Task:
        try:
            return self.env.task
        except UsageError:  # the very first reset failed
            return Task(id="unknown", data={})

    def close(self) -> None:
        """Cancel running tools, close the gateway session, and free the engine's cache."""
        self._tool_runs.cancel()
        if self._session is not None:
            self._session.close()
        self.recorder.release()

    # ---- failures -----------------------------------------------------------------------------

    async def call_env(self, call: Callable[[], Awaitable[_T]], name: str) -> _T:
        """Call the environment, count the call as in flight, and attribute failures to it."""
        self.recorder.in_flight.env += 1
        try:
            return await call()
        except BaseException as error:
            if is_failure(error):
                self.blame(error, EnvError, name)
            raise
        finally:
            self.recorder.in_flight.env -= 1

    def blame(self, error: BaseException, boundary: type[EpisodeError], name: str) -> None:
        """Record the failure of a call, once; the caller raises the error again.

        An `EpisodeError` keeps its own boundary (a sandbox that fails inside an environment is the
        sandbox's failure). A `UsageError` does not fail the episode.

        Raises:
            EpisodeError: the boundary's error, in place of any other exception.
        """
        if isinstance(error, UsageError | ContextFullError | _EpisodeOver):
            return
        if not isinstance(error, EpisodeError):
            wrapped = boundary(f"{boundary.boundary} failed in {name}: {error!r}")
            self.recorder.fail(wrapped)
            raise wrapped from error
        self.recorder.fail(error)

    def blame_agent(self, error: BaseException) -> None:
        """Attribute an error to the agent, unless the policy's failure over HTTP caused it."""
        try:
            if isinstance(error, Exception):
                self._raise_cause(error)
        except Exception as cause:
            self.blame(cause, AgentError, "play")
            raise
        self.blame(error, AgentError, "play")

    def _raise_cause(self, error: Exception) -> None:
        """Raise what made an agent fail that calls the policy over HTTP, if it is not to blame."""
        session, record = self._session, self.recorder
        if session is None or isinstance(error, _EpisodeOver):
            return
        if isinstance(error, EpisodeError) and not isinstance(error, AgentError | EngineError):
            return
        if session.was_called_after_end and self.is_over and record.error is None:
            raise _EpisodeOver from error
        if session.limit is not None and record.error is None:
            record.stop_reason = session.limit
            raise _EpisodeOver from error
        if session.error is not None and session.error is not error:
            raise session.error from error

    def _check_open(self, action: str) -> None:
        if not self.is_over:
            return
        if self.recorder.error is not None:
            raise self.recorder.error
        if self._is_full:
            raise _EpisodeOver
        raise AgentError(f"the agent {action} after the end of the episode")
