"""Agents that are a user's function, written for OpenAI's or Anthropic's client.

    async def solve(client, task):
        reply = await client.chat.completions.create(model="policy", messages=task.messages)
        return reply.choices[0].message.content

The function need not know of areal-gym. A returned text is handed to the environment as the answer,
a number is the reward itself, and None means that the function has answered with `task.reply`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from areal_gym.agents.base import Episode, PolicyEndpoint
from areal_gym.errors import AgentError
from areal_gym.images.openai_parts import openai_content
from areal_gym.types import Message, text_of
from areal_gym.utils.code_references import load_reference
from areal_gym.utils.per_loop import PerLoop


class ImportableFunction:
    """A function, or the path of one, which can travel to other processes (`load_reference`)."""

    def __init__(self, given: str | Callable[..., Any]) -> None:
        if isinstance(given, str) and given.rpartition(":")[0].endswith(".py"):
            given = str(Path(given).absolute())  # for processes that start elsewhere
        self._given = given
        self.function = load_reference(given) if isinstance(given, str) else given

    def __reduce__(self) -> tuple[object, ...]:
        return (ImportableFunction, (self._given,))


class AgentTask:
    """The episode as a user's function sees it.

    A plain function runs in a thread; it uses `call_tool` and `reply` through `task.wait(...)`.
    """

    def __init__(self, episode: Episode, base_url_of: Callable[[str], str] = str) -> None:
        self.messages: list[dict[str, Any]] = [
            {**message, "content": openai_content(message["content"])}
            for message in episode.first_messages
        ]
        """The messages that open the episode, in OpenAI's shape; pictures are `data:` URLs."""
        self.tools: list[dict[str, Any]] = [tool.schema() for tool in episode.tools]
        """The environment's tools, in OpenAI's shape."""
        self.roles: dict[str, str] = {role: base_url_of(role) for role in episode.roles}
        """The `base_url` of each role that the policy plays; empty where it plays alone:
        `client.with_options(base_url=task.roles["seller"])`."""
        self._episode = episode
        self._loop = asyncio.get_running_loop()

    @property
    def prompt(self) -> str:
        """The text of the last message that opens the episode."""
        return text_of(self._episode.first_messages[-1]["content"])

    @property
    def is_over(self) -> bool:
        """Whether the episode has ended; the policy answers no more.

        A later call is answered by HTTP 400, `episode_over`.
        """
        return self._episode.is_over

    @property
    def role(self) -> str | None:
        """The role whose turn it is."""
        return self._episode.role

    async def call_tool(self, call_id: str) -> str:
        """Let the environment run a tool that the policy has called; return the tool's output."""
        return await self._episode.call_tool(call_id)

    async def reply(self, answer: str) -> Sequence[Message]:
        """Hand a text to the environment; return its reply, empty when the episode is over."""
        return await self._episode.reply(answer)

    def wait(self, coroutine: Any) -> Any:
        """Run `call_tool(...)` or `reply(...)` from a plain function."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


async def close_client(client: Any) -> None:
    """Close an asynchronous client of OpenAI or Anthropic."""
    await client.close()


class _FunctionAgent:
    """Plays episodes by calling a function with a client of OpenAI or Anthropic."""

    _client: ClassVar[str]  # the name of the client's class; its package has the same in lower case

    def __init__(
        self, function: str | Callable[..., Any], max_calls: int = 256, max_retries: int = 2
    ) -> None:
        self._max_calls = max_calls
        self._max_retries = max_retries
        self._function = ImportableFunction(function)
        # Making a client reads the machine's certificates, 20 ms: too long for each episode.
        self._clients: PerLoop[Any] = PerLoop(close_client)

    async def play(self, episode: Episode) -> None:
        """Let the function play; raises AgentError if what it returns is not an answer."""
        endpoint = await episode.access(max_calls=self._max_calls)
        task = AgentTask(episode, partial(self._role_url, endpoint))
        function = self._function.function
        if inspect.iscoroutinefunction(function):
            client = self._clients.get(lambda: self._make_client(endpoint, is_async=True))
            answer = await function(client.with_options(api_key=endpoint.api_key), task)
        else:
            with self._make_client(endpoint, is_async=False) as client:
                answer = await asyncio.to_thread(function, client, task)
        if answer is None or isinstance(answer, str):
            await episode.finish(answer)
        elif isinstance(answer, bool | int | float):
            await episode.finish(reward=answer)
        else:
            raise AgentError(
                f"the function returned {answer!r}; a text, a number or None is an answer"
            )

    def _role_url(self, endpoint: PolicyEndpoint, role: str) -> str:
        url = endpoint.base_url_of(role)
        return url if self._client == "OpenAI" else url.removesuffix("/v1")

    def _make_client(self, endpoint: PolicyEndpoint, *, is_async: bool) -> Any:
        package = import_module(self._client.lower())
        is_openai = self._client == "OpenAI"
        return getattr(package, f"Async{self._client}" if is_async else self._client)(
            api_key=endpoint.api_key,
            base_url=endpoint.base_url if is_openai else endpoint.base_url.removesuffix("/v1"),
            max_retries=self._max_retries,
            timeout=None,
        )


class OpenAIFunctionAgent(_FunctionAgent):
    """A function of yours that uses the `openai` client: `f(client, task)`.

    Args:
        function: `package.module:name` or `file.py:name`. An `async` one gets an `AsyncOpenAI`, a
            plain one an `OpenAI`, in a thread of its own.
        max_calls: the most policy calls of one episode.
        max_retries: how often the client retries after 429, 503 and the like.
    """

    _client = "OpenAI"


class AnthropicFunctionAgent(_FunctionAgent):
    """A function of yours that uses the `anthropic` client: `f(client, task)`.

    Args:
        function: as for `openai`; it gets an `AsyncAnthropic` or an `Anthropic`.
        max_calls: the most policy calls of one episode.
        max_retries: how often the client retries after 429, 503 and the like.
    """

    _client = "Anthropic"
