"""`remote:URL`: an environment that runs in another process or on another machine."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import BytesIO
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import numpy as np

from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.loops import KeptLoop
from areal_gym.envs.server.wire_format import (
    OWNER_HEADER,
    OWNER_VARIABLE,
    error_from,
    owner_keys,
    plain,
)
from areal_gym.envs.tools import Tool
from areal_gym.errors import EnvError, EnvUnreachableError, UsageError
from areal_gym.images import image_limits, image_store
from areal_gym.images.image_store import LARGEST_PNG
from areal_gym.images.reading import decode_base64
from areal_gym.tasks import asked_for
from areal_gym.types import Message, Task
from areal_gym.utils.per_loop import PerLoop

if TYPE_CHECKING:
    import aiohttp

TOKEN_VARIABLE = "AREAL_GYM_ENV_TOKEN"

_QUICK_S = 30.0
"""Time limit for answers that run no code of the environment."""

_cards: dict[tuple[str, str | None], dict[str, Any]] = {}
"""Cards of the servers that this process's environments use, by URL and owner key."""


class RemoteEnv(TextEnv):
    """The environment that `areal-gym serve-env` serves at a URL; it plays as it would play here.

    Task, tools, observation, action, reward, episode end, splits, metrics: those of the served
    environment. With equal seeds its episodes are those of a local instance.
    Failures: a server that is not reached, has lost the session, or is full fails the episode as
    an error of the environment; the runner counts it and plays again. It is never a reward.

    Args:
        url: `http://HOST:PORT`, as the server prints it.
        token: what the server prints when it listens to other machines; by default the variable
            AREAL_GYM_ENV_TOKEN, which unlike settings is not written into run directories.
        owner_key: what the server prints besides; only the gold policy of checks needs it. By
            default the variable AREAL_GYM_ENV_OWNER_KEY.
        timeout_s: how long one turn may take.
    """

    suspends = True

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        owner_key: str | None = None,
        timeout_s: float = 300.0,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        if not _is_address(url):
            raise UsageError(
                f"{url!r} is not the address of an environment",
                hints=["as the server prints it: remote:http://HOST:PORT"],
            )
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        token = token or os.environ.get(TOKEN_VARIABLE)
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        owner_key = owner_key or owner_keys.get(self.url) or os.environ.get(OWNER_VARIABLE)
        if owner_key is not None:
            self._headers[OWNER_HEADER] = owner_key
            self.process_variables = {OWNER_VARIABLE: owner_key}
        self._timeout_s = timeout_s
        self._session: str | None = None
        self._first: dict[str, Any] = {}
        self._card_key = self.url, owner_key
        card = _cards.get(self._card_key)
        if card is None:
            card = _cards[self._card_key] = self._ask_now("/v1/env")
        self._card = card
        self.tools = tuple(Tool(**row) for row in card["tools"])
        self.max_turns = card["max_turns"]
        self.tool_dialect = card["tool_dialect"]
        self.has_gold = card["has_gold"]
        self.roles = tuple(card.get("roles", ()))  # servers of older versions send none

    # ---- episodes ------------------------------------------------------------------------------

    async def prepare(self, seed: int | None, options: Mapping[str, Any]) -> None:
        """Open a session, or start an episode in the open one."""
        if seed is None:
            seed = int(self.np_random.integers(2**48))
        body = {"seed": seed, "options": plain(options)}
        path = "/v1/sessions" if self._session is None else f"{self._path}/reset"
        self._first = await self._ask(path, body)
        self._session = self._first["session"]
        if self._first["hash"] != self._card["hash"]:
            _cards.pop(self._card_key, None)
            raise EnvError(f"{self.url} serves another environment than it did before")
        self._first["messages"] = await self._with_pictures(self._first["messages"])

    def num_tasks(self, split: str) -> int | None:
        """Return the server's number of tasks."""
        split, _ = asked_for({"split": split})
        return cast(int | None, self._card["num_tasks"][split])

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Return the task that the server has chosen."""
        return Task(**self._first["task"])

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Return the server's first messages."""
        return cast(list[Message], self._first["messages"])

    async def respond(self, message: Message) -> Response:
        """Play the turn on the server."""
        step = await self._ask(f"{self._path}/step", {"turn": self.num_turns, "message": message})
        return Response(
            messages=await self._with_pictures(step["messages"]),
            reward=step["reward"],
            reward_parts=step["reward_parts"],
            is_terminated=step["terminated"],
            is_truncated=step["truncated"] and step["truncated_by"] != "max_turns",
            metrics=step["metrics"],
            state_key=step.get("state_key"),  # servers of older versions send none
            role=step.get("role"),
            role_rewards=step.get("role_rewards", {}),
        )

    async def aclose(self) -> None:
        """End the session."""
        path, session, self._session = self._path, self._session, None
        if session is not None:
            # A server that is gone has ended it already; one that is not will after a while.
            with contextlib.suppress(EnvError):
                await self._ask(path, method="DELETE")

    def gold_action(self) -> str:
        """Return the server's gold action."""
        return str(self._ask_now(f"{self._path}/gold")["action"])

    def noop_action(self) -> str:
        """Return the server's noop action."""
        return str(self._ask_now(f"{self._path}/noop")["action"])

    @property
    def _path(self) -> str:
        return f"/v1/sessions/{self._session}"

    # ---- HTTP ----------------------------------------------------------------------------------

    async def _with_pictures(self, messages: list[Message]) -> list[Message]:
        """Return the server's messages with their pictures in the store of this process.

        Malformed messages are returned unchanged: `TextEnv` checks those of every environment.
        """
        shown: list[Message] = []
        for message in messages:
            content = message.get("content") if isinstance(message, dict) else None
            if isinstance(content, list):
                parts: list[Any] = [
                    await self._picture(part)
                    if isinstance(part, dict) and part.get("type") == "image"
                    else part
                    for part in content
                ]
                message = cast(Message, {**message, "content": parts})
            shown.append(message)
        return shown

    async def _picture(self, part: Mapping[str, Any]) -> Any:
        """Return a picture of the server, read as any from outside is: scaled by our own limits."""
        store, sha256 = image_store(), str(part.get("sha256"))
        try:
            if sha256 in store:
                return part
            answer = await self._ask(f"/v1/images/{sha256}", method="GET", timeout_s=_QUICK_S)
            raw = decode_base64(str(answer.get("png")))
            # It is a PNG by now, which may be larger than the file was that the server has read.
            return store.add(raw, limits=replace(image_limits(), max_bytes=LARGEST_PNG))
        except UsageError as error:
            raise EnvError(f"a picture of {self.url} is refused: {error}") from None

    async def _ask(
        self, path: str, body: Any = None, *, method: str = "POST", timeout_s: float | None = None
    ) -> dict[str, Any]:
        import aiohttp

        content = b"" if body is None else json.dumps(body).encode()
        is_again = False
        while True:
            request = _sessions.get(_open_session).request(
                method,
                self.url + path,
                data=BytesIO(content),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s or self._timeout_s),
            )
            try:
                async with request as response:
                    return self._answer(await response.read())
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                # The server may have just given up a kept connection. Turns are numbered: what was
                # played already is not played again.
                if is_again or not isinstance(error, aiohttp.ServerDisconnectedError):
                    raise self._unreachable(error) from error
            is_again = True

    def _ask_now(self, path: str) -> dict[str, Any]:
        """Send a request that is answered at once, within or without a running event loop."""
        return _loop.run(self._ask(path, method="GET", timeout_s=_QUICK_S))

    def _answer(self, content: bytes) -> dict[str, Any]:
        try:
            body = json.loads(content)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise EnvError(f"{self.url} serves no environment: it says {content[:100]!r}")
        if "error" in body:
            raise error_from(body)
        return body

    def _unreachable(self, error: BaseException) -> EnvUnreachableError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return EnvUnreachableError(
            f"cannot reach the environment at {self.url}: {reason}",
            hints=["start it there: areal-gym serve-env ENV --port PORT"],
        )


def _is_address(url: str) -> bool:
    parts = urlsplit(url)
    try:
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # "PORT" is none
        return False


def _open_session() -> aiohttp.ClientSession:
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
    )


_loop = KeptLoop("areal-gym-remote")
_sessions: PerLoop[aiohttp.ClientSession] = PerLoop(lambda session: session.close())
"""Connections of each event loop, kept open between turns and episodes."""
