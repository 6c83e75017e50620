"""Answers of several parts: lists, tuples, sets, intervals, unions, matrices."""

from __future__ import annotations

import re
from typing import NamedTuple

from areal_gym.envs.grading.numbers import parse_tidy_number


class Parts(NamedTuple):
    """The parts of an answer."""

    brackets: str
    """ "()", "[)", "{}", ... or the shape of a matrix; empty for bare lists and unions."""
    items: list[str]


UNORDERED = {"", "{}"}
"""Brackets whose contents have no order."""

_FACTOR = r"(-?(?:\d+(?:/\d+)?|\\frac\{[^{}]*\}\{[^{}]*\}|[a-zA-Z])?)(?:\s*(?:\\cdot|\*))?"
_MATRIX = re.compile(
    rf"{_FACTOR}\s*"
    r"\(?\[?\s*\\begin\{([pbvBV]?matrix|array|smallmatrix)\}(?:\{[lcr|]+\})?(.*)"
    r"\\end\{\2\}\s*\]?\)?",
    re.DOTALL,
)
_ROW_END = re.compile(r"\\\\(?:\[[^\]]*\])?|\\cr(?![a-zA-Z])")


def read_matrix(text: str) -> Parts | None:
    """Return the entries of a matrix, row by row; None if the text is not a matrix."""
    text = text.strip()
    if text.startswith("[["):
        return _nested_rows(text)
    matrix = _MATRIX.fullmatch(text)
    if matrix is None or "\\begin" in matrix[3]:
        return None
    factor, kind, inside = matrix.groups()
    rows = [row.split("&") for row in _ROW_END.split(inside) if row.strip(" \\")]
    is_determinant = kind in ("vmatrix", "Vmatrix")
    if factor and is_determinant:
        return None
    shape = f"{'|' if is_determinant else 'm'}{[len(row) for row in rows]}"
    return Parts(shape, [_times(factor, item.strip()) for row in rows for item in row])


def _nested_rows(text: str) -> Parts | None:
    """Read [[1, 2], [3, 4]], a matrix as programs write it."""
    rows = _split(text[1:-1])
    if text[-1] != "]" or not all(row[0] + row[-1] == "[]" and _wraps(row) for row in rows):
        return None
    entries = [_split(row[1:-1]) for row in rows]
    return Parts(f"m{[len(row) for row in entries]}", [item for row in entries for item in row])


def _times(factor: str, entry: str) -> str:
    if not factor:
        return entry
    x, y = parse_tidy_number("-1" if factor == "-" else factor), parse_tidy_number(entry)
    if x is None or y is None:
        return rf"{factor} \cdot ({entry})"
    return str(x.value * y.value)


_RELATION = r"(<|>|\\le(?![a-zA-Z])|\\ge(?![a-zA-Z]))"
_RELATED = re.compile(rf"{_RELATION}|\\ne(?![a-zA-Z])")
_SYMBOL = r"(?:\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([a-z]\))?)"
_SIDE = r"((?:(?!\\[lg]e(?![a-zA-Z]))[^<>])+?)"
_BETWEEN = re.compile(rf"{_SIDE}\s*{_RELATION}\s*{_SYMBOL}\s*{_RELATION}\s*{_SIDE}")
_BOUND = re.compile(rf"{_SYMBOL}\s*{_RELATION}\s*{_SIDE}")
_BOUND_FIRST = re.compile(rf"([^<>A-Za-z]+?)\s*{_RELATION}\s*{_SYMBOL}")
_REALS = r"\(-\\infty, \\infty\)"
_BUILDER = re.compile(
    rf"\\\{{\s*{_SYMBOL}\s*(?:\\in\s*{_REALS}\s*)?(?:\\mid|:|\|)\s*"
    r"(.*(?:[<>]|\\[lgn]e(?![a-zA-Z])).*)\\\}"
)
_WITHOUT = re.compile(rf"{_REALS}\s*(?:\\setminus|\\backslash|\\|-)\s*\\\{{([^{{}},]+)\\\}}")
_OUTWARD = re.compile(r"([\[\]])([^\[\],;]+[,;][^\[\],;]+)([\[\]])")
"""]1, 2[, which some countries write for (1, 2)."""
_EXCEPT = re.compile(rf"{_SYMBOL}\s*\\ne(?![a-zA-Z])\s*([^<>=,]+)")
_BOTH = re.compile(
    rf"({_SYMBOL})\s*{_RELATION}\s*{_SIDE}\s+and\s+({_SYMBOL})\s*{_RELATION}\s*{_SIDE}"
)
_NEGATED = re.compile(rf"-\s*{_SYMBOL}\s*{_RELATION}\s*(-?)\s*([\w.]+|\\frac\{{\w+\}}\{{\w+\}})")
_TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_SIGNS = {"<": ("(", ")"), "\\le": ("[", "]"), ">": (")", "("), "\\ge": ("]", "[")}


