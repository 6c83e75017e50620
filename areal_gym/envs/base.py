"""The environment contract: a multi-turn text environment that is a real `gymnasium.Env`.

An author writes three methods; Gymnasium's own are final here:

    class Echo(TextEnv):
        def sample_task(self, rng, options):
            return Task(id=f"gen/{(n := int(rng.integers(100)))}", data={"number": n})

        def first_messages(self, task):
            return [{"role": "user", "content": f"Say {task.data['number']}."}]

        async def respond(self, message):
            is_right = message["content"].strip() == str(self.task.data["number"])
            return Response(reward=float(is_right), is_terminated=True)

The observation is the text of the newest message; the messages ride in `info["messages"]`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, cast, final

import gymnasium
import numpy as np

from areal_gym.chat.tool_call_formats import DEFAULT_DIALECT, parse_assistant
from areal_gym.envs.judging import JudgingBoundary, env_errors, is_caused_by_output
from areal_gym.envs.loops import run_on_kept_loop
from areal_gym.envs.responses import (
    Info,
    Response,
    StepResult,
    ToolResults,
    refusal,
    require_messages,
    step_result,
    tool_message,
)
from areal_gym.envs.role_order import RoleOrder, RolePolicy
from areal_gym.envs.spaces import TextSpace
from areal_gym.envs.tool_calls import run_call
from areal_gym.envs.tools import Tool
from areal_gym.errors import EnvError, EpisodeError, UsageError
from areal_gym.places import ProgramPlace
from areal_gym.tasks.base import SampledTasks, TaskSource, choose_task, given_task
from areal_gym.types import Message, Task, readable
from areal_gym.utils.markup import block, dialogue, pairs, short

__all__ = ["Response", "StepResult", "TextEnv", "ToolResults", "run_on_kept_loop"]


class TextEnv(gymnasium.Env[str, str]):
    """A task that answers assistant messages.

    Authors override `sample_task`, `first_messages` and `respond`, and may set class attributes.
    State lives in the instance only; `task` is read-only. Same seed, same actions and same tool
    results give the same episode, bit for bit: draw from `self.np_random` and nowhere else.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 1}  # type: ignore[misc]
    tools: Sequence[Tool] = ()
    """The tools that the policy may call, in the order in which the template lists them."""
    max_turns: int = 8
    """Assistant messages after which an episode is truncated."""
    tool_dialect: str | None = None
    """The format of tool calls (`chat.tool_call_formats`); None: that of the chat template."""
    max_calls: int = 16
    """Tool calls that are run per message; the policy is told that the others were not."""
    max_tool_calls: int | None = None
    """Tool calls that are run per episode; the policy is told that later ones were not."""
    suspends: bool = False
    """Set to True when `respond` or a tool really awaits: `step` then runs on a kept event loop.
    Otherwise it drives the coroutine directly (0.5 us)."""
    has_gold: bool = True
    """Set to False if no perfect policy is known (a game of another library, say)."""
    blind_reward: float | None = None
    """Of an environment with pictures: the mean reward of guessing without seeing them."""
    process_variables: Mapping[str, str] = {}
    """Environment variables that another process needs to make the same environment."""
    judges_all_output: bool = False
    """Set to True if any exception of `respond` or a tool is caused by the policy's output: it then
    earns 0 and a count in `judge_errors`. Failures of the machine stay failures (`judging`)."""

    roles: Sequence[str] = ()
    """The roles of an episode that several play, each with a dialogue of its own. The first one
    reads `first_messages`; `Response.role` passes the turn on. Empty: there is one policy."""
    fixed_roles: Mapping[str, RolePolicy] = {}
    """Policies of roles that are not trained, by role; set by a run (`env.fixed_roles`)."""

    made_by: Callable[[], TextEnv] | None = None
    """Makes another instance like this one; set by `areal_gym.make`."""

    def __init__(self, *, tasks: TaskSource | None = None, render_mode: str | None = None) -> None:
        self._given_tasks = tasks
        self.observation_space = TextSpace()
        self.action_space = TextSpace()
        self.render_mode = render_mode
        self.num_turns = 0
        self.num_tool_calls = 0
        """Number of calls that were run in this episode."""
        self.tool_s = 0.0
        """Seconds that the latest step spent in tools."""
        self._task: Task | None = None
        self._messages: list[Message] = []
        self._role_order = RoleOrder()
        self._is_over = True
        self._judging_boundary = JudgingBoundary()

    # ---- what an author writes -------------------------------------------------------------

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Choose a task. `options` may hold `split` and `index`; equal inputs give equal tasks.

        Not needed by an environment that is given its source: `super().__init__(tasks=source)`.
        """
        if self._given_tasks is None:
            raise NotImplementedError(f"{type(self).__name__}.sample_task")
        return choose_task(self._given_tasks, rng, options)

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Return the system and user messages that open the episode. Reset your own state here."""
        raise NotImplementedError(f"{type(self).__name__}.first_messages")

    async def respond(self, message: Message) -> Response:
        """Answer an assistant message.

        `message["tool_calls"]` holds the parsed calls; `await self.call_tools(message)` runs them.
        Any exception ends the episode as a failure of the environment, which is not trained on:
        read and grade what the policy wrote inside `judging`, or set `judges_all_output`.
        """
        raise NotImplementedError(f"{type(self).__name__}.respond")

    async def conclude(self) -> Response | None:
        """Grade the episode as it stands, which a limit outside ends; None: nothing is left."""
        return None

    async def program_place(self) -> ProgramPlace | None:
        """Return where a program that plays the episode runs; None: on this machine."""
        return None

    async def prepare(self, seed: int | None, options: Mapping[str, Any]) -> None:
        """Await resources for the next episode, before anything else; rarely overridden."""

    async def before_run(self, on_progress: Callable[[int, int], None]) -> None:
        """Make what all episodes share, such as images; `on_progress` gets (done, total)."""

    @property
    def prepares(self) -> bool:
        """Whether a reset awaits something; event loops then await `areset`."""
        return type(self).prepare is not TextEnv.prepare

    def num_tasks(self, split: str) -> int | None:
        """Return how many distinct tasks `options={"index": i}` can name; None if endless."""
        return None if self._given_tasks is None else self._given_tasks.num_tasks(split)

    async def aclose(self) -> None:
        """Release the episode's resources (an interpreter, a connection). May be called twice."""

    # ---- what every environment ships, for `areal-gym check` ---------------------------------

    def gold_action(self) -> str:
        """Return what a perfect policy would write now; to the end, it earns the full reward."""
        raise NotImplementedError(f"{type(self).__name__}.gold_action")

    def noop_action(self) -> str:
        """Return the text of a policy that does nothing: it must not earn the full reward."""
        return "I do not know."

    # ---- helpers for authors -----------------------------------------------------------------

    def judging(self) -> JudgingBoundary:
        """Return a block in which exceptions count as wrong output, not as errors.

        Set the verdict to "wrong" before it::

            is_right = False
            with self.judging():
                is_right = score(message["content"]) == self.task.data["answer"]

        An exception ends the block and counts in the metric `judge_errors`. Infrastructure
        (`GymError`), input and output (`OSError`) and missing packages still raise.
        """
        return self._judging_boundary

    @cached_property
    def tasks(self) -> TaskSource:
        """The source of the tasks: the one that was given, or `sample_task` as a source."""
        return self._given_tasks or SampledTasks(self.sample_task, self.num_tasks)

    @property
    def task(self) -> Task:
        """The task of the running episode; raises UsageError before the first `reset`."""
        if self._task is None:
            raise UsageError(f"{type(self).__name__} has no task yet; call reset() first")
        return self._task

    @property
    def sandboxes(self) -> Sequence[Any]:
        """Ids or objects of the sandboxes that run code of the policy."""
        return ()

    @property
    def played_id(self) -> str | None:
        """Name of the environment of the running task, if this one plays several (`mix`)."""
        return None

    @property
    def messages(self) -> Sequence[Message]:
        """All messages so far, of all roles."""
        return self._messages

    @property
    def role(self) -> str | None:
        """The role that writes next; None in an environment without roles."""
        return self._role_order.role

    @property
    def dialogue(self) -> Sequence[Message]:
        """The messages that the role which writes next has read and written."""
        return self._role_order.dialogue

    async def call_tools(self, message: Message) -> ToolResults:
        """Run the message's tool calls in order; mistakes become results that explain themselves.

        A `ToolError` and a malformed call are told to the model. Anything else propagates, unless
        `judges_all_output`: then the model is told the exception's name.
        """
        results: list[Message] = []
        num_errors = num_refused = 0
        if "parse_error" in message:
            num_errors += 1
            results.append({"role": "tool", "content": f"error: {message['parse_error']}"})
        calls = message.get("tool_calls", [])
        num_allowed = self.max_calls
        if self.max_tool_calls is not None:
            num_allowed = min(num_allowed, self.max_tool_calls - self.num_tool_calls)
        for call in calls[:num_allowed]:
            content, is_error = await run_call(self, call)
            num_errors += is_error
            results.append(tool_message(call, content))
        if len(calls) > num_allowed:
            num_refused = len(calls) - num_allowed
            num_errors += num_refused
            results.append(refusal(num_refused, self.max_calls, num_allowed, self.max_tool_calls))
        return ToolResults(results, len(calls), num_errors, num_refused)

    # ---- Gymnasium's contract ------------------------------------------------------------------

    @final
    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, Info]:
        """Start an episode.

        `options={"task": {...}}` (or a `Task`) chooses the task itself;
        `{"split": ..., "index": i}` is handed to `sample_task`. Raises UsageError if the options
        name no task, EnvError if the environment's own code failed.
        """
        if self.prepares:
            return run_on_kept_loop(self.areset(seed=seed, options=options))
        return self._reset(seed, options or {})

    @final
    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, Info]:
        """Start an episode of an environment that awaits something first. See `reset`."""
        options = options or {}
        with env_errors(f"{type(self).__name__}.prepare"):
            await self.prepare(seed, options)
        return self._reset(seed, options)

    def _reset(self, seed: int | None, options: Mapping[str, Any]) -> tuple[str, Info]:
        before = self._np_random, self._np_random_seed, self._task, self._messages
        try:
            super().reset(seed=seed)
            given = options.get("task")
            with env_errors(f"{type(self).__name__}.reset"):
                if given is None:
                    self._task = self.sample_task(self.np_random, options)
                else:
                    self._task = given_task(given)
                self._messages = list(self.first_messages(self._task))
            source = f"{type(self).__name__}.first_messages"
            require_messages(self._messages, source, are_needed=True)
        except BaseException:
            # An episode that cannot begin does not disturb the one that goes on.
            self._np_random, self._np_random_seed, self._task, self._messages = before
            raise
        self.num_turns = 0
        self.num_tool_calls = 0
        self._is_over = False
        self._role_order = RoleOrder(self.roles, self._messages)
        return readable(self._messages[-1]["content"]), {
            "messages": tuple(self._messages),
            "task_id": self.task.id,
            "task": self.task.to_dict(),
            **({} if self.role is None else {"role": self.role}),
        }

    @final
    def step(self, action: str | Message) -> StepResult:
        """Answer an assistant message, synchronously. See `astep`."""
        if self.suspends:
            return run_on_kept_loop(self.astep(action))
        coroutine = self.astep(action)
        try:
            coroutine.send(None)
        except StopIteration as stop:
            return cast(StepResult, stop.value)
        coroutine.close()
        raise EnvError(
            f"{type(self).__name__} awaited something; set `suspends = True` on the class"
        )

    @final
    async def astep(self, action: str | Message) -> StepResult:
        """Answer an assistant message: a text, or a message whose tool calls are parsed already.

        Raises:
            EnvError: the environment's own code failed, or its reward is not a number.
            UsageError: the episode is over, or the action is neither text nor message.
        """
        if self._is_over:
            raise UsageError("the episode is over; call reset() first")
        if isinstance(action, str):
            schemas = [tool.schema() for tool in self.tools]
            message = parse_assistant(action, self.tool_dialect or DEFAULT_DIALECT, tools=schemas)
        elif isinstance(action, dict):
            message = action
        else:
            raise UsageError(f"an action is a text or a message, not {type(action).__name__}")
        self._messages.append(message)
        self._role_order.wrote(message)
        self.num_turns += 1
        self.tool_s = 0.0
        self._judging_boundary.num_errors = 0
        response = await self._guarded(lambda: self.respond(message))
        result = self._result_of(response, "respond")
        self._is_over = result.terminated or result.truncated
        return result

    @final
    async def aconclude(self) -> StepResult | None:
        """Call `conclude`, unless the episode is over already."""
        if self._is_over:
            return None
        self._is_over = True
        response = await self._guarded(self.conclude)
        return None if response is None else self._result_of(response, "conclude")

    def _result_of(self, response: Response | None, method: str) -> StepResult:
        source = f"{type(self).__name__}.{method}"
        result = step_result(response, source, self.task.id, self._judging_boundary.num_errors)
        is_truncated = not result.terminated and (
            result.truncated or self.num_turns >= self.max_turns
        )
        if is_truncated:
            result.info["truncated_by"] = "env" if result.truncated else "max_turns"
        self._messages += result.info["messages"]
        is_over = result.terminated or is_truncated or self._is_over
        self._role_order.go_on(result.info, source, is_over=is_over)
        return result._replace(truncated=is_truncated)

    async def _guarded(self, answer: Callable[[], Awaitable[Response | None]]) -> Response | None:
        """Await an answer; an exception ends the episode, as a failure or as a wrong answer."""
        try:
            return await answer()
        except BaseException as error:
            if self.judges_all_output and is_caused_by_output(error):
                self._judging_boundary.num_errors += 1
                return Response(is_terminated=True)
            self._is_over = True
            if isinstance(error, EpisodeError) or not isinstance(error, Exception | SystemExit):
                raise
            raise EnvError(f"{type(self).__name__}.respond failed: {error!r}") from error

    @final
    def close(self) -> None:
        """Release the episode's resources, synchronously; see `aclose`. Failures are EnvErrors."""
        if self.suspends:
            with env_errors(f"{type(self).__name__}.aclose"):
                run_on_kept_loop(self.aclose())

    def __repr__(self) -> str:
        task = "no task yet" if self._task is None else f"task {short(self._task.id)}"
        over = ", over" if self._is_over and self._task is not None else ""
        return f"<{type(self).__name__}: {task}, turn {self.num_turns} of {self.max_turns}{over}>"

    def _repr_html_(self) -> str:
        tools = short(", ".join(tool.name for tool in self.tools), 200)
        return block(repr(self)[1:-1], pairs({"tools": tools}), dialogue(self._messages))

    @final
    def render(self) -> str:
        """Return the dialogue so far as text."""
        return "\n".join(f"[{m['role']}] {readable(m['content'])}" for m in self._messages)
