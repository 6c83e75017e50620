"""`tir`: tool-integrated reasoning, mathematics with a Python interpreter at hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from areal_gym.chat.tool_call_formats import DEFAULT_DIALECT, require_dialect, write_call
from areal_gym.envs.arithmetic import Level, sample_expression, sample_question
from areal_gym.envs.base import Response, ToolResults
from areal_gym.envs.calculator import calculate
from areal_gym.envs.old_arguments import takes_old_question_files
from areal_gym.envs.questions import AnswerEnv, arithmetic_tasks
from areal_gym.envs.tools import chosen_tools, cut_text, one_argument_tool
from areal_gym.errors import SandboxError, ToolError
from areal_gym.plugins import registry
from areal_gym.sandbox.base import Sandbox, SandboxLimits, SandboxResult, SandboxStatus, Session
from areal_gym.tasks import GeneratedTasks
from areal_gym.types import Message

_MAX_CODE = 32_768

_LIMITS = SandboxLimits(cpu_s=2.0, memory_mb=256)
_REACHED = {
    SandboxStatus.TIMEOUT: "TimeoutError: the time limit was reached",
    SandboxStatus.MEMORY: "MemoryError: the memory limit was reached",
    SandboxStatus.OUTPUT: "OSError: the output limit was reached",
    SandboxStatus.KILLED: "SystemError: the interpreter was killed",
}


@cache
def tir_tasks(level: int) -> GeneratedTasks:
    """Return the tasks of a level, shared by all environments of the process."""

    def sample(rng: random.Random, settings: Level) -> tuple[str, str]:
        expression = sample_expression(rng, settings)
        return sample_question(rng, expression), expression

    return arithmetic_tasks("tir", level, sample)


def python_call(code: str, dialect: str = DEFAULT_DIALECT) -> str:
    """Return the text of an assistant that calls the tool `python`."""
    return write_call("python", {"code": code}, dialect)


@takes_old_question_files
class TirEnv(AnswerEnv):
    r"""Mathematics with a Python sandbox, or a calculator.

    Task: "What is 37*48+12?", in several phrasings; five levels, from two operands to six with
        parentheses and divisions. Or a question of a file or a data set, as in `math`.
    Tools: `python(code)` runs code in a sandbox and gives what it printed, else the value of the
        last expression, else the last line of the traceback. `calculator(expression)`, on request.
    Observation: the question, then the tool's output.
    Action: an assistant message. One with tool calls is answered by their results; one without
        is the final answer, in `\boxed{}`.
    Reward: 1 for the right answer in the assistant's own last text, else 0. Parts: `answer`, and
        `format` (an answer was given at all).
    Episode end: terminated by the final answer; truncated after `max_turns`.
    Splits: `train` and `test`, endless, disjoint by expression (however it is written or asked).
    Metrics: `tool_calls`, `tool_errors` (malformed and refused calls, failed runs), `tool_refused`
        (calls beyond `max_tool_calls` or the sixteen of a message), `python_calls` and
        `calculator_calls` where there are both.
    Data: generated, or as in `math`. History: v0.

    Args:
        level: 1 to 5; 2 has two or three operands of up to two digits, with + - and *.
        tools: which of "python" and "calculator" there are, in this order.
        stateful: keep one interpreter for the whole episode, so that names defined by one call
            are there in the next; otherwise every call gets a fresh one.
        max_turns: assistant messages after which the episode is truncated.
        max_tool_calls: calls of an episode that are run.
        max_output: characters of a tool's output that the policy gets to read.
        tool_dialect: how calls are written (`chat.tool_call_formats`), such as "hermes" or "fenced"
            (blocks of ```python); by default as the model's own chat template writes them.
        sandbox: where the code runs: the id of a sandbox, which episodes of one event loop share,
            or an object.
        tasks: your own questions instead of generated ones, as in `math`.
    """

    suspends = True
    judges_all_output = True

    def __init__(
        self,
        *,
        level: int = 2,
        tools: Sequence[str] = ("python",),
        stateful: bool = False,
        max_turns: int = 3,
        max_tool_calls: int | None = None,
        max_output: int = 2_000,
        tool_dialect: str | None = None,
        sandbox: Sandbox | str = "process",
        tasks: Any = None,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(
            tir_tasks,
            level,
            tasks,
            render_mode,
        )
        self.max_turns = max_turns
        self.max_tool_calls = max_tool_calls
        self.tool_dialect = tool_dialect and require_dialect(tool_dialect)
        self._max_output = max_output
        self._is_stateful = stateful
        # An id is checked at once, although the sandbox is made with the first call.
        self._sandbox = (
            registry().get("sandboxes", sandbox).id if isinstance(sandbox, str) else sandbox
        )
        self._session: Session | None = None
        self._num_failed_runs = 0
        code = {"type": "string", "description": "Python code; print the result"}
        expression = {"type": "string", "description": "such as (3 + 4) * 2 or sqrt(2)"}
        self.tools = chosen_tools(
            tools,
            one_argument_tool(
                "python",
                "Run Python code and return what it prints.",
                {"code": code},
                self._run_python,
            ),
            one_argument_tool(
                "calculator",
                "Compute an arithmetic expression.",
                {"expression": expression},
                self._calculate,
            ),
        )

    @property
    def sandboxes(self) -> Sequence[Any]:
        """The sandbox of the tool `python`; none without the tool."""
        return (self._sandbox,) if any(tool.name == "python" for tool in self.tools) else ()

    async def respond(self, message: Message) -> Response:
        """Run the calls, or grade the answer."""
        if message.get("tool_calls") or message.get("parse_error"):
            self._num_failed_runs = 0
            results = await self.call_tools(message)
            if self.num_turns >= self.max_turns:
                await self.aclose()
            return Response(messages=results.messages, metrics=self._metrics(message, results))
        await self.aclose()
        return replace(await self.grade(message), metrics={"tool_calls": 0, "tool_errors": 0})

    async def aclose(self) -> None:
        """End the episode's interpreter, if it has one."""
        session, self._session = self._session, None
        if session is not None:
            await session.aclose()

    def gold_action(self) -> str:
        """Call the first tool, then repeat its output; answer questions of files at once."""
        last = self.messages[-1]
        if last["role"] == "tool":
            return f"\\boxed{{{last['content']}}}"
        expression = self.task.data.get("expression")
        if expression is None:
            return super().gold_action()
        dialect = self.tool_dialect or DEFAULT_DIALECT
        if self.tools[0].name == "calculator":
            return write_call("calculator", {"expression": expression}, dialect)
        return python_call(f"print({expression})", dialect)

    def _metrics(self, message: Message, results: ToolResults) -> dict[str, float]:
        metrics: dict[str, float] = {
            "tool_calls": results.num_calls,
            "tool_errors": results.num_errors + self._num_failed_runs,
        }
        if self.max_tool_calls is not None:
            metrics["tool_refused"] = results.num_refused
        if len(self.tools) > 1:
            called = [call["function"]["name"] for call in message.get("tool_calls", ())]
            metrics |= {f"{tool.name}_calls": called.count(tool.name) for tool in self.tools}
        return metrics

    def _calculate(self, expression: str) -> str:
        return cut_text(calculate(expression), self._max_output)

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
        return cut_text(_observed(result), self._max_output)

    async def _interpreter(self) -> Sandbox | Session:
        from areal_gym.sandbox import shared_sandbox

        sandbox = self._sandbox
        if isinstance(sandbox, str):
            sandbox = shared_sandbox(sandbox)
        if not self._is_stateful:
            return sandbox
        if self._session is None:
            self._session = await sandbox.session()
        return self._session


def _observed(result: SandboxResult) -> str:
    if result.is_ok:
        return result.stdout.strip() or result.value or ""
    if result.status is SandboxStatus.ERROR:
        lines = result.stderr.strip().splitlines()
        return lines[-1].strip() if lines else "error"
    return _REACHED[result.status]
