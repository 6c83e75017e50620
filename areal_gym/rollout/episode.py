"""One episode, recorded token by token.

    agent.play(episode)
        episode.ask(messages)   bridge ids -> engine -> sampled ids -> text -> Message
        episode.act(message)    environment -> StepResult

The transcript is append-only: first prompt, sampled ids, bridge, sampled ids, ... The engine is
always given the whole of it, so a training row made of the spans is exactly what the engine saw
and sampled. Where history is rewritten, by the agent or by the chat template, a new branch begins
with a prompt of its own (see `areal_gym.chat.Dialogue`); the old one is kept and trained on.

Limits. A turn that `max_new_tokens` cuts is still handed to the environment, which grades what
was written as it grades anything; but the episode ends there, with `MAX_TOKENS`: the policy has
not ended its turn, and an end written in its name would put it where it never chose to go. When
the context has no room for another turn, the episode ends with `MAX_TOKENS` too. Both are
truncations: kept and trained on. What fails is recorded at the boundary where it failed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from areal_gym.types import FinishReason, Message, StopReason, Task, ToolCall, Trajectory

if TYPE_CHECKING:
    from areal_gym.gateway.session import Session

_STOP_REASONS = {
    "env": StopReason.ENV_ERROR,
    "reward": StopReason.REWARD_ERROR,
    "agent": StopReason.AGENT_ERROR,
    "engine": StopReason.ENGINE_ERROR,
    "sandbox": StopReason.SANDBOX_ERROR,
    "worker": StopReason.WORKER_ERROR,
    "timeout": StopReason.TIMEOUT,
    "episode": StopReason.ENV_ERROR,  # an environment may raise the base class
}

_T = TypeVar("_T")


def _is_failure(error: BaseException) -> bool:
    """Returns whether an exception fails the episode: not the run's own cancellation, nor Ctrl-C.

    Libraries that think they are a program exit, or raise what is no Exception: those fail.
    A cancellation that nobody asked this task for is the code's own.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() == 0
    return not isinstance(error, GeneratorExit) and type(error) is not KeyboardInterrupt


def stop_reason_of(error: EpisodeError) -> StopReason:
    """Which boundary failed."""
    return _STOP_REASONS[error.boundary]


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
    in_flight = in_flight or InFlight()
    recorder = Recorder(
        engine, renderer, params or SamplingParams(), seed=seed, in_flight=in_flight
    )
    played = _Played(env, recorder, in_flight, group_id)
    in_flight.episodes += 1
    num_outages = getattr(engine, "num_outages", 0)  # isinstance of a protocol takes its time
    try:
        async with asyncio.timeout(timeout_s) as played.deadline:
            reset = partial(env.areset, seed=seed, options=options)
            _, info = await played.of_env(reset, "reset")
            played.first_messages = info["messages"]
            try:
                await agent.play(played)
            except BaseException as error:
                if not _is_failure(error):
                    raise
                played.blame_agent(error)
                raise
    except EpisodeError as error:
        played.fail(error)
    except _EpisodeOver:
        pass
    except TimeoutError:
        played.fail(_overtime(timeout_s, engine, num_outages))
    finally:
        played.close()
        try:
            await played.of_env(env.aclose, "aclose")
        except EpisodeError as error:
            played.fail(error)
        finally:
            in_flight.episodes -= 1
    return Trajectory(
        id=trajectory_id,
        group_id=group_id,
        task=played.task,
        env_id=env.played_id or env_id or type(env).__name__,
        agent_id=agent_id,
        seed=seed,
        **played.outcome(),
    )


def _overtime(timeout_s: float | None, engine: Engine, num_outages: int) -> EpisodeError:
    """Returns what an episode failed of whose time is up: itself, or an outage of the engine."""
    took = f"the episode took more than {timeout_s:g} s"
    if not isinstance(engine, InterruptedEngine):
        return EpisodeTimeoutError(took)
    if engine.outage_s == 0 and engine.num_outages == num_outages:
        return EpisodeTimeoutError(took)
    return EngineUnreachableError(f"{took}, and no server was there for part of it")


def _no_number(reward: object) -> AgentError:
    error = AgentError(f"the agent gave the reward {reward!r}; a finite number is needed")
    error.boundary = RewardError.boundary
    return error


class _EpisodeOver(Exception):
    """Unwinds the agent when there is no room for another turn."""


