"""Policies that can play episodes: checkpoints, servers, engines and functions."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from areal_gym.agents.chat import ChatAgent
from areal_gym.chat import Renderer
from areal_gym.chat.chat_client import ChatClient
from areal_gym.config import EngineConfig
from areal_gym.engines.base import Engine, SamplingParams
from areal_gym.envs.base import TextEnv
from areal_gym.envs.tools import Tool
from areal_gym.errors import (
    AgentError,
    ConfigError,
    EngineError,
    EnvError,
    EpisodeError,
    EpisodeTimeoutError,
    UsageError,
)
from areal_gym.images.openai_parts import openai_content
from areal_gym.models.hub import is_hub_name, model_from_hub
from areal_gym.plugins import registry
from areal_gym.recording import EpisodeRecord, TurnDraft
from areal_gym.rollout.episode_runners import EpisodeRequest, PlayEpisode, play_with_engine
from areal_gym.types import FinishReason, FunctionCall, Message, Trajectory
from areal_gym.utils.files import path_hints

Policy = Engine | str | Path | Callable[[Sequence[Message]], "str | Message | Awaitable[Any]"]


@asynccontextmanager
async def opened(
    policy: Policy,
    params: SamplingParams,
    model: str,
    renderer: Renderer | None,
    max_context: int,
    timeout_s: float | None,
    env_id: str,
) -> AsyncIterator[PlayEpisode]:
    """Open a policy that `areal_gym.rollout` takes; yield a function that plays one episode.

    Raises:
        UsageError: it is not a policy.
    """
    if isinstance(policy, Path) or (isinstance(policy, str) and "://" not in policy):
        directory = Path(policy)
        if is_hub_name(str(policy)):
            directory = await asyncio.to_thread(model_from_hub, str(policy), _say)
        if not (directory / "config.json").exists():
            message = f"{str(policy)!r} is not a checkpoint directory"
            hint = (
                "a policy is a checkpoint directory, OWNER/NAME on the Hugging Face hub, a URL "
                "(http://HOST:PORT/v1), an engine or a function"
            )
            raise ConfigError(message, hints=[*path_hints(directory), hint])
        settings = EngineConfig(model=str(directory), max_context=max_context)
        policy = registry().load("engines", "embedded").from_settings(directory, settings)
        renderer = Renderer.from_checkpoint(directory)
    if isinstance(policy, Engine):
        if renderer is None:
            raise UsageError(
                "an engine takes token ids, so it needs a renderer, which makes them from messages",
                hints=["renderer=Renderer.from_checkpoint(DIRECTORY)"],
            )
        try:
            await policy.start()
            yield play_with_engine(ChatAgent(), policy, renderer, params, timeout_s, env_id=env_id)
        finally:
            await policy.aclose()
    elif isinstance(policy, str):
        yield partial(_play_with_texts, _server_answer(policy, model, params), timeout_s, env_id)
    elif callable(policy):
        yield partial(_play_with_texts, _function_answer(policy), timeout_s, env_id)
    else:
        raise UsageError(f"{type(policy).__name__} is not a policy")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


Answer = Callable[[Sequence[Message], Sequence[Tool]], Awaitable["str | Message"]]
"""Answers messages, given the environment's tools: with a text, or a message with tool calls."""


def _function_answer(policy: Callable[[Sequence[Message]], Any]) -> Answer:
    async def answer(messages: Sequence[Message], tools: Sequence[Tool]) -> Any:
        if inspect.iscoroutinefunction(policy):
            return await policy(messages)
        return await asyncio.to_thread(policy, messages)

    return answer


def _server_answer(url: str, model: str, params: SamplingParams) -> Answer:
    client = ChatClient(
        url, model=model, temperature=params.temperature, max_tokens=params.max_new_tokens
    )

    async def answer(messages: Sequence[Message], tools: Sequence[Tool]) -> str | Message:
        try:
            reply = await client.ask(
                [_to_openai(m) for m in messages], tools=[t.schema() for t in tools]
            )
        except EnvError as error:  # the client's other users are environments
            raise EngineError(error.message) from error
        return _from_openai(reply)

    return answer


async def _play_with_texts(
    answer: Answer, timeout_s: float | None, env_id: str, env: TextEnv, request: EpisodeRequest
) -> Trajectory:
    """Play an episode with a policy that answers in text, so that there are no tokens to record."""
    record = EpisodeRecord()
    try:
        async with asyncio.timeout(timeout_s):
            env.reset(seed=request.seed, options={"task": request.task})
            while not record.is_over:
                try:
                    reply = await answer(list(env.messages), env.tools)
                except EpisodeError:
                    raise
                except Exception as error:
                    raise AgentError(f"the policy failed: {error!r}") from error
                result = await env.astep(reply)
                record.turns.append(TurnDraft(FinishReason.STOP))
                record.add_step(record.turns[-1], result)
    except TimeoutError:
        record.fail(EpisodeTimeoutError(f"the episode took more than {timeout_s:g} s"))
    except EpisodeError as error:
        record.fail(error)
    finally:
        await env.aclose()
    outcome = record.outcome() | {"messages": tuple(env.messages)}
    return Trajectory(
        id=request.trajectory_id,
        group_id=request.group_id,
        task=request.task,
        env_id=env.played_id or env_id,
        seed=request.seed,
        **outcome,
    )


def _to_openai(message: Message) -> dict[str, Any]:
    # OpenAI has a call's arguments as text, and none of our own fields.
    names = ("role", "content", "name", "tool_call_id")
    kept: dict[str, Any] = {name: value for name, value in message.items() if name in names}
    kept["content"] = openai_content(message["content"])
    if "tool_calls" in message:
        kept["tool_calls"] = []
        for call in message["tool_calls"]:
            arguments = json.dumps(call["function"]["arguments"])
            function = {**call["function"], "arguments": arguments}
            kept["tool_calls"].append({**call, "function": function})
    return kept


def _from_openai(reply: Mapping[str, Any]) -> str | Message:
    """Return a message with parsed calls, or only its text, which may contain calls."""
    content = reply.get("content") or ""
    calls = reply.get("tool_calls") or []
    if not calls:
        return str(content)
    message: Message = {"role": "assistant", "content": content, "tool_calls": []}
    for number, call in enumerate(calls):
        try:
            name = call["function"]["name"]
            arguments = json.loads(call["function"]["arguments"] or "{}")
            if not isinstance(arguments, dict) or not isinstance(name, str):
                raise ValueError("the arguments are not an object")
        except (ValueError, LookupError, TypeError) as error:
            message["parse_error"] = f"a tool call is malformed: {error}"
            continue
        id = call.get("id") or f"call{number:05d}"
        function: FunctionCall = {"name": name, "arguments": arguments}
        message["tool_calls"].append({"id": id, "type": "function", "function": function})
    return message
