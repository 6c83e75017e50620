from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_gym.envs.calculator import calculate
from areal_gym.errors import ToolError


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("37*48+12", "1788"),
        ("2 * (3 + 4)^2", "98"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("-2**2", "-4"),
        ("7 // 2 + 7 % 2", "4"),
        ("sqrt(2)", "1.4142135623730951"),
        ("max(1, 2, 3) + abs(-4)", "7"),
        ("2 * pi", "6.283185307179586"),
        ("round(3.14159, 2)", "3.14"),
        ("2**100", str(2**100)),
        ("3 × 4 ÷ 2", "6"),
    ],
)
def test_calculator_computes_arithmetic(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("1/0", "division by zero"),
        ("9**9**9", "too large"),
        ("10**(-10**9)", "too large"),
        ("9.9**9999", "math range error|Overflow"),
        ("sqrt(-1)", "math domain error|nonnegative"),
        ("__import__('os')", "is not known"),
        ("(1).real", "is not known"),
        ("x + 1", "is not known"),
        ("True + 1", "is not known"),
        ("'a' * 9", "is not known"),
        ("1 +", "no arithmetic"),
        ("", "no arithmetic"),
        ("1" * 600, "characters"),
        ("sqrt()", "argument"),
        ("1e400 - 1e400", "no finite number"),
        ("(" * 400, "no arithmetic|nested|parentheses"),
        ("a\0b", "null|no arithmetic"),
    ],
)
def test_calculator_errors_are_explained(expression, problem):
    with pytest.raises(ToolError, match=problem):
        calculate(expression)


@settings(deadline=1000)
@given(st.text(alphabet="0123456789+-*/()^.%, episqrtlogmax", max_size=60))
def test_calculator_returns_or_raises_tool_error(expression):
    with contextlib.suppress(ToolError):
        assert calculate(expression)
