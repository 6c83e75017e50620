"""Agents that are programs in any language; they reach the policy as they would reach OpenAI.

A run starts them itself, or other machines open its episodes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from areal_gym.agents.base import Episode
from areal_gym.errors import AgentError
from areal_gym.types import text_of

_MAX_OUTPUT = 2**20


class ProgramAgent:
    """Starts a command for each episode; its output is the answer to the environment.

    The program gets the variables OPENAI_BASE_URL and OPENAI_API_KEY (ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY, too), the opening text as AREAL_GYM_PROMPT, and on its standard input
    `{"messages": [...], "tools": [...]}` as JSON. It may talk to the environment with its key:
    `POST $OPENAI_BASE_URL/rl/answer` and `/rl/tool` (docs/agents.md).

    The program runs in a process group of its own, which is killed at the end of the episode.

    Args:
        command: a command line, or its words.
        env: further variables.
        cwd: the directory it starts in.
        max_calls: the most policy calls of one episode.
    """

    def __init__(
        self,
        command: str | Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        max_calls: int = 256,
    ) -> None:
        self._max_calls = max_calls
        self._command = shlex.split(command) if isinstance(command, str) else list(command)
        self._env = dict(env or {})
        self._cwd = cwd

    async def play(self, episode: Episode) -> None:
        """Run the program to its end; raises AgentError if it does not start, or if it fails."""
        endpoint = await episode.access(max_calls=self._max_calls)
        messages = [dict(message) for message in episode.first_messages]
        stdin = {"messages": messages, "tools": [tool.schema() for tool in episode.tools]}
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=self._cwd,
                env={
                    **os.environ,
                    "OPENAI_BASE_URL": endpoint.base_url,
                    "OPENAI_API_KEY": endpoint.api_key,
                    "ANTHROPIC_BASE_URL": endpoint.base_url.removesuffix("/v1"),
                    "ANTHROPIC_API_KEY": endpoint.api_key,
                    "AREAL_GYM_PROMPT": text_of(episode.first_messages[-1]["content"]).replace(
                        "\0", " "
                    ),
                    **self._env,
                },
                start_new_session=True,
            )
        except OSError as error:
            raise AgentError(f"{self._command[0]} does not start: {error.strerror}") from error
        try:
            output, errors = await process.communicate(json.dumps(stdin).encode())
        finally:
            # The group outlives its leader where the program has left children behind.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if process.returncode is None:
                await process.wait()
        if process.returncode != 0:
            last = errors.decode("utf-8", "replace").strip()[-400:]
            raise AgentError(f"{self._command[0]} ended with code {process.returncode}: {last}")
        answer = output[:_MAX_OUTPUT].decode("utf-8", "replace").strip()
        await episode.finish(answer or None)


class OnlineAgent:
    """Offers the episode, and waits until the program that claimed it ends it.

    The episode's time starts when it is claimed.

    Args:
        max_calls: the most policy calls of one episode.
    """

    def __init__(self, max_calls: int = 256) -> None:
        self._max_calls = max_calls

    async def play(self, episode: Episode) -> None:
        """Wait until a program has claimed the episode, and then until it has ended it."""
        endpoint = await episode.access(max_calls=self._max_calls)
        with episode.idle():
            await endpoint.claimed()
        await endpoint.ended()
        await episode.finish()
