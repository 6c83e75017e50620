"""Hidden tests: what enters the sandbox, and what is made of what comes back.

A test with arguments and a result is a call. Only the arguments enter the sandbox; what comes back
is compared outside, so that code which looks around finds nothing to return. A test that is a
statement (of MBPP or HumanEval) runs inside, after the code it tests, and could be deceived by code
that means to.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from areal_gym.sandbox.base import SandboxLimits, SandboxResult

__all__ = ["LIMITS", "MAX_TESTS", "Outcome", "as_call", "find_code", "judge", "program"]

LIMITS = SandboxLimits(cpu_s=2.0, memory_mb=256)
MAX_TESTS = 20
"""Tests of one run: a sandbox gives 8,000 characters of a value back."""

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
_MAX_RESULT = 300
"""Characters of a result that come back."""

_HARNESS = """
import json as _json

def _tried(_test):
    _space = dict(globals())
    try:
        if "call" in _test:
            return repr(eval(_test["call"], _space))[:{max_result}]
        exec(_test["check"], _space)
        return {passed!r}
    except BaseException as _error:
        return "!" + type(_error).__name__

[_tried(_test) for _test in _json.loads({tests!r})]
"""


class Outcome(NamedTuple):
    """How the hidden tests went."""

    num_tests: int
    num_passed: int


def find_code(text: str) -> str | None:
    """The last fenced block of a text, or all of it when it is Python; None when there is none."""
    blocks = _FENCE.findall(text)
    code = blocks[-1] if blocks else text
    if not blocks and not re.search(r"^\s*(?:def|class|import|from)\s", text, re.MULTILINE):
        return None
    return str(code)


def program(code: str, tests: Sequence[Mapping[str, Any]], passed: str) -> str:
    """What runs in the sandbox: the code, then the tests; its value is the list of results.

    Args:
        code: the policy's.
        tests: see `as_call`; with a `call`, or a statement `check`.
        passed: what a check that raised nothing comes back as; nobody can guess it.
    """
    shown = [{k: t[k] for k in ("call", "check") if k in t} for t in tests]
    harness = _HARNESS.format(tests=json.dumps(shown), passed=passed, max_result=_MAX_RESULT)
    return f"{code}\n{harness}"


def as_call(entry_point: str, test: Mapping[str, Any]) -> Mapping[str, Any]:
    """A test of arguments and result (`{"args": [...], "result": ...}`) as a call."""
    arguments = ", ".join(map(repr, test["args"]))
    return {"call": f"{entry_point}({arguments})", "result": test["result"]}


def judge(result: SandboxResult, tests: Sequence[Mapping[str, Any]], passed: str) -> Outcome:
    """Compare what came back. Code that breaks a limit, or does not run, passes nothing."""
    if not result.is_ok or result.value is None:
        return Outcome(len(tests), 0)
    try:
        found = ast.literal_eval(result.value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        found = None
    if not isinstance(found, list) or len(found) != len(tests):
        return Outcome(len(tests), 0)
    num_passed = sum(_passes(text, test, passed) for text, test in zip(found, tests, strict=True))
    return Outcome(len(tests), num_passed)


def _passes(text: object, test: Mapping[str, Any], passed: str) -> bool:
    if not isinstance(text, str):
        return False
    if "check" in test:
        return text == passed
    try:
        return _is_same(ast.literal_eval(text), test["result"])
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _is_same(value: Any, wanted: Any) -> bool:
    """Equal, a list as good as a tuple (JSON has none), floats up to rounding."""
    if isinstance(wanted, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(wanted)
            and all(map(_is_same, value, wanted))
        )
    if isinstance(wanted, float) and isinstance(value, int | float):
        return math.isclose(value, wanted, rel_tol=1e-6, abs_tol=1e-9)
    return type(value) is type(wanted) and bool(value == wanted)
