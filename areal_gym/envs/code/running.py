"""Runs hidden tests: makes the sandbox's program and compares its results.

A test with arguments and a result is a call. Only the arguments enter the sandbox; what comes back
is compared outside, so that code which looks around finds nothing to return. A test that is a
statement (of MBPP or HumanEval) runs in another cell than the code it tests: see `verification`.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from areal_gym.envs.judging import JudgingBoundary
from areal_gym.sandbox.base import SandboxLimits, SandboxResult

LIMITS = SandboxLimits(cpu_s=2.0, memory_mb=256)
STATEMENT_LIMITS = SandboxLimits(wall_s=20.0, cpu_s=2.0, memory_mb=256)
"""Limits for the code under test, over all calls of the statements, which wait for one another."""
MAX_TESTS = 20
"""Tests per run: a sandbox returns at most 8,000 characters of a value."""

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL)
_MAX_RESULT = 300
"""Limit for the characters of a returned result."""

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


class Outcome(NamedTuple):
    """The result of the hidden tests."""

    num_tests: int
    num_passed: int
    num_unverifiable: int = 0
    """Tests that did not pass because only the policy's own code could decide them."""


def find_code(text: str) -> str | None:
    """Return the last fenced block of a text, or all of it when it is Python; None when there is
    none."""
    blocks = _FENCE.findall(text)
    code = blocks[-1] if blocks else text
    if not blocks and not re.search(r"^\s*(?:def|class|import|from)\s", text, re.MULTILINE):
        return None
    return str(code)


def program(code: str, tests: Sequence[Mapping[str, Any]]) -> str:
    """Return the sandbox's program: the code, then the calls; its value is the list of results.

    Args:
        code: the policy's.
        tests: see `as_call`.
    """
    calls = json.dumps([test["call"] for test in tests])
    return f"{code}\n{_HARNESS.format(tests=calls, max_result=_MAX_RESULT)}"


def as_call(entry_point: str, test: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a test of arguments and result (`{"args": [...], "result": ...}`) to a call."""
    arguments = ", ".join(map(repr, test["args"]))
    return {"call": f"{entry_point}({arguments})", "result": test["result"]}


def judge(
    result: SandboxResult, tests: Sequence[Mapping[str, Any]], boundary: JudgingBoundary
) -> Outcome:
    """Compare what came back. Code that breaks a limit, or does not run, passes nothing.

    Args:
        result: of `program`: whatever the policy's code wants to be read.
        tests: the same.
        boundary: counts the comparisons that what came back made fail.
    """
    if not result.is_ok or result.value is None:
        return Outcome(len(tests), 0)
    texts: object = None
    with boundary:
        texts = ast.literal_eval(result.value)
    if not isinstance(texts, list) or len(texts) != len(tests):
        return Outcome(len(tests), 0)
    num_passed = 0
    for text, test in zip(texts, tests, strict=True):
        with boundary:
            num_passed += _passes(text, test)
    return Outcome(len(tests), num_passed)


def _passes(text: object, test: Mapping[str, Any]) -> bool:
    if not isinstance(text, str):
        return False
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False  # the exception's name, or an object: nothing odd
    return _is_same(value, test["result"])


def _is_same(value: Any, wanted: Any) -> bool:
    """Return whether the values are equal: a list equals a tuple (JSON has none), floats up to
    rounding."""
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
