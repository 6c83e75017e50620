"""`openenv:URL`: an environment on an OpenEnv server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_gym.envs.base import Response, TextEnv
from areal_gym.errors import EnvError, UsageError
from areal_gym.tasks import SeedTasks, choose_task, given_task
from areal_gym.types import Message, Task, text_of

_UNSEEN = ("done", "reward", "metadata")
"""Fields of an observation that are not for the policy."""

_INVALID_ACTION = ("VALIDATION_ERROR", "INVALID_JSON")
_FAILED_ACTION = "EXECUTION_ERROR"
"""Codes of OpenEnv's servers: the action is malformed; the environment raised in a step."""


class OpenEnvEnv(TextEnv):
    """An environment behind an OpenEnv server, in a session for each episode.

    Task: the server's own, reset with a seed (which servers may ignore).
    Tools: none.
    Observation: the server's one text, or all its fields as JSON.
    Action: an assistant message: the value of `action_field`, or without one a JSON object.
    Reward: the server's own, turn by turn. No gold policy is known.
    Episode end: the server's own; truncated after `max_turns`.
    Splits: `train` and `test`, endless, of different seeds.
    Failures: a server that is not reached is an error of the environment. Where a step raises over
        there, the action was wrong: the episode ends with reward 0, counted as `judge_errors`.
    Metrics: `invalid_actions`, messages that the server does not take as an action.

    Args:
        url: of the server, such as http://127.0.0.1:8000.
        action_field: which field of the action the policy's text is.
        instruction: what the policy is told before all else.
        max_turns: assistant messages after which the episode is truncated.
        timeout_s: how long one answer may take.
    """

    has_gold = False
    suspends = True
    judges_all_output = True

    def __init__(
        self,
        url: str,
        *,
        action_field: str | None = None,
        instruction: str = "",
        max_turns: int = 20,
        timeout_s: float = 300.0,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise UsageError(
                f"{url!r} is not the address of a server",
                hints=["such as openenv:http://HOST:PORT"],
            )
        self.url = url.rstrip("/")
        self.max_turns = max_turns
        self._action_field = action_field
        self._instruction = instruction
        self._timeout_s = timeout_s
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._first = ""
        self._next: Task | None = None

    async def prepare(self, seed: int | None, options: Mapping[str, Any]) -> None:
        """Open a session, and reset it with the task's seed."""
        given = options.get("task")
        if given is None:
            rng = self.np_random if seed is None else np.random.default_rng(seed)
            self._next = choose_task(SeedTasks(), rng, options)
        else:
            self._next = given_task(given)
        await self.aclose()
        from openenv.core import GenericEnvClient

        self._loop = asyncio.get_running_loop()
        self._client = GenericEnvClient(self.url, message_timeout_s=self._timeout_s)
        result = await self._ask(self._client.reset(seed=self._next.data["seed"]))
        self._first = self._seen(result.observation)

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Return the seed with which the session was reset."""
        assert self._next is not None
        return self._next

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Return the instruction, if there is one, and the server's first observation."""
        messages: list[Message] = [{"role": "user", "content": self._first}]
        if self._instruction:
            messages.insert(0, {"role": "system", "content": self._instruction})
        return messages

    async def respond(self, message: Message) -> Response:
        """Take the step on the server."""
        action = self._action(text_of(message["content"]))
        if action is None:
            return _invalid("An action is a JSON object here; that was none.")
        try:
            result = await self._ask(self._client.step(action))
        except EnvError as error:
            code = _error_code(error)
            if code in _INVALID_ACTION:
                return _invalid("The environment takes no such action.")
            if code == _FAILED_ACTION:
                # The policy's action made it fail: a policy must not void what it loses.
                raise RuntimeError(str(error.__cause__)) from error
            raise
        return Response(
            messages=[{"role": "user", "content": self._seen(result.observation)}],
            reward=float(result.reward or 0.0),
            is_terminated=bool(result.done),
            metrics={"invalid_actions": 0},
        )

    async def aclose(self) -> None:
        """End the session."""
        client, self._client = self._client, None
        if client is None:
            return
        # Whatever goes wrong now, the episode is over.
        with contextlib.suppress(Exception):
            if self._loop is asyncio.get_running_loop():
                await client.close()
            elif self._loop is not None and not self._loop.is_closed():
                asyncio.run_coroutine_threadsafe(client.close(), self._loop)

    def _action(self, text: str) -> dict[str, Any] | None:
        if self._action_field is not None:
            return {self._action_field: text}
        try:
            action = json.loads(text)
        except (ValueError, RecursionError):
            return None
        return action if isinstance(action, dict) else None

    def _seen(self, observation: Mapping[str, Any]) -> str:
        shown = {name: value for name, value in observation.items() if name not in _UNSEEN}
        if len(shown) == 1 and isinstance(text := next(iter(shown.values())), str):
            return text
        return json.dumps(shown)

    async def _ask(self, asked: Any) -> Any:
        try:
            return await asked
        except Exception as error:  # the library's own, its socket's and the server's
            raise EnvError(
                f"the OpenEnv server at {self.url} failed: {error}",
                hints=[f"is it running? curl {self.url}/health"],
            ) from error


def _invalid(text: str) -> Response:
    return Response(messages=[{"role": "user", "content": text}], metrics={"invalid_actions": 1})


def _error_code(error: EnvError) -> str:
    """Return the server's error code, which the client quotes, or ""."""
    quoted = re.search(r"\(code: (\w+)\)$", str(error.__cause__))
    return quoted.group(1) if quoted else ""
