"""Any environment, with the tools of MCP servers beside its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from areal_gym.envs.base import Response, StepResult, TextEnv
from areal_gym.envs.mcp_tools.server_settings import parse_servers
from areal_gym.envs.mcp_tools.server_tools import ServerTools
from areal_gym.errors import UsageError
from areal_gym.places import ProgramPlace
from areal_gym.tasks.base import TaskSource
from areal_gym.types import Message, Task
from areal_gym.utils.code_references import load_reference

_TURNS = 16


class EnvWithServers(TextEnv):
    """Another environment whose policy may also call the tools of MCP servers.

    A message that calls such tools is answered with their results, and the other environment does
    not see it as an answer: what it counts as a turn stays what it was. In a message that calls
    tools of both, each side runs its own.

    Args:
        playing: the other environment.
        mcp_servers: settings of the servers (docs/mcp.md).
        mcp_turns: the messages of an episode that may call tools of servers, beyond the other
            environment's own limit of turns.

    Raises:
        UsageError: no turn is left for tools, or several roles play the other environment.
    """

    suspends = True

    def __init__(self, playing: TextEnv, mcp_servers: Any, mcp_turns: int = _TURNS) -> None:
        if mcp_turns < 1:
            raise UsageError(f"mcp_turns is {mcp_turns}; at least 1 is needed")
        if playing.roles:
            raise UsageError(
                f"mcp_servers are for one policy, and {type(playing).__name__} is played by the "
                f"roles {', '.join(playing.roles)}",
                hints=["offer the tools in the environment itself: TextEnv.tools"],
            )
        super().__init__(render_mode=playing.render_mode)
        self.playing = playing
        self.servers = ServerTools(parse_servers(mcp_servers))
        """The servers and their connections."""
        self._mcp_turns = mcp_turns
        self._server_tools: set[str] = set()
        self._follow()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "playing":
            raise AttributeError(name)
        return getattr(self.playing, name)

    def _follow(self) -> None:
        """Take over what the other environment says about itself."""
        env = self.playing
        self.has_gold, self.process_variables = env.has_gold, env.process_variables
        self.tool_dialect, self.max_calls = env.tool_dialect, env.max_calls
        self.max_turns = env.max_turns + self._mcp_turns
        self.tools = tuple(env.tools)

    @property
    def played_id(self) -> str | None:
        """The name of the environment that the other one plays."""
        return self.playing.played_id or type(self.playing).__name__

    @property
    def sandboxes(self) -> Sequence[Any]:
        """The sandboxes of the other environment."""
        return self.playing.sandboxes

    @cached_property
    def tasks(self) -> TaskSource:
        """The tasks of the other environment."""
        return self.playing.tasks

    def num_tasks(self, split: str) -> int | None:
        """Return the number of tasks of the other environment."""
        return self.playing.num_tasks(split)

    async def before_run(self, on_progress: Callable[[int, int], None]) -> None:
        """Make what the episodes of the other environment share."""
        await self.playing.before_run(on_progress)

    async def prepare(self, seed: int | None, options: Mapping[str, Any]) -> None:
        """Reset the other environment, then open the servers, inside its place if it has one."""
        await self.playing.areset(seed=seed, options=options)
        self._follow()
        names = [tool.name for tool in self.playing.tools]
        runs_inside = self.servers.has_commands and await self.playing.program_place()
        place = runs_inside.place if runs_inside else None
        tools = await self.servers.open(place, taken=names)
        self._server_tools = {tool.name for tool in tools}
        self.tools = (*self.playing.tools, *tools)

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Return the task of the other environment, which was reset in `prepare`."""
        return self.playing.task

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Return the first messages of the other environment."""
        return tuple(self.playing.messages)

    async def respond(self, message: Message) -> Response:
        """Run the calls of servers' tools; hand everything else to the other environment."""
        calls = message.get("tool_calls", [])
        # An environment without tools would grade a wrong call as an answer.
        has_own = bool(self.playing.tools)
        own = [c for c in calls if has_own and c["function"]["name"] not in self._server_tools]
        others = [call for call in calls if call not in own]
        is_broken = "parse_error" in message and not has_own
        if not others and not is_broken:
            return self._response(await self.playing.astep(message), ())
        called = await self.call_tools(_with_calls(message, others))
        metrics: dict[str, float] = {
            "tool_calls": called.num_calls,
            "tool_errors": called.num_errors,
        }
        if not own:
            # Rewards of the other environment may look at the whole dialogue.
            self.playing._messages += [message, *called.messages]
            return Response(messages=called.messages, metrics=metrics)
        response = self._response(
            await self.playing.astep(_with_calls(message, own)), called.messages
        )
        response.messages = _in_order([call["id"] for call in calls], response.messages)
        for name, value in response.metrics.items():
            metrics[name] = metrics.get(name, 0) + value
        response.metrics = metrics
        return response

    def _response(self, step: StepResult, results: Sequence[Message]) -> Response:
        by = step.info.get("truncated_by")
        if step.truncated and by == "max_turns":
            self.max_turns = self.num_turns  # the reason stays the limit of turns
        return Response(
            messages=(*results, *step.info["messages"]),
            reward=step.reward,
            reward_parts=step.info.get("reward_parts", {}),
            is_terminated=step.terminated,
            is_truncated=step.truncated and by == "env",
            metrics=step.info.get("metrics", {}),
            state_key=step.info.get("state_key"),
        )

    async def conclude(self) -> Response | None:
        """Let the other environment grade the episode as it stands."""
        step = await self.playing.aconclude()
        return None if step is None else self._response(step, ())

    async def program_place(self) -> ProgramPlace | None:
        """Return where programs play the other environment."""
        return await self.playing.program_place()

    async def aclose(self) -> None:
        """Leave the servers, then release what the other environment holds."""
        try:
            await self.servers.aclose()
        finally:
            await self.playing.aclose()

    def gold_action(self) -> str:
        """Return the gold action of the other environment."""
        return self.playing.gold_action()

    def noop_action(self) -> str:
        """Return the noop action of the other environment."""
        return self.playing.noop_action()


def make_for_rules(entry_point: str, mcp_servers: Any, **kwargs: Any) -> EnvWithServers:
    """Make the environment at `entry_point` with servers that all of its instances share.

    The checker's rules play thousands of short episodes, in several processes.
    """
    turns = kwargs.pop("mcp_turns", _TURNS)
    env = EnvWithServers(load_reference(entry_point, "environment")(**kwargs), mcp_servers, turns)
    env.servers.shares_all = True
    return env


def _with_calls(message: Message, calls: Sequence[Any]) -> Message:
    changed = message.copy()
    changed["tool_calls"] = list(calls)
    return changed


def _in_order(call_ids: Sequence[str], messages: Sequence[Message]) -> list[Message]:
    """Return results of tools in the order of their calls, and then all other messages."""
    place = {call_id: index for index, call_id in enumerate(call_ids)}
    last = len(place)
    return sorted(messages, key=lambda message: place.get(message.get("tool_call_id", ""), last))