def _interval(text: str) -> str:
    r"""Return `-2 \le x < 7` as `[-2, 7)`, and other texts unchanged."""
    if match := _BETWEEN.fullmatch(text):
        low, first, second, high = match.groups()
        if "<" in first or "le" in first:
            return f"{_SIGNS[first][0]}{low.strip()}, {high.strip()}{_SIGNS[second][1]}"
        return f"{_SIGNS[second][1]}{high.strip()}, {low.strip()}{_SIGNS[first][0]}"
    if match := _EXCEPT.fullmatch(text) or _WITHOUT.fullmatch(text):
        return f"(-\\infty, {match[1]}) \\cup ({match[1]}, \\infty)"
    if match := _BOTH.fullmatch(text):  # x > 2 and x < 5
        name, first, low, other, second, high = match.groups()
        if name == other and (first in (">", "\\ge")) != (second in (">", "\\ge")):
            if first in ("<", "\\le"):
                first, low, second, high = second, high, first, low
            return f"{_SIGNS[first][1]}{low.strip()}, {high.strip()}{_SIGNS[second][1]}"
    if match := _NEGATED.fullmatch(text):  # -x > -1
        sign, minus, bound = match.groups()
        text = f"x {_TURNED[sign]} {bound if minus else '-' + bound}"
    match = _BOUND.fullmatch(text)
    if match:
        sign, bound = match.groups()
    elif match := _BOUND_FIRST.fullmatch(text):
        bound, turned = match.groups()
        sign = _TURNED[turned]
    else:
        return text
    if sign in ("<", "\\le"):
        return f"(-\\infty, {bound.strip()}{_SIGNS[sign][1]}"
    return f"{_SIGNS[sign][1]}{bound.strip()}, \\infty)"


_AND = re.compile(r",?\s*(?<![\\A-Za-z])(?:and|or)(?![A-Za-z])\s*,?|;")
_PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])|\+/?-(?!\d*\s*\\infty)")


def read_collection(text: str) -> Parts | None:
    """Return the parts of a list, a tuple, a set, an interval or a union of them; else None."""
    text = text.strip()
    if builder := _BUILDER.fullmatch(text):  # {x | x > 2}
        text = builder[1].strip()
    if parse_tidy_number(text) is not None:  # 1,000
        return None
    text = _interval(text) if _RELATED.search(text) or "\\infty)" in text else text
    if outward := _OUTWARD.fullmatch(text):
        first, inside, last = outward.groups()
        text = ("[" if first == "[" else "(") + inside + ("]" if last == "]" else ")")
    if re.search(r"\\cup(?![a-zA-Z])", text):
        return Parts("", [part.strip() for part in re.split(r"\\cup(?![a-zA-Z])", text)])
    brackets = ""
    if text.startswith("\\{") and text.endswith("\\}"):
        inside = text[2:-2].strip()
        if not inside:
            return Parts("{}", [])
        items = _items(inside)
        return Parts("{}", items) if "\\mid" not in inside and "|" not in inside else None
    if text == "\\emptyset":
        return Parts("{}", [])
    if len(text) > 1 and text[0] == "{" and text[-1] == "}" and len(_split(text)) == 1:
        text = text[1:-1]  # braces that group, and are not printed
    elif len(text) > 1 and text[0] in "([" and text[-1] in ")]" and _wraps(text):
        brackets, text = text[0] + text[-1], text[1:-1]
    elif text.startswith("<") and text.endswith(">"):
        brackets, text = "()", text[1:-1]
    elif text.startswith("\\langle") and text.endswith("\\rangle"):
        brackets, text = "()", text[7:-7]
    items = _items(text) if brackets in UNORDERED else _split(text)
    if len(items) > 1:
        return Parts(brackets, items)
    return None


def _wraps(text: str) -> bool:
    """Return whether the first bracket closes with the last one."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return position == len(text) - 1
    return False


def _items(text: str) -> list[str]:
    r"""Cut at commas, "and" and "or"; `1 \pm 2` is two."""
    items: list[str] = []
    for item in _split(_AND.sub(",", text)):
        item = _interval(item)
        if len(_PLUS_MINUS.findall(item)) == 1 and "..." not in item:
            items += [_PLUS_MINUS.sub(sign, item).removeprefix("+").strip() for sign in "+-"]
        else:
            items.append(item)
    return items


def _split(text: str) -> list[str]:
    """Cut at commas and semicolons outside of brackets, but not at those of thousands."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character in ",;" and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def has_list_words(text: str) -> bool:
    """Return whether "and", "or" or a semicolon joins parts."""
    return _AND.search(text) is not None
