"""A client of OpenAI-compatible chat servers, for simulated users and judges."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from areal_gym.errors import ConfigError, EnvError, EnvUnreachableError
from areal_gym.utils.markup import short
from areal_gym.utils.per_loop import PerLoop

if TYPE_CHECKING:
    import aiohttp

_T = TypeVar("_T")

FIRST_WAIT_S = 0.5
"""The wait before the second try in seconds; it doubles before each later try."""
_MAX_WAIT_S = 30.0
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_REFUSED = frozenset({400, 413, 422})
_MAX_BYTES = 2**23


class RefusedError(EnvError):
    """The server refuses the request, usually because it is too long for the model's context."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The answer of a chat server."""

    message: Mapping[str, Any]
    """`content`, `tool_calls` or both."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """The number of tokens that the server counted; 0 if it does not report it."""

    @property
    def text(self) -> str:
        """The message's text; empty if it has none."""
        return str(self.message.get("content") or "")


class _Pool:
    """The connections of an event loop to a server, for up to `num_at_once` requests at a time."""

    def __init__(self, num_at_once: int) -> None:
        import aiohttp

        self.free = asyncio.Semaphore(num_at_once)
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


_pools: PerLoop[_Pool] = PerLoop(lambda pool: pool.session.close())


class ChatClient:
    """Sends requests to one model of one server.

    The clients of an event loop share their connections to a server.

    Args:
        url: the server's URL, with or without `/v1`.
        model: the model's name on the server.
        temperature: the sampling temperature.
        max_tokens: the maximum number of tokens of an answer.
        timeout_s: the time limit of each try.
        num_tries: how often a request is sent at most; the waits between tries double.
        num_at_once: the maximum number of concurrent requests of the event loop.
        api_key_env: the environment variable with the key; None takes OPENAI_API_KEY if it is set,
            and "" sends no key.

    Raises:
        ConfigError: the URL is not valid, or the variable is not set.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "default",
        temperature: float = 0.0,
        max_tokens: int = 512,
        timeout_s: float = 120.0,
        num_tries: int = 4,
        num_at_once: int = 1024,
        api_key_env: str | None = None,
    ) -> None:
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{url!r} is not the address of a chat server",
                hints=["write it in full: http://HOST:PORT/v1"],
            )
        base = url.rstrip("/")
        self._base = base if base.endswith("/v1") else base + "/v1"
        self._url = f"{self._base}/chat/completions"
        self._body = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        self._timeout_s = timeout_s
        self._num_tries = num_tries
        self._num_at_once = num_at_once
        self._key_env = "OPENAI_API_KEY" if api_key_env is None else api_key_env
        if api_key_env and not os.environ.get(api_key_env):
            raise ConfigError(
                f"{base} needs a key, and the variable {api_key_env} is not set",
                hints=[
                    f"set it: export {api_key_env}=...",
                    "name another variable with api_key_env, or '' if the server wants no key",
                ],
            )

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Mapping[str, Any]:
        """Return the answer, a message with `content`, `tool_calls` or both.

        Raises as `complete` does.
        """
        reply = await self.complete(messages, **({"tools": list(tools)} if tools else {}))
        return reply.message

    async def complete(self, messages: Sequence[Mapping[str, Any]], **body: Any) -> ChatReply:
        """Return the answer; `body` has further fields of the request.

        Raises:
            EnvUnreachableError: no connection could be made.
            RefusedError: the server refuses the request.
            EnvError: the server gave no answer, or one that is not a chat completion.
        """
        request = {**self._body, "messages": list(messages), **body}
        return await self._call("POST", self._url, request, _read_reply, "chat completion")

    async def models(self) -> list[str]:
        """Return the names of the models that the server offers; raise as `complete` does."""
        return await self._call("GET", f"{self._base}/models", None, _read_models, "list of models")

    async def _call(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None,
        read: Callable[[str], _T | None],
        what: str,
    ) -> _T:
        """Send a request until `read` returns a result for the answer, or all tries are used.

        `what` is the noun for the result in error messages.
        """
        import aiohttp

        pool = _pools.get(lambda: _Pool(self._num_at_once), f"{self._num_at_once} {self._base}")
        problem, wait_s = "", 0.0
        error_type: type[EnvError] = EnvError
        for number in range(self._num_tries):
            if number:
                await asyncio.sleep(max(wait_s, FIRST_WAIT_S * 2 ** (number - 1)))
            wait_s, error_type = 0.0, EnvError
            try:
                async with pool.free:
                    status, text, wait_s = await self._send(pool.session, method, url, body)
            except (aiohttp.ClientError, TimeoutError) as error:
                is_down = isinstance(error, aiohttp.ClientConnectorError)
                error_type = EnvUnreachableError if is_down else EnvError
                problem = f"{type(error).__name__}: {error}"
                if isinstance(error, TimeoutError):
                    problem = f"nothing came within {self._timeout_s:g} s"
                continue
            if status == 200:
                reply = read(text)
                if reply is not None:
                    return reply
                problem = f"no {what}: {short(text, 200)!r}"
                continue
            problem = f"HTTP {status}: {short(text, 200)}"
            if status in (401, 403):
                is_set = bool(os.environ.get(self._key_env))
                problem += f"; is {self._key_env} right?" if is_set else f"; set {self._key_env}"
            if status in _REFUSED:
                error_type = RefusedError
            if status not in _RETRIED:
                break
        raise error_type(f"{url} gave no answer: {problem}")

    async def _send(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        body: Mapping[str, Any] | None,
    ) -> tuple[int, str, float]:
        """Return the status, the text, and the seconds to wait that the server requests."""
        key = os.environ.get(self._key_env) if self._key_env else None
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with (
            asyncio.timeout(self._timeout_s),
            session.request(method, url, json=body, headers=headers) as response,
        ):
            raw = bytearray()
            async for chunk in response.content.iter_chunked(2**16):
                raw += chunk
                if len(raw) > _MAX_BYTES:
                    return 200, "an endless answer", 0.0
            try:
                wait_s = min(_MAX_WAIT_S, float(response.headers.get("Retry-After", 0)))
            except ValueError:  # a date
                wait_s = 0.0
            return response.status, raw.decode("utf-8", "replace"), max(0.0, wait_s)


def _read_reply(text: str) -> ChatReply | None:
    """Return the first choice of a chat completion; None if the text is not one."""
    try:
        reply = json.loads(text)
        message = reply["choices"][0]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    if not isinstance(message, dict):
        return None
    usage = reply.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    return ChatReply(message, *(n if type(n) is int and n >= 0 else 0 for n in counts))


def _read_models(text: str) -> list[str] | None:
    """Return the ids of a list of models; None if the text is not one."""
    try:
        return [str(row["id"]) for row in json.loads(text)["data"]]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
