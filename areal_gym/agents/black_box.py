"""Agents that are somebody's function, written for OpenAI's or Anthropic's client.

    async def solve(client, task):
        reply = await client.chat.completions.create(model="policy", messages=task.messages)
        return reply.choices[0].message.content

It need not know of areal-gym. What it returns is its answer: a text is handed to the environment,
a number is the reward itself, and None means that it has said all with `task.reply`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from areal_gym.agents.base import Episode, PolicyEndpoint
from areal_gym.agents.clients import OnePerLoop
from areal_gym.agents.function_loading import Named
from areal_gym.errors import AgentError
from areal_gym.types import Message


class AgentTask:
    """What a function is given of the episode.

    From a plain function, which runs in a thread, use `call_tool` and `reply` through
    `task.wait(...)`.
    """

    def __init__(self, episode: Episode) -> None:
        self.messages: list[Message] = [message.copy() for message in episode.first_messages]
        """What opens the episode, in OpenAI's shape."""
        self.tools: list[dict[str, Any]] = [tool.schema() for tool in episode.tools]
        """The environment's tools, in OpenAI's shape."""
        self._episode = episode
        self._loop = asyncio.get_running_loop()

    @property
    def prompt(self) -> str:
        """The text of the last message that opens the episode."""
        return self.messages[-1]["content"]

    @property
    def is_over(self) -> bool:
        """Whether the environment has ended the episode: the policy is not asked any more.

        A call that comes nevertheless is answered by HTTP 400, `episode_over`.
        """
        return self._episode.is_over

    async def call_tool(self, call_id: str) -> str:
        """Let the environment run a tool that the policy has called; what the tool says."""
        return await self._episode.call_tool(call_id)

    async def reply(self, answer: str) -> Sequence[Message]:
        """Hand a text to the environment; what it answers, nothing when the episode is over."""
        return await self._episode.reply(answer)

    def wait(self, coroutine: Any) -> Any:
        """Run one of the above from a plain function."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


class _FunctionAgent:
    """See the subclasses."""

    def __init__(
        self, function: str | Callable[..., Any], max_calls: int = 256, max_retries: int = 2
    ) -> None:
        self._max_calls = max_calls
        self._max_retries = max_retries
        self._named = Named(function)
        self._clients = OnePerLoop()

    async def play(self, episode: Episode) -> None:
        """Let the function play.

        Raises:
            AgentError: it returns something that is no answer.
        """
        access = await episode.access(max_calls=self._max_calls)
        task = AgentTask(episode)
        function = self._named.function
        if inspect.iscoroutinefunction(function):
            answer = await function(self._client(access), task)
        else:
            with self._blocking_client(access) as client:
                answer = await asyncio.to_thread(function, client, task)
        if answer is None or isinstance(answer, str):
            await episode.finish(answer)
        elif isinstance(answer, bool | int | float):
            await episode.finish(reward=answer)
        else:
            raise AgentError(
                f"the function returned {answer!r}; a text, a number or None is an answer"
            )

    def _client(self, access: PolicyEndpoint) -> Any:
        client = self._clients.get(lambda: self._make_client(access))
        return client.with_options(api_key=access.api_key)

    def _make_client(self, access: PolicyEndpoint) -> Any:
        raise NotImplementedError

    def _blocking_client(self, access: PolicyEndpoint) -> Any:
        raise NotImplementedError


class OpenAIFunctionAgent(_FunctionAgent):
    """A function of yours that uses the `openai` client: `f(client, task)`.

    Args:
        function: `package.module:name` or `file.py:name`. An `async` one gets an `AsyncOpenAI`, a
            plain one an `OpenAI`, in a thread of its own.
        max_calls: of the policy, in one episode.
        max_retries: how often the client asks again after 429, 503 and the like.
    """

    def _make_client(self, access: PolicyEndpoint) -> Any:
        import openai

        return openai.AsyncOpenAI(
            api_key=access.api_key,
            base_url=access.base_url,
            max_retries=self._max_retries,
            timeout=None,
        )

    def _blocking_client(self, access: PolicyEndpoint) -> Any:
        import openai

        return openai.OpenAI(
            api_key=access.api_key,
            base_url=access.base_url,
            max_retries=self._max_retries,
            timeout=None,
        )


class AnthropicFunctionAgent(_FunctionAgent):
    """A function of yours that uses the `anthropic` client: `f(client, task)`.

    Args:
        function: as that of `openai`; `AsyncAnthropic` or `Anthropic` is what it gets.
        max_calls: of the policy, in one episode.
        max_retries: how often the client asks again after 429, 503 and the like.
    """

    def _make_client(self, access: PolicyEndpoint) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(
            api_key=access.api_key,
            base_url=access.base_url.removesuffix("/v1"),
            max_retries=self._max_retries,
            timeout=None,
        )

    def _blocking_client(self, access: PolicyEndpoint) -> Any:
        import anthropic

        return anthropic.Anthropic(
            api_key=access.api_key,
            base_url=access.base_url.removesuffix("/v1"),
            max_retries=self._max_retries,
            timeout=None,
        )
