"""Hidden tests that are calls: the sandbox's program, and the comparison of its results.

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
from typing import Any

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


def as_call(entry_point: str, test: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a test of arguments and result (`{"args": [...], "result": ...}`) to a call."""
    arguments = ", ".join(map(repr, test["args"]))
    return {"call": f"{entry_point}({arguments})", "result": test["result"]}


def count_passed(
    result: SandboxResult, tests: Sequence[Mapping[str, Any]], boundary: JudgingBoundary
) -> int:
    """Return how many tests pass. Code that breaks a limit, or does not run, passes none.

    Args:
        result: of `program`: whatever the policy's code wants to be read.
        tests: the same.
        boundary: counts the comparisons that what came back made fail.
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
