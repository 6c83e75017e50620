"""Whatever can play: checkpoints, servers, engines and functions."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from areal_gym.chat import Renderer
from areal_gym.config import EngineConfig
from areal_gym.engines.base import Engine, SamplingParams
from areal_gym.envs.base import TextEnv
from areal_gym.envs.chat_client import ChatClient
from areal_gym.envs.tools import Tool
from areal_gym.errors import (
    AgentError,
    ConfigError,
    EngineError,
    EnvError,
    EpisodeError,
    UsageError,
)
from areal_gym.plugins import registry
from areal_gym.rollout.episode import play_episode, stop_reason_of
from areal_gym.rollout.evaluate import Play
from areal_gym.types import FinishReason, Message, StopReason, Task, Trajectory, Turn

Policy = Engine | str | Path | Callable[[Sequence[Message]], "str | Message | Awaitable[Any]"]


@asynccontextmanager
async def opened(
    policy: Policy,
    params: SamplingParams,
    model: str,
    renderer: Renderer | None,
    max_context: int,
    timeout_s: float | None,
) -> AsyncIterator[Play]:
    """What plays one episode with that policy; what was opened for it is closed on the way out.

    Args:
        policy: see `areal_gym.rollout`, as for the others.
        params: how to sample.
        model: the name that a server knows its model by.
        renderer: messages to ids, for an engine.
        max_context: tokens of one episode, for a checkpoint.
        timeout_s: of one episode.

    Raises:
        UsageError: it is no policy.
    """
    if isinstance(policy, Path) or (isinstance(policy, str) and "://" not in policy):
        directory = Path(policy)
        if not (directory / "config.json").exists():
            raise ConfigError(
                f"{str(policy)!r} is no checkpoint's directory",
                hints=["a policy is that, a URL (http://HOST:PORT/v1), an engine or a function"],
            )
        settings = EngineConfig(model=str(directory), max_context=max_context)
        engine = registry().load("engines", "embedded").from_settings(directory, settings)
        try:
            await engine.start()
            rendering = Renderer.from_checkpoint(directory)
            yield _sampled(engine, rendering, params, timeout_s)
        finally:
            await engine.aclose()
    elif isinstance(policy, Engine):
        if renderer is None:
            raise UsageError(
                "an engine takes ids, and somebody has to make them of messages",
                hints=["renderer=Renderer.from_checkpoint(DIRECTORY)"],
            )
        try:
            await policy.start()
            yield _sampled(policy, renderer, params, timeout_s)
        finally:
            await policy.aclose()
    elif isinstance(policy, str):
        yield partial(_asked, _served(policy, model, params), timeout_s)
    elif callable(policy):
        yield partial(_asked, _called(policy), timeout_s)
    else:
        raise UsageError(f"a policy is no {type(policy).__name__}")


def _sampled(
    engine: Engine, renderer: Renderer, params: SamplingParams, timeout_s: float | None
) -> Play:
    agent = registry().load("agents", "chat")()

    async def play(env: TextEnv, *, task: Task, **names: Any) -> Trajectory:
        return await play_episode(
            env,
            agent,
            engine,
            renderer,
            options={"task": task},
            params=params,
            timeout_s=timeout_s,
            **names,
        )

    return play


_Answer = Callable[[Sequence[Message], Sequence[Tool]], Awaitable["str | Message"]]


def _called(policy: Callable[[Sequence[Message]], Any]) -> _Answer:
    async def answer(messages: Sequence[Message], tools: Sequence[Tool]) -> str | Message:
        if inspect.iscoroutinefunction(policy):
            found: str | Message = await policy(messages)
            return found
        said: str | Message = await asyncio.to_thread(policy, messages)
        return said

    return answer


def _served(url: str, model: str, params: SamplingParams) -> _Answer:
    client = ChatClient(
        url, model=model, temperature=params.temperature, max_tokens=params.max_new_tokens
    )

    async def answer(messages: Sequence[Message], tools: Sequence[Tool]) -> str | Message:
        try:
            said = await client.ask(
                [_to_openai(m) for m in messages], tools=[t.schema() for t in tools]
            )
        except EnvError as error:  # its other user is an environment
            raise EngineError(error.message) from error
        return _from_openai(said)

    return answer


async def _asked(
    answer: _Answer,
    timeout_s: float | None,
    env: TextEnv,
    *,
    task: Task,
    seed: int,
    trajectory_id: str,
    group_id: str,
    env_id: str | None,
) -> Trajectory:
    """An episode of a policy that answers in words: there are no tokens on record."""
    turns: list[Turn] = []
    metrics: Counter[str] = Counter()
    reason, trouble = StopReason.COMPLETED, None
    try:
        async with asyncio.timeout(timeout_s):
            env.reset(seed=seed, options={"task": task})
            is_over = False
            while not is_over:
                try:
                    said = await answer(list(env.messages), env.tools)
                except EpisodeError:
                    raise
                except Exception as error:
                    raise AgentError(f"the policy failed: {error!r}") from error
                step = await env.astep(said)
                parts = step.info.get("reward_parts", {})
                turns.append(
                    Turn(finish_reason=FinishReason.STOP, reward=step.reward, reward_parts=parts)
                )
                metrics.update(step.info.get("metrics", {}))
                is_over = step.terminated or step.truncated
                if step.truncated:
                    is_limit = step.info["truncated_by"] == "max_turns"
                    reason = StopReason.MAX_TURNS if is_limit else StopReason.TRUNCATED
    except TimeoutError:
        reason, trouble = StopReason.TIMEOUT, f"the episode took more than {timeout_s:g} s"
    except EpisodeError as error:
        reason, trouble = stop_reason_of(error), str(error)
    finally:
        await env.aclose()
    return Trajectory(
        id=trajectory_id,
        group_id=group_id,
        task=task,
        env_id=env.played_id or env_id or type(env).__name__,
        turns=tuple(turns),
        messages=tuple(env.messages),
        stop_reason=reason,
        error=trouble,
        metrics=dict(metrics),
        seed=seed,
    )


def _to_openai(message: Message) -> dict[str, Any]:
    """Arguments of calls are text there; what only we know is left out."""
    kept: dict[str, Any] = {
        key: message[key] for key in ("role", "content", "name", "tool_call_id") if key in message
    }
    if "tool_calls" in message:
        kept["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"]),
                },
            }
            for call in message["tool_calls"]
        ]
    return kept


def _from_openai(said: Mapping[str, Any]) -> str | Message:
    """A message whose calls are ours; a text, when it has none: calls may be written in it."""
    content = said.get("content") or ""
    calls = said.get("tool_calls") or []
    if not calls:
        return str(content)
    message: Message = {"role": "assistant", "content": content, "tool_calls": []}
    for number, call in enumerate(calls):
        try:
            name = call["function"]["name"]
            arguments = json.loads(call["function"]["arguments"] or "{}")
            if not isinstance(arguments, dict) or not isinstance(name, str):
                raise ValueError("the arguments are no object")
        except (ValueError, LookupError, TypeError) as error:
            message["parse_error"] = f"a tool call is malformed: {error}"
            continue
        message["tool_calls"].append(
            {
                "id": call.get("id") or f"call{number:05d}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )
    return message
