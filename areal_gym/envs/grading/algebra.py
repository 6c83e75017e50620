"""Compares formulas with sympy; only for a process that may be killed (see `equality`)."""

from __future__ import annotations

import itertools
import logging
import re
import warnings
from collections.abc import Iterator
from typing import Any

_DIGITS = 30
_TOLERANCE = 1e-12
_NUM_POINTS = 4
_NAMED = re.compile(
    r"(?<![\\a-zA-Z])(sqrt|sinh?|cosh?|tanh?|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp|pi|theta)"
    r"(?![a-zA-Z])"
)
_CALLED_ROOT = re.compile(r"\\sqrt\s*\(((?:[^()]|\([^()]*\))*)\)")
_LONG_EXPONENT = re.compile(r"\^\s*(-?\d{2,}|-\d|\((?:[^()]|\([^()]*\))*\))")
_DECIMAL = re.compile(r"-?\d*\.(\d{4,})")


def are_same_expressions(a: str, b: str) -> bool:
    """Return whether two formulas (LaTeX, or plain: `2*sqrt(3)`) are equal; this may run long."""
    import sympy.core.random

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    sympy.core.random.seed(0)  # it infers in a shuffled order, and a verdict is not left to chance
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            x, y = _parse(a, "\\pi" in b), _parse(b, "\\pi" in a)
            return _are_same(x, y, _allowance(a, b))
        except Exception:  # whatever a parser trips over, the answer is not shown to be right
            return False


def _parse(text: str, next_to_pi: bool) -> Any:
    """Return the formula; degrees are read as such with an angle's function, or next to radians."""
    import sympy
    from latex2sympy2_extended import latex2sympy

    text = text.replace("**", "^")
    text = _NAMED.sub(r"\\\1 ", text)
    text = _CALLED_ROOT.sub(r"\\sqrt{\1}", text)
    text = _LONG_EXPONENT.sub(lambda m: "^{" + _unwrapped(m[1]) + "}", text)
    plain = re.sub(r"[_^](?:\w|\{[^{}]*\})|\s*[-+]\s+", "+", text)
    if re.search(r"\d\s+[-\d]", plain):
        raise ValueError("two numbers side by side")
    has_angles = re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])", text) is not None
    has_angles |= next_to_pi and "\\pi" not in text
    if not has_angles:
        text = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)", "", text)
    formula = latex2sympy(text, convert_degrees=has_angles)
    if isinstance(formula, sympy.Basic):
        if formula.atoms(sympy.Sum, sympy.Integral, sympy.Product):
            formula = formula.doit()
        symbols = formula.free_symbols
        formula = formula.xreplace({s: sympy.I for s in symbols if s.name in ("i", "I")})
    return formula


def _unwrapped(text: str) -> str:
    return text[1:-1] if text.startswith("(") else text


def _allowance(a: str, b: str) -> float:
    """Return the allowed difference, which depends on the places of a single long decimal."""
    decimals = [decimal for text in (a, b) if (decimal := _DECIMAL.fullmatch(text))]
    return float(10.0 ** -len(decimals[0][1])) if len(decimals) == 1 else _TOLERANCE


def _are_same(a: Any, b: Any, allowance: float) -> bool:
    import math_verify
    import sympy

    if any(isinstance(side, sympy.Basic) and side.has(sympy.zoo, sympy.nan) for side in (a, b)):
        return False  # 1/0 is not 2/0
    if a == b:
        return True
    are_equations = [isinstance(side, sympy.Equality) for side in (a, b)]
    if any(are_equations):
        return all(are_equations) and _are_same_equations(a, b)
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        # Of 84 - 8*oo*4 as it stands, sympy may infer that it is zero.
        if any(side.has(sympy.oo, -sympy.oo) for side in (a, b)):
            a, b = a.doit(), b.doit()
            return bool(a == b) and not a.has(sympy.zoo, sympy.nan)
        verdict = _agree_at_points(a, b, allowance)
        if verdict is not None:
            return verdict
    return bool(math_verify.verify(b, a, timeout_seconds=None))


def _agree_at_points(a: Any, b: Any, allowance: float) -> bool | None:
    """Return whether both have equal values at sample points; None if no value can be computed."""
    import sympy

    symbols = a.free_symbols | b.free_symbols
    is_signed = a.has(sympy.Abs) or b.has(sympy.Abs)
    verdict = None
    for values in _sample_points(symbols, is_signed=is_signed):
        x, y = (_number(side.xreplace(values)) for side in (a, b))
        if x is None or y is None:
            continue
        if abs(x - y) > max(allowance, _TOLERANCE * max(abs(x), abs(y))):
            return False
        verdict = True
    return verdict


def _sample_points(symbols: set[Any], *, is_signed: bool = False) -> Iterator[dict[Any, Any]]:
    """Yield values of the symbols: of no pattern, so that nothing cancels by chance, and positive.

    Roots and logarithms are real then. With `is_signed`, every other point is negative.
    """
    import sympy

    for point in range(_NUM_POINTS if symbols else 1):
        sign = -1 if point % 2 and is_signed else 1
        yield {
            symbol: sympy.Rational(
                sign * (7919 + 104_729 * (point + 1) * (k + 2)), 7_368_787 + 15 * k
            )
            for k, symbol in enumerate(sorted(symbols, key=str))
        }


def _number(expression: Any) -> Any:
    import sympy

    value = expression.doit() if expression.atoms(sympy.Sum, sympy.Integral) else expression
    value = sympy.N(value, _DIGITS)
    if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
        return None
    real, imaginary = value.as_real_imag()
    if not all(part.is_Float or part.is_Rational for part in (real, imaginary)):
        return None
    return real + sympy.I * imaginary if imaginary else real


def _are_same_equations(a: Any, b: Any) -> bool:
    """Return whether one is a multiple of the other: `x = 2y` is `2y - x = 0`."""
    left, right = a.lhs - a.rhs, b.lhs - b.rhs
    if left.free_symbols != right.free_symbols:
        return False
    ratios = []
    for values in _sample_points(left.free_symbols):
        x, y = (_number(side.xreplace(values)) for side in (left, right))
        if x is None or y is None or y == 0 or x == 0:
            return False
        ratios.append(x / y)
    return all(abs(r - s) < _TOLERANCE * abs(s) for r, s in itertools.pairwise(ratios))
