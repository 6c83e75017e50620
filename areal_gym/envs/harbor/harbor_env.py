"""`harbor:PATH`: tasks that are folders with an image, an instruction and tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
from gymnasium.utils.seeding import np_random

from areal_gym.chat.tool_call_formats import DEFAULT_DIALECT, require_dialect, write_call
from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.harbor.agent_place import AgentPlace
from areal_gym.envs.harbor.number_tasks import generated_tasks
from areal_gym.envs.harbor.phases import phase
from areal_gym.envs.harbor.reward_files import combined, passes
from areal_gym.envs.harbor.shell_tools import Shell
from areal_gym.envs.harbor.solution_commands import solution_command
from areal_gym.envs.harbor.step_verification import Mode, Verdict, verify
from areal_gym.envs.harbor.task_datasets import leave_out_unbuilt, task_source
from areal_gym.envs.harbor.task_folder import HarborTask, TaskStep
from areal_gym.envs.harbor.task_images import build_images, place_image, place_limits
from areal_gym.envs.mcp_tools.server_settings import McpServerSettings, parse_servers
from areal_gym.envs.mcp_tools.server_tools import ServerTools
from areal_gym.envs.tools import Tool, tool
from areal_gym.errors import ToolError, UsageError, choices
from areal_gym.places import Places, ProgramPlace
from areal_gym.places.pool import PlacePool
from areal_gym.places.shared_places import shared_pool
from areal_gym.plugins import registry
from areal_gym.tasks.base import given_task
from areal_gym.types import Message, Task

_PROMPT = (
    "You work in a Linux container, through its tools. Do what the user asks for, and then answer "
    "with a message without a tool call."
)
_LEAST_COMMAND_S, _MOST_COMMAND_S = 0.1, 86_400.0


@dataclass
class _Progress:
    """The state of the running episode."""

    step: int = 0
    verdicts: list[Verdict] = field(default_factory=list)
    used_s: float = 0.0
    """Seconds that the agent's commands have taken in this step."""
    is_solved: bool = False
    """Whether the gold action was given in this step."""


