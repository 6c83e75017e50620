"""The `calculate` tool of retail and airline: plain arithmetic within bounds."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

_ALLOWED = frozenset("0123456789+-*/(). ")
_MAX_LENGTH = 4_000
_MAX_BITS = 100_000
"""Limit of intermediate integers: the benchmark's own tool lets `9**9**9` hang the process."""

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def calculate(expression: str) -> str:
    """Return the value, rounded to two digits; Python's messages on wrong expressions are part of
    the task.

    Raises:
        ValueError: other characters than digits and `+-*/(). `, or too large.
        SyntaxError: no arithmetic.
        ArithmeticError: division by zero, overflow.
        TypeError: a complex value, or `()` and `2(3)`, which are Python, but no numbers.
    """
    if not all(char in _ALLOWED for char in expression):
        raise ValueError("Invalid characters in expression")
    if len(expression) > _MAX_LENGTH:
        raise ValueError(f"the expression is longer than {_MAX_LENGTH} characters")
    try:
        # As `eval` does, which the benchmark's messages come from.
        value = _evaluate(ast.parse(expression.lstrip(" "), "<string>", mode="eval").body)
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"invalid expression: {error}") from None
    return str(round(float(value), 2))


def _evaluate(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Tuple(elts=[]):
            return ()
        case ast.Call(func=func, args=arguments, keywords=[]):
            return _evaluate(func)(*map(_evaluate, arguments))  # a TypeError: nothing is callable
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return +_evaluate(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(_power(_evaluate(left), _evaluate(right)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_evaluate(left), _evaluate(right)))
    raise ValueError("invalid expression")


def _power(base: Any, exponent: Any) -> Any:
    is_exact = isinstance(base, int) and isinstance(exponent, int)
    if is_exact and base.bit_length() * abs(exponent) > _MAX_BITS:
        raise ValueError("the result is too large")
    return base**exponent


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError("the result is too large")
    return value
