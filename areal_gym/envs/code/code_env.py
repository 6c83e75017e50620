"""The environment `code`, and its hidden tests that are calls.

Of a call, only the arguments enter the sandbox; what comes back is compared outside, so that code
which looks around finds nothing to return. Tests that are statements (of MBPP or HumanEval) run in
another cell than the code that they test: see `verification`.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from areal_gym.envs.base import Response
from areal_gym.envs.code.code_tasks import CODE_LEVELS, as_call, code_draft, code_tasks
from areal_gym.envs.code.statements import order_of
from areal_gym.envs.code.verification import PASSED, UNVERIFIABLE, verify
from areal_gym.envs.judging import JudgingBoundary
from areal_gym.envs.old_arguments import takes_old_files
from areal_gym.envs.questions import QuestionEnv
from areal_gym.errors import SandboxError, UsageError
from areal_gym.plugins import registry
from areal_gym.sandbox.base import Sandbox, SandboxLimits, SandboxResult, SandboxStatus
from areal_gym.tasks.given_tasks import open_tasks
from areal_gym.types import Message, text_of, thaw

_MAX_CODE = 32_768
_LIMITS = SandboxLimits(wall_s=20.0, cpu_s=2.0, memory_mb=256)
_STATEMENT_LIMITS = SandboxLimits(wall_s=20.0, cpu_s=2.0, memory_mb=256)
"""Limits for the code under test, over all calls of the statements, which wait for one another."""
_MAX_TESTS = 20
"""Tests per run: a sandbox returns at most 8,000 characters of a value."""

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
_MAX_RESULT = 300

_HARNESS = """
import json as _json

def _tried(_test):
    _space = dict(globals())
    try:
        return repr(eval(_test, _space))[:{max_result}]
    except BaseException as _error:
        return "!" + type(_error).__name__

[_tried(_test) for _test in _json.loads({tests!r})]
"""


@takes_old_files(code_draft, "skip_broken")
class CodeEnv(QuestionEnv):
    r"""Write a function; hidden tests call it in a sandbox.

    Task: "Write a Python function solve that takes ...", generated in three levels; or rows of a
        file: of MBPP (`text`, `test_list`), of HumanEval (`prompt`, `entry_point`, `test`), or with
        `question`, `entry_point` and `tests`, [{"args": [...], "result": ...}].
    Tools: none.
    Observation: the question; with several turns, then how many tests passed.
    Action: an assistant message with the function in a block of ```python (the last one counts).
    Reward: the share of the hidden tests that pass; or 1 for all and 0 otherwise. Parts: `tests`
        (the share), `format` (there was code).
    Episode end: terminated by the first message, or when all tests pass; truncated after
        `max_turns`.
    Splits: `train` and `test`, disjoint by what is asked.
    Metrics: `tests`, `tests_passed`; `tests_unverifiable`, where a test compares objects whose
        class is the policy's own, or leaves the verdict to another function of its.
    Data: generated; or yours. History: v0.

    Args:
        level: 1 (two steps on a number) to 3 (filter, map and reduce a list).
        tasks: tasks of your own instead of generated ones: a file, a data set of the hub, a list,
            settings such as {"data": FILE, "test": FILE, "skip_broken": true}, or a task source.
        all_or_nothing: reward 1 when all tests pass, else 0.
        statements_s: seconds for all tests of a task that are statements, of which a tenth may be
            processor time; thousands of calls, as in EvalPlus, need minutes on a busy machine.
        max_turns: how many versions may be handed in.
        sandbox: where the code runs: the id of a sandbox, or an object.

    Raises:
        DataError: a file is missing or has a broken row.
    """

    suspends = True
    judges_all_output = True
    all_levels = CODE_LEVELS
    system_prompt = "Write Python. Put the function in one ```python block."

    def __init__(
        self,
        *,
        level: int = 1,
        tasks: Any = None,
        all_or_nothing: bool = False,
        statements_s: float = 20.0,
        max_turns: int = 1,
        sandbox: Sandbox | str = "process",
        render_mode: str | None = None,
    ) -> None:
        super().__init__(
            code_tasks(level) if tasks is None else open_tasks(tasks, code_draft),
            levels=code_tasks if tasks is None else None,
            render_mode=render_mode,
        )
        if max_turns < 1 or not statements_s > 0:
            raise UsageError(
                f"max_turns = {max_turns!r}, statements_s = {statements_s!r}: at least one turn, "
                "and more than 0 seconds"
            )
        self.max_turns = max_turns
        self._all_or_nothing = all_or_nothing
        self._statement_limits = replace(
            _STATEMENT_LIMITS, wall_s=statements_s, cpu_s=statements_s / 10
        )
        self._sandbox = (
            registry().get("sandboxes", sandbox).id if isinstance(sandbox, str) else sandbox
        )

    @property
    def sandboxes(self) -> Sequence[Any]:
        """The sandbox that runs the functions."""
        return (self._sandbox,)

    async def respond(self, message: Message) -> Response:
        """Run the hidden tests."""
        code = find_code(text_of(message["content"]))
        tests = self._tests()
        num_passed, num_unverifiable = (0, 0)
        if code is not None:
            num_passed, num_unverifiable = await run_tests(
                code,
                self.task.data,
                tests,
                self._sandbox,
                self.judging(),
                statement_limits=self._statement_limits,
            )
        share = num_passed / len(tests)
        is_solved = num_passed == len(tests)
        if not is_solved and self.num_turns < self.max_turns:
            text = (
                f"{num_passed} of {len(tests)} tests pass. Correct the function."
                if code is not None
                else "There is no code in this. Put the function in one ```python block."
            )
            return Response(messages=[{"role": "user", "content": text}])
        metrics = {"tests": len(tests), "tests_passed": num_passed}
        if num_unverifiable:
            metrics["tests_unverifiable"] = num_unverifiable
        return Response(
            reward=float(is_solved) if self._all_or_nothing else share,
            reward_parts={"tests": share, "format": float(code is not None)},
            is_terminated=is_solved or self.max_turns == 1,
            metrics=metrics,
        )

    def gold_action(self) -> str:
        """Return the solution in a block."""
        solution = self.task.data.get("solution")
        return self.noop_action() if solution is None else f"```python\n{solution}\n```"

    def _tests(self) -> Sequence[Mapping[str, Any]]:
        data = self.task.data
        if "checks" in data:
            return cast(Sequence[Mapping[str, Any]], data["checks"])
        return [as_call(data["entry_point"], {**t, "args": thaw(t["args"])}) for t in data["tests"]]