class HarborEnv(TextEnv):
    """Tasks that are folders with an image, an instruction and tests, in Harbor's format.

    Task: the instruction of a task folder; with `[[steps]]` one after the other in one container.
    Tools: `bash(command, timeout_s)` runs a command in the container, whose working directory
        lasts; `edit(path, old, new)` replaces a text in a file; `view(path)` shows numbered lines.
        The task's MCP servers, which run in the container, add theirs.
    Observation: the instruction, then the output of the tools, cut in the middle.
    Action: an assistant message. One without a call ends the step.
    Reward: what the task's `test.sh` writes, run in a fresh container that only gets the files
        which the agent changed. Parts: all named rewards, per step where there are several.
    Episode end: terminated by the last step, or by one below its `min_reward`; truncated, and
        graded as it stands, after `max_turns`, and by the last step when the agent's commands have
        taken `agent.timeout_sec`.
    Splits: by `splits.json` beside the tasks, else by a hash of the task's id.
    Metrics: `tool_calls`, `tool_errors`, `steps` (that were verified), `left_out` (files that the
        verifier did not get), `agent_timeout` (1 where the agent's time was over).
    Data: yours, or generated. History: v0.

    Args:
        path: a task folder, a folder of them, a registry.json, a repository (OWNER/NAME@REF), or
            the name of a generated family: "numbers-1", "numbers-2" or "numbers-3".
        dataset: which of the registry's data sets.
        heldout: the share of tasks that is held out, where no splits.json says it.
        skip_broken: leave out tasks that cannot be used, instead of refusing all.
        places: the backend that runs the containers (`areal-gym list places`).
        places_kwargs: arguments of the backend, such as {build_args: {BASE_IMAGE: ...}}.
        spare: how many containers are started ahead of the episodes that need them.
        verifier: "fresh", in a container of its own; "task": as the task's environment_mode says;
            "shared": in the agent's container, where the agent can forge its reward.
        max_turns: assistant messages after which the episode is truncated.
        command_timeout_s: the time of a command that asks for none.
        max_output: characters of a tool's output that the policy gets to read.
        system_prompt: the text of the system message; "" leaves it out.
        tool_dialect: how calls are written; by default as the model's chat template writes them.
    """

    suspends = True

    def __init__(
        self,
        path: str,
        *,
        dataset: str | None = None,
        heldout: float | None = None,
        skip_broken: bool = False,
        places: str | Places = "local",
        places_kwargs: Mapping[str, Any] | None = None,
        spare: int = 0,
        verifier: Mode = "fresh",
        max_turns: int = 30,
        command_timeout_s: float = 60.0,
        max_output: int = 8_000,
        system_prompt: str = _PROMPT,
        tool_dialect: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        source, self._tasks = task_source(
            generated_tasks(path) or path, dataset=dataset, heldout=heldout, skip_broken=skip_broken
        )
        super().__init__(tasks=source, render_mode=render_mode)
        if verifier not in get_args(Mode):
            raise UsageError(f"verifier = {verifier!r}", hints=choices(verifier, get_args(Mode)))
        self._places = registry().get("places", places).id if isinstance(places, str) else places
        self._places_kwargs = dict(places_kwargs or {})
        self._spare = spare
        self._verifier = verifier
        self._path = str(generated_tasks(path) or path)
        self._skip_broken = skip_broken
        self.max_turns = max_turns
        self.tool_dialect = tool_dialect and require_dialect(tool_dialect)
        self._command_timeout_s = command_timeout_s
        self._max_output = max_output
        self._system_prompt = system_prompt
        self._own_tools: tuple[Tool, ...] = (self.bash, self.edit, self.view)
        self.tools: Sequence[Tool] = self._own_tools
        self._chosen: Task | None = None
        self._folder = next(iter(self._tasks.values()))
        self._servers: ServerTools | None = None
        self._progress = _Progress()
        self._agent_place: AgentPlace | None = None

    # ---- the episode -------------------------------------------------------------------------

    async def before_run(self, on_progress: Callable[[int, int], None]) -> None:
        """Build the images of all tasks; SandboxError names those without one, unless skipped."""
        failures = await build_images(self._tasks.values(), self._backend(), on_progress)
        leave_out_unbuilt(self._path, failures, len(self._tasks), is_skipped=self._skip_broken)

    async def prepare(self, seed: int | None, options: Mapping[str, Any]) -> None:
        """Choose the task, remove the place of the episode before, open the task's MCP servers."""
        given = options.get("task")
        rng = self.np_random if seed is None else np_random(seed)[0]
        task = super().sample_task(rng, options) if given is None else given_task(given)
        if task.data.get("name") not in self._tasks:
            raise UsageError(f"{self._path} has no task {task.data.get('name')!r}")
        await self.aclose()
        self._chosen = task
        self._folder = self._tasks[str(task.data["name"])]
        self._progress = _Progress()
        self.tools = self._own_tools
        self._expect_places()
        if self._folder.environment.mcp_servers:
            self._servers = ServerTools(_server_settings(self._folder))
            await self._open_servers()

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Return the task that `prepare` has chosen."""
        assert self._chosen is not None
        return self._chosen

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Return the system message and the first step's instruction."""
        messages: list[Message] = [{"role": "user", "content": self._step.instruction.strip()}]
        if self._system_prompt:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        return messages

    async def _open_servers(self) -> None:
        """Open the task's servers in the agent's place; they end with each step."""
        assert self._servers is not None
        place = (await self._started()).place
        names = [tool.name for tool in self._own_tools]
        async with phase(self._folder.id, "MCP servers"):
            tools = await self._servers.open(place, taken=names)
        self.tools = (*self._own_tools, *tools)

    async def respond(self, message: Message) -> Response:
        """Run the calls, or verify the step that has ended."""
        if not (message.get("tool_calls") or message.get("parse_error")):
            return await self._end_step((), {"tool_calls": 0, "tool_errors": 0})
        results = await self.call_tools(message)
        counts: dict[str, float] = {
            "tool_calls": results.num_calls,
            "tool_errors": results.num_errors,
        }
        if self._seconds_left() <= 0:
            counts["agent_timeout"] = 1
            return await self._end_step(results.messages, counts, is_out_of_time=True)
        if self.num_turns >= self.max_turns:
            await self._verify(counts)
            return await self._close(Response(messages=results.messages, metrics=counts))
        return Response(messages=results.messages, metrics=counts)

    async def conclude(self) -> Response:
        """Verify the running step as it stands."""
        counts: dict[str, float] = {}
        await self._verify(counts)
        return await self._close(Response(is_truncated=True, metrics=counts))

    async def aclose(self) -> None:
        """Leave the task's servers and remove the agent's place."""
        servers, self._servers = self._servers, None
        place, self._agent_place = self._agent_place, None
        if servers is not None:
            await servers.aclose()
        if place is not None:
            await place.aclose()

    async def _end_step(
        self,
        messages: Sequence[Message],
        counts: dict[str, float],
        *,
        is_out_of_time: bool = False,
    ) -> Response:
        """Verify the step; go on with the next, or end the episode."""
        progress, step = self._progress, self._step
        verdict = await self._verify(counts)
        is_last = progress.step + 1 == len(self._folder.steps)
        if is_last or not passes(verdict.rewards, step.min_reward):
            return await self._close(
                Response(
                    messages=messages,
                    is_terminated=not is_out_of_time,
                    is_truncated=is_out_of_time,
                    metrics=counts,
                )
            )
        if self.num_turns >= self.max_turns:
            return await self._close(Response(messages=messages, metrics=counts))
        progress.step += 1
        progress.used_s, progress.is_solved = 0.0, False
        if self._agent_place is not None:
            await self._agent_place.begin(self._step)
        if self._servers is not None:
            await self._open_servers()
        instruction: Message = {"role": "user", "content": self._step.instruction.strip()}
        return Response(messages=[*messages, instruction], metrics=counts)

    async def _verify(self, counts: dict[str, float]) -> Verdict:
        if self._servers is not None:
            await self._servers.aclose()
        verdict = await verify(
            self._folder,
            self._step,
            self._agent_place,
            self._backend(),
            mode=self._verifier,
        )
        self._progress.verdicts.append(verdict)
        counts["steps"] = 1
        counts["left_out"] = len(verdict.left_out)
        return verdict

    async def _close(self, response: Response) -> Response:
        """Complete the last response: rewards, and the verifier's report for people to read."""
        await self.aclose()
        progress, task = self._progress, self._folder
        verdicts = progress.verdicts
        response.reward = combined(
            [verdict.rewards for verdict in verdicts], task.toml.multi_step_reward_strategy
        )
        response.reward_parts = {
            f"{step.name}/{name}" if step.name else name: value
            for step, verdict in zip(task.steps, verdicts, strict=False)
            for name, value in verdict.rewards.items()
        }
        response.messages = [
            *response.messages,
            *(_report(step, verdict) for step, verdict in zip(task.steps, verdicts, strict=False)),
        ]
        return response

    # ---- tools -------------------------------------------------------------------------------

    @tool
    async def bash(self, command: str, timeout_s: float | None = None) -> str:
        """Run a shell command; return its output and exit code. The working directory lasts."""
        wanted_s = self._command_timeout_s if timeout_s is None else timeout_s
        if not 0 < wanted_s <= _MOST_COMMAND_S:
            raise ToolError(f"timeout_s is a number of seconds, up to {_MOST_COMMAND_S:g}")
        shell = await self._shell()
        limit_s = max(_LEAST_COMMAND_S, min(wanted_s, self._seconds_left()))
        start_s = time.monotonic()
        try:
            return await shell.bash(command, limit_s)
        finally:
            self._progress.used_s += time.monotonic() - start_s

    @tool
    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace the only occurrence of `old` in a file; an empty `old` writes a new file."""
        return await (await self._shell()).edit(path, old, new)

    @tool
    async def view(self, path: str, first_line: int = 1, num_lines: int = 200) -> str:
        """Show numbered lines of a file."""
        return await (await self._shell()).view(path, first_line, num_lines)

    async def program_place(self) -> ProgramPlace:
        """Return the agent's place, for a program that plays the episode."""
        place = await self._started()
        return ProgramPlace(
            place=place.place,
            user=self._step.agent.user,
            workdir=place.workdir,
            timeout_s=self._step.agent.timeout_sec,
        )

    async def _shell(self) -> Shell:
        place = await self._started()
        user, task_id = self._step.agent.user, self._folder.id
        return Shell(place.place, task_id=task_id, user=user, max_output=self._max_output)

    async def _started(self) -> AgentPlace:
        if self._agent_place is None:
            place = AgentPlace(self._folder)
            self._agent_place = place
            await place.start(self._backend(), self._progress.step)
        return self._agent_place

    def _backend(self) -> Places:
        if not isinstance(self._places, str):
            return self._places
        return shared_pool(self._places, spare=self._spare, **self._places_kwargs)

    def _expect_places(self) -> None:
        """Start the places of the chosen task while the policy reads it, as far as spares go."""
        pool = self._backend()
        if not isinstance(pool, PlacePool):
            return
        task = self._folder
        image = place_image(task, task.environment, task.image_folder)
        pool.build_ahead([image])
        for _ in range(2):  # the agent's, and mostly the verifier's
            pool.expect(image, place_limits(task.environment))

    def _seconds_left(self) -> float:
        """Return how long the agent's commands of this step may still take."""
        limit_s = self._step.agent.timeout_sec
        return float("inf") if limit_s is None else limit_s - self._progress.used_s

    @property
    def _step(self) -> TaskStep:
        return self._folder.steps[self._progress.step]

    # ---- for checks --------------------------------------------------------------------------

    def gold_action(self) -> str:
        """Run the step's solution by one call, then say that the step is done."""
        task, step, progress = self._folder, self._step, self._progress
        if progress.is_solved or step.solution is None:
            return "Done."
        progress.is_solved = True
        command = solution_command(task, step)
        return write_call("bash", {"command": command}, self.tool_dialect or DEFAULT_DIALECT)


def _server_settings(task: HarborTask) -> tuple[McpServerSettings, ...]:
    """Return the settings of a task's servers; raise UsageError for wrong ones."""
    return parse_servers(
        [
            server.model_dump(exclude_defaults=True) | {"transport": server.transport}
            for server in task.environment.mcp_servers
        ]
    )


def _report(step: TaskStep, verdict: Verdict) -> Message:
    """Return what the verifier did, as a message for people: the policy never reads it."""
    rewards = ", ".join(f"{name} {value:g}" for name, value in verdict.rewards.items())
    parts = [f"{step.name}: {rewards}" if step.name else rewards]
    parts += [f"not carried to the verifier: {line}" for line in verdict.left_out]
    if verdict.diff:
        parts.append(verdict.diff.rstrip("\n"))
    parts.append(f"test.sh:\n{verdict.log}" if verdict.log else "test.sh: no output")
    return {"role": "tool", "name": "verifier", "content": "\n\n".join(parts)}
