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
from typing import Any, Literal

from areal_gym.agents.base import Episode, PolicyEndpoint
from areal_gym.agents.harnesses import harness_of
from areal_gym.errors import AgentError, UsageError
from areal_gym.places import CommandResult
from areal_gym.types import Message, text_of

_MAX_OUTPUT = 2**20
_MAX_ANSWER = 2000
_NOT_INSTALLED = 127

PORT = 8900
"""The gateway's port inside a place."""


class ProgramAgent:
    """Starts a command for each episode; its output is the answer to the environment.

    The program gets the variables OPENAI_BASE_URL and OPENAI_API_KEY (ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY, too), the opening text as AREAL_GYM_PROMPT, and on its standard input
    `{"messages": [...], "tools": [...]}` as JSON. It may talk to the environment with its key:
    `POST $OPENAI_BASE_URL/rl/answer` and `/rl/tool` (docs/agents.md). Where the policy plays
    several roles, AREAL_GYM_ROLES has `{role: base_url}` as JSON (docs/roles.md).

    The program runs in a process group of its own, which is killed at the end of the episode.

    With `where="task"` it runs inside the task's place, reaches the gateway at a socket there and
    nothing else, and what it leaves in the place is graded: also when it is out of time or fails,
    if it has called the policy. Its standard input is empty.

    Args:
        command: a command line, or its words.
        harness: instead of a command, the recipe of a known program (docs/harnesses.md).
        where: `host`, or `task` for environments whose tasks have a place.
        env: further variables.
        cwd: the directory it starts in.
        max_calls: the most policy calls of one episode.
        timeout_s: of `where="task"`: the time of the program, where the task sets none.
    """

    def __init__(
        self,
        command: str | Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        max_calls: int = 256,
        harness: str | None = None,
        where: Literal["host", "task"] = "host",
        timeout_s: float = 3600.0,
    ) -> None:
        if (command is None) == (harness is None):
            raise UsageError(
                "the agent `program` takes a command or a harness",
                hints=["agent.kwargs.command='my-agent --flag'", "agent.kwargs.harness=codex"],
            )
        if where not in ("host", "task"):
            raise UsageError(f"where is {where!r}; it is host or task")
        self._max_calls = max_calls
        self._hint = None
        self._env = dict(env or {})
        if harness is not None:
            recipe = harness_of(harness)
            self._command, self._env = recipe.argv, {**recipe.env, **self._env}
            self._hint = f"add its layer to the task's image: {recipe.install}"
        else:
            self._command = (
                shlex.split(command) if isinstance(command, str) else list(command or ())
            )
        self._cwd = cwd
        self._where = where
        self._timeout_s = timeout_s

    async def play(self, episode: Episode) -> None:
        """Run the program to its end; raises AgentError if it does not start, or if it fails."""
        endpoint = await episode.access(max_calls=self._max_calls)
        if self._where == "task":
            await self._play_inside(episode, endpoint)
            return
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
                    **self._variables(episode, endpoint, endpoint.base_url, messages),
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

    def _variables(
        self,
        episode: Episode,
        endpoint: PolicyEndpoint,
        base_url: str,
        messages: Sequence[Mapping[str, Any]],
    ) -> dict[str, str]:
        prompt = text_of(messages[-1]["content"]).replace("\0", " ")
        api_key = endpoint.api_key
        roles = {role: endpoint.base_url_of(role, base_url) for role in episode.roles}
        return {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": api_key,
            "AREAL_GYM_PROMPT": prompt,
            **({"AREAL_GYM_ROLES": json.dumps(roles)} if roles else {}),
            **self._env,
        }

    async def _play_inside(self, episode: Episode, endpoint: PolicyEndpoint) -> None:
        """Run the program in the task's place, once for each of the task's steps."""
        messages: Sequence[Message] = episode.first_messages
        while messages:
            program = await episode.program_place()
            if program is None:
                raise UsageError(
                    "where=task: the tasks of this environment have no place",
                    hints=["such as harbor:PATH", "agent.kwargs.where=host"],
                )
            # Again for each step: verification ended the place's network with its processes.
            base_url = await endpoint.listen_at(await program.place.listen(PORT))
            num_calls = endpoint.num_calls
            result = await program.place.run(
                self._command,
                cwd=self._cwd or program.workdir,
                env=self._variables(episode, endpoint, base_url, messages),
                user=program.user,
                timeout_s=self._timeout_s if program.timeout_s is None else program.timeout_s,
            )
            self._require_played(endpoint, result, has_called=endpoint.num_calls > num_calls)
            if result.is_timed_out:
                await episode.finish(is_truncated=True)
                return
            answer = result.stdout.decode("utf-8", "replace").strip()[-_MAX_ANSWER:]
            messages = await episode.reply(answer)
        await episode.finish()

    def _require_played(
        self, endpoint: PolicyEndpoint, result: CommandResult, *, has_called: bool
    ) -> None:
        """Raise AgentError if the program never called the policy, or could not."""
        if result.exit_code != 0 and endpoint.error is not None:
            raise endpoint.error
        if has_called:
            return
        how = "ran out of time" if result.is_timed_out else f"ended with code {result.exit_code}"
        text = (result.stderr or result.stdout).decode("utf-8", "replace").strip()[-400:]
        raise AgentError(
            f"{self._command[0]} never called the policy and {how}: {text}",
            hints=[self._hint if result.exit_code == _NOT_INSTALLED else None],
        )


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
