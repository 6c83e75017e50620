"""`tir`: tool-integrated reasoning, arithmetic with a Python interpreter at hand."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from areal_gym.envs.arithmetic import (
    LEVELS,
    canonical,
    evaluate,
    level_named,
    sample_expression,
    sample_question,
)
from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.grading import extract_answer, is_same_number
from areal_gym.envs.tasks import Draft, GeneratedTasks, choose_task
from areal_gym.envs.tools import Tool
from areal_gym.errors import SandboxError, ToolError
from areal_gym.plugins import registry
from areal_gym.sandbox.base import Sandbox, SandboxLimits, SandboxResult, SandboxStatus, Session
from areal_gym.types import Message, Task

__all__ = ["SYSTEM_PROMPT", "TirEnv", "python_call", "tir_tasks"]

SYSTEM_PROMPT = r"Solve the problem. Put the final answer in \boxed{}."

_PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "Python code; print the result"}},
    "required": ["code"],
}
_MAX_CODE = 32_768
_MAX_OUTPUT = 2_000
"""Characters of a tool's output that the policy gets to read."""

_LIMITS = SandboxLimits(cpu_s=2.0, memory_mb=256)
_REACHED = {
    SandboxStatus.TIMEOUT: "TimeoutError: the time limit was reached",
    SandboxStatus.MEMORY: "MemoryError: the memory limit was reached",
    SandboxStatus.OUTPUT: "OSError: the output limit was reached",
    SandboxStatus.KILLED: "SystemError: the interpreter was killed",
}


@cache
def tir_tasks(level: int) -> GeneratedTasks:
    """The tasks of a level, shared by all environments of the process.

    `task.data` holds `question`, `expression` and `answer`, all text.
    """
    settings = level_named(level)

    def make_draft(rng: random.Random) -> Draft:
        expression = sample_expression(rng, settings)
        return Draft(
            key=canonical(expression),
            data={
                "question": sample_question(rng, expression),
                "expression": expression,
                "answer": str(evaluate(expression)),
            },
        )

    return GeneratedTasks(f"tir, level {level}", make_draft)


def python_call(code: str) -> str:
    """The text of an assistant that calls the tool `python`."""
    call = json.dumps({"name": "python", "arguments": {"code": code}}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


class TirEnv(TextEnv):
    r"""Arithmetic with a Python sandbox.

    Task: "What is 37*48+12?", in several phrasings; five levels, from two operands to six with
        parentheses and divisions.
    Tools: `python(code)` runs code in a sandbox and gives what it printed, else the value of the
        last expression, else the last line of the traceback.
    Observation: the question, then the tool's output.
    Action: an assistant message. One with tool calls is answered by their results; one without
        is the final answer, in `\boxed{}`.
    Reward: 1 for the right answer in the assistant's own last text, else 0. Parts: `answer`, and
        `format` (an answer was given at all).
    Episode end: terminated by the final answer; truncated after `max_turns`.
    Splits: `train` and `test`, endless, disjoint by expression (however it is written or asked).
    Metrics: `tool_calls`, `tool_errors`.
    Data: generated. History: v0.

    Args:
        level: 1 to 5; 2 has two or three operands of up to two digits, with + - and *.
        stateful: keep one interpreter for the whole episode, so that names defined by one call
            are there in the next; otherwise every call gets a fresh one.
        max_turns: assistant messages after which the episode is truncated.
        sandbox: where the code runs: the id of a sandbox, which episodes of one event loop share,
            or an object.
    """

    suspends = True
    difficulties = tuple(LEVELS)
    """Levels that `reset(options={"difficulty": level})` draws from, for curricula."""

    def __init__(
        self,
        *,
        level: int = 2,
        stateful: bool = False,
        max_turns: int = 3,
        sandbox: Sandbox | str = "process",
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self.max_turns = max_turns
        self._tasks = tir_tasks(level)
        self._is_stateful = stateful
        self._sandbox = _require_known(sandbox) if isinstance(sandbox, str) else sandbox
        self._session: Session | None = None
        self._num_failed_runs = 0
        self.tools = (
            Tool(
                name="python",
                description="Run Python code and return what it prints.",
                parameters=_PARAMETERS,
                function=self._run_python,
            ),
        )

    def num_tasks(self, split: str) -> int | None:
        """Endless."""
        return self._tasks.num_tasks(split)

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """A drawn task, or the one that `options` names; of another level if they say so."""
        difficulty = options.get("difficulty")
        tasks = self._tasks if difficulty is None else tir_tasks(difficulty)
        return choose_task(tasks, rng, options)

    def first_messages(self, task: Task) -> Sequence[Message]:
        """The instruction and the question."""
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": task.data["question"]},
        ]

    async def respond(self, message: Message) -> Response:
        """Run the calls, or grade the answer."""
        if message.get("tool_calls") or message.get("parse_error"):
            self._num_failed_runs = 0
            results = await self.call_tools(message)
            num_errors = results.num_errors + self._num_failed_runs
            if self.num_turns >= self.max_turns:
                await self.aclose()
            return Response(
                messages=results.messages,
                metrics={"tool_calls": results.num_calls, "tool_errors": num_errors},
            )
        await self.aclose()
        answer = extract_answer(message["content"])
        is_right = answer is not None and is_same_number(answer, self.task.data["answer"])
        return Response(
            reward=float(is_right),
            reward_parts={"answer": float(is_right), "format": float(answer is not None)},
            is_terminated=True,
            metrics={"tool_calls": 0, "tool_errors": 0},
        )

    async def aclose(self) -> None:
        """End the episode's interpreter, if it has one."""
        session, self._session = self._session, None
        if session is not None:
            await session.aclose()

    def gold_action(self) -> str:
        """Call the tool, then repeat what it printed."""
        last = self.messages[-1]
        if last["role"] == "tool":
            return f"\\boxed{{{last['content']}}}"
        return python_call(f"print({self.task.data['expression']})")

    async def _run_python(self, code: str) -> str:
        if len(code) > _MAX_CODE:
            raise ToolError(f"the code has {len(code)} characters; at most {_MAX_CODE} are run")
        try:
            code.encode()
        except UnicodeEncodeError:
            raise ToolError("the code holds half of a surrogate pair, which is no text") from None
        result = await (await self._interpreter()).run(code, limits=_LIMITS)
        if result.status is SandboxStatus.UNAVAILABLE:
            raise SandboxError(result.stderr or "the sandbox is unavailable")
        if not result.is_ok:
            self._num_failed_runs += 1
        return _observed(result)

    async def _interpreter(self) -> Sandbox | Session:
        sandbox = self._sandbox
        if isinstance(sandbox, str):
            from areal_gym.sandbox import shared_sandbox

            sandbox = shared_sandbox(sandbox)
        if not self._is_stateful:
            return sandbox
        if self._session is None:
            self._session = await sandbox.session()
        return self._session


@cache
def _require_known(sandbox_id: str) -> str:
    # Found before anything has been waited for, though the sandbox is made with the first call.
    return registry().get("sandboxes", sandbox_id).id


def _observed(result: SandboxResult) -> str:
    """What the policy reads of a run."""
    if result.is_ok:
        text = result.stdout.strip() or result.value or ""
    elif result.status is SandboxStatus.ERROR:
        lines = result.stderr.strip().splitlines()
        text = lines[-1].strip() if lines else "error"
    else:
        text = _REACHED[result.status]
    if len(text) > _MAX_OUTPUT:
        return f"{text[:_MAX_OUTPUT]}... ({len(text) - _MAX_OUTPUT} more characters)"
    return text