class _Played:
    """The other side of the `Episode` protocol: asks, acts, records."""

    def __init__(
        self,
        env: TextEnv,
        recorder: Recorder,
        in_flight: InFlight,
        group_id: str,
    ) -> None:
        self.env = env
        self.recorder = recorder
        self.in_flight = in_flight
        self.group_id = group_id
        self.deadline: asyncio.Timeout | None = None
        self.first_messages: Sequence[Message] = ()
        self.unread: Sequence[Message] = ()
        self.metrics: dict[str, float] = {}
        self.stop_reason: StopReason | None = None
        self.error: EpisodeError | None = None
        self._dialogue: Dialogue | None = None
        self._is_full = False
        self._session: Session | None = None
        self._acting = asyncio.Lock()
        self._tool_runs: dict[int, asyncio.Task[dict[str, str]]] = {}

    # ---- what the agent sees ------------------------------------------------------------------

    @property
    def tools(self) -> Sequence[Tool]:
        return self.env.tools

    async def ask(
        self, new_messages: Sequence[Message], *, replaces_history: bool = False
    ) -> Message:
        self._check_open("asks the policy")
        if self._dialogue is None:
            schemas = [tool.schema() for tool in self.env.tools]
            self._dialogue = Dialogue(
                self.recorder.renderer, schemas, dialect=self.env.tool_dialect
            )
        prompt = self._dialogue.prompt(new_messages, replaces_history=replaces_history)
        try:
            message, _ = await self.recorder.sample(self._dialogue, prompt)
        except ContextFullError:
            self.stop_reason = StopReason.MAX_TOKENS
            self._is_full = True
            raise _EpisodeOver from None
        except BaseException as error:
            if not _is_failure(error):
                raise
            self.blame(error, EngineError, "generate")
            raise
        self.unread = ()
        return message

    async def act(self, message: Message, *, turn: TurnDraft | None = None) -> StepResult:
        self._check_open("acts")
        if not self.recorder.turns:
            raise AgentError("the agent acts before it has asked the policy")
        turn = turn or self.recorder.turn_of(message)
        start = time.perf_counter()
        self.in_flight.env += 1
        try:
            result = await self.env.astep(message)
        except BaseException as error:
            if not _is_failure(error):
                raise
            self.blame(error, EnvError, "step")
            raise
        finally:
            self.in_flight.env -= 1
            turn.env_s += time.perf_counter() - start
            turn.tool_s += self.env.tool_s
        info = result.info
        turn.reward += result.reward
        if "reward_parts" in info:
            for name, part in info["reward_parts"].items():
                turn.reward_parts[name] = turn.reward_parts.get(name, 0.0) + part
        if "metrics" in info:
            for name, value in info["metrics"].items():
                self.metrics[name] = self.metrics.get(name, 0.0) + value
        self.unread = info["messages"]
        if turn.finish_reason is FinishReason.LENGTH:
            self.stop_reason = StopReason.MAX_TOKENS
            return result if result.terminated else result._replace(truncated=True)
        if result.terminated:
            self.stop_reason = StopReason.COMPLETED
        elif result.truncated:
            by_turns = info.get("truncated_by") == "max_turns"
            self.stop_reason = StopReason.MAX_TURNS if by_turns else StopReason.TRUNCATED
        return result

    async def access(self, *, max_calls: int) -> PolicyEndpoint:
        if self._session is None:
            from areal_gym.gateway.shared_gateway import shared_gateway

            gateway = await shared_gateway()
            self._session = gateway.open_session(
                self.recorder,
                group_id=self.group_id,
                max_calls=max_calls,
                host=self,
            )
        return self._session

    async def call_tool(self, call_id: str) -> str:
        message = None if self._session is None else self._session.message_with(call_id)
        if message is None:
            raise AgentError(f"the policy has not made a call {call_id!r}")
        names = {tool.name for tool in self.env.tools}
        calls = [call for call in message["tool_calls"] if call["function"]["name"] in names]
        if all(call["id"] != call_id for call in calls):
            raise AgentError(f"the environment has no such tool as the call {call_id!r} names")
        if id(message) not in self._tool_runs:
            self._tool_runs[id(message)] = asyncio.create_task(self._run_tools(message, calls))
        results = await asyncio.shield(self._tool_runs[id(message)])
        return results.get(call_id, "the episode is over")

    async def reply(self, answer: str) -> Sequence[Message]:
        async with self._acting:
            if self.is_over:
                return ()
            await self.act({"role": "assistant", "content": answer})
            return () if self.is_over else self.unread

    async def finish(
        self,
        answer: str | None = None,
        *,
        reward: float | None = None,
        is_truncated: bool = False,
    ) -> None:
        if self.error is not None:
            raise self.error
        limit = None if self._session is None else self._session.limit
        if not self.recorder.turns and limit is None:
            raise AgentError("the agent has finished, and has not asked the policy")
        if answer is not None and self.recorder.turns:
            await self.reply(answer)
        if reward is not None:
            self.give_reward(reward)
        if self.stop_reason is None or limit is not None:
            own = StopReason.MAX_TURNS if is_truncated else StopReason.COMPLETED
            self.stop_reason = limit or own

    def give_reward(self, reward: float, *, turn: TurnDraft | None = None) -> None:
        if isinstance(reward, bool | int | float) and math.isfinite(reward):
            if not self.recorder.turns:
                raise AgentError("a reward, and the policy has not been asked")
            (turn or self.recorder.turns[-1]).reward += reward
            return
        raise _no_number(reward)

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
        return self.stop_reason is not None

    async def _run_tools(self, message: Message, calls: list[ToolCall]) -> dict[str, str]:
        """Hand a message with its calls to the environment, once; what each of them gave."""
        async with self._acting:
            if self.is_over:
                return {}
            turn = self.recorder.turn_of(message)
            result = await self.act({**message, "tool_calls": calls}, turn=turn)
        found: dict[str, str] = {}
        for index, answer in enumerate(result.info["messages"]):
            call_id = answer.get("tool_call_id") or calls[min(index, len(calls) - 1)]["id"]
            found[call_id] = "\n".join(filter(None, (found.get(call_id), answer["content"])))
        return found

    def outcome(self) -> dict[str, Any]:
        """The fields of the trajectory that playing decides."""
        if self.stop_reason is None:
            self.fail(AgentError("the agent stopped before the environment had ended the episode"))
        _forget_frames(self.error)
        outcome = self.recorder.outcome()
        return {
            **outcome,
            "messages": (*outcome["messages"], *self.unread),
            "stop_reason": self.stop_reason,
            "error": None if self.error is None else str(self.error),
            "is_lost": self.error is not None and self.error.is_outage,
            "metrics": self.metrics,
        }

    @property
    def task(self) -> Task:
        try:
            return self.env.task
        except UsageError:  # the very first reset failed
            return Task(id="unknown", data={})

    def explain(self, error: Exception) -> None:
        """Raise what made an agent fail that asks over HTTP: the policy could not answer it."""
        session = self._session
        if session is None or isinstance(error, _EpisodeOver):
            return
        if isinstance(error, EpisodeError) and not isinstance(error, AgentError):
            return
        if session.was_asked_after_end and self.is_over and self.error is None:
            raise _EpisodeOver from error
        if session.limit is not None and self.error is None:
            self.stop_reason = session.limit
            raise _EpisodeOver from error
        if session.trouble is not None:
            raise session.trouble from error

    def close(self) -> None:
        """Nobody asks any more."""
        for run in self._tool_runs.values():
            run.cancel()
        if self._session is not None:
            self._session.close()
        self.recorder.release()

    # ---- failures -----------------------------------------------------------------------------

    async def of_env(self, ask: Callable[[], Awaitable[_T]], what: str) -> _T:
        """What the environment gives; what fails in it is blamed on it, and who waits is counted.

        `act` writes this out: it costs a third of a microsecond in each turn.
        """
        self.in_flight.env += 1
        try:
            return await ask()
        except BaseException as error:
            if not _is_failure(error):
                raise
            self.blame(error, EnvError, what)
            raise
        finally:
            self.in_flight.env -= 1

    def blame(self, error: BaseException, boundary: type[EpisodeError], what: str) -> None:
        """Record what has failed there, once; the caller raises it again.

        `EpisodeError`s that arrive keep their own attribution (a sandbox that fails inside an
        environment is the sandbox's failure); `UsageError`s are no failure of an episode and pass.

        Raises:
            EpisodeError: of the boundary, in place of an error that is none.
        """
        if isinstance(error, UsageError | ContextFullError | _EpisodeOver):
            return
        if not isinstance(error, EpisodeError):
            wrapped = boundary(f"{boundary.boundary} failed in {what}: {error!r}")
            self.fail(wrapped)
            raise wrapped from error
        self.fail(error)

    def blame_agent(self, error: BaseException) -> None:
        """`blame` the agent, unless the policy could not answer it (see `explain`)."""
        try:
            if isinstance(error, Exception):
                self.explain(error)
        except Exception as cause:
            self.blame(cause, AgentError, "play")
            raise
        self.blame(error, AgentError, "play")

    def fail(self, error: EpisodeError) -> None:
        """Record the first failure; those that follow are its consequences."""
        if self.error is None:
            self.error = error
            self.stop_reason = stop_reason_of(error)

    def _check_open(self, what: str) -> None:
        if self.stop_reason is None:
            return
        if self.error is not None:
            raise self.error
        if self._is_full:
            raise _EpisodeOver
        raise AgentError(f"the agent {what} after the end of the episode")


def _forget_frames(error: BaseException | None) -> None:
    """They hold the episode, which holds the error: a cycle, which only a collector would free."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