async def run_tests(
    code: str,
    data: Mapping[str, Any],
    tests: Sequence[Mapping[str, Any]],
    sandbox: Sandbox | str,
    boundary: JudgingBoundary,
    *,
    statement_limits: SandboxLimits = _STATEMENT_LIMITS,
) -> tuple[int, int]:
    """Return how many tests pass, and how many only the policy's own code could decide.

    `data` is the task's; `boundary` counts comparisons that the code made fail.
    """
    if len(code) > _MAX_CODE or any("\ud800" <= character <= "\udfff" for character in code):
        return 0, 0
    from areal_gym.sandbox import shared_sandbox

    prompt = data.get("prompt", "")
    # The signature that was given counts as imported: HumanEval's begins with imports.
    imports = "\n".join(
        line for line in prompt.splitlines() if line.startswith(("from ", "import "))
    )
    is_process = sandbox == "process"
    if isinstance(sandbox, str):
        sandbox = shared_sandbox(sandbox)
    calls = [test for test in tests if "call" in test]
    num_passed = 0
    for first in range(0, len(calls), _MAX_TESTS):
        some = calls[first : first + _MAX_TESTS]
        result = await sandbox.run(program(f"{imports}\n{code}", some), limits=_LIMITS)
        if result.status is SandboxStatus.UNAVAILABLE:
            raise SandboxError(result.stderr or "the sandbox is unavailable")
        num_passed += count_passed(result, some, boundary)
    entry = data.get("entry_point", "")
    orders = [order_of(test["check"], prompt, entry) for test in tests if "check" in test]
    if not orders:
        return num_passed, 0
    # The tests' cell holds no code of the policy: it also runs where nothing can be walled in.
    tests_sandbox = shared_sandbox("process", **({} if is_process else {"min_level": "none"}))
    ends = await verify(sandbox, tests_sandbox, code, imports, orders, statement_limits)
    return num_passed + ends.count(PASSED), ends.count(UNVERIFIABLE)


# ---- tests that are calls ------------------------------------------------------------------------


def find_code(text: str) -> str | None:
    """Return the last fenced block of a text, or all of it if it is Python; else None."""
    blocks: list[str] = _FENCE.findall(text)
    if blocks:
        return blocks[-1]
    return text if re.search(r"^\s*(?:def|class|import|from)\s", text, re.MULTILINE) else None


def program(code: str, tests: Sequence[Mapping[str, Any]]) -> str:
    """Return the sandbox's program: the code, then the calls; its value is the list of results."""
    calls = json.dumps([test["call"] for test in tests])
    return f"{code}\n{_HARNESS.format(tests=calls, max_result=_MAX_RESULT)}"


def count_passed(
    result: SandboxResult, tests: Sequence[Mapping[str, Any]], boundary: JudgingBoundary
) -> int:
    """Return how many tests pass. Code that breaks a limit, or does not run, passes none.

    The result is whatever the policy's code wants to be read: `boundary` counts the comparisons
    that it made fail.
    """
    texts: object = None
    if result.is_ok and result.value is not None:
        with boundary:
            texts = ast.literal_eval(result.value)
    if not isinstance(texts, list) or len(texts) != len(tests):
        return 0
    num_passed = 0
    for text, test in zip(texts, tests, strict=True):
        with boundary:
            num_passed += _passes(text, test)
    return num_passed


def _passes(text: object, test: Mapping[str, Any]) -> bool:
    if not isinstance(text, str):
        return False
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False  # the exception's name, or an object: nothing odd
    return _is_same(value, test["result"])


def _is_same(value: Any, wanted: Any) -> bool:
    """Return whether the values are equal: lists and tuples alike, floats up to rounding."""
    if isinstance(wanted, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(wanted)
            and all(map(_is_same, value, wanted))
        )
    if isinstance(wanted, float) and isinstance(value, int | float):
        if isinstance(value, int) and value.bit_length() > 1_000:
            return False  # no float is as large
        return math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-9)
    return type(value) is type(wanted) and bool(value == wanted)
