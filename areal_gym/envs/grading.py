r"""Grading answers: which part of a text is the answer, and whether it equals the right one.

    text --extract_answer--> "\frac{1}{2}" --is_same_number / is_equal--> bool

Pass assistant text only: a number that a tool printed is nobody's answer. Nothing here raises on
any text. Numbers are compared exactly and without sympy; symbolic answers go through math-verify,
which is imported when the first of them is met. It is skipped for texts that are long or that hold
towers of powers, which it could chew on for ever; such answers count as wrong unless written alike.
Even so it may take seconds: an event loop awaits `agrees`, which leaves algebra to other processes.
"""

from __future__ import annotations

import logging
import re
import unicodedata
import warnings
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import NamedTuple

__all__ = ["Number", "agrees", "extract_answer", "is_equal", "is_same_number", "parse_number"]

_MAX_TEXT = 100_000
"""Characters, from the end, in which an answer is looked for."""
_MAX_NUMBER = 200
_MAX_SYMBOLIC = 300

# ---- extraction ---------------------------------------------------------------------------------

# An escaped brace (\{) is text; \boxed{ opens a box; other braces only have to balance.
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_HASHES = re.compile(r"####[ \t]*([^\n]*)")
_SENTENCE = re.compile(r"the (?:final )?answer is:?\s*([^\n]+)", re.IGNORECASE)


def extract_answer(text: str) -> str | None:
    r"""The answer that a text gives, stripped; None when it gives none.

    Looked for after any `</think>`: the last closed `\boxed{...}`, else what follows the last
    `####`, else what follows the last "the answer is". Only the last 100,000 characters count.
    """
    text = text[-_MAX_TEXT:].rpartition("</think>")[2]
    answer = _last_box(text)
    if answer is None:
        found = _HASHES.findall(text) or _SENTENCE.findall(text)
        answer = found[-1].strip().removesuffix(".") if found else None
    return answer.strip() if answer is not None else None


def _last_box(text: str) -> str | None:
    open_braces: list[tuple[int, bool]] = []
    last_start, last_end = -1, -1
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            if open_braces:
                start, is_box = open_braces.pop()
                # Of two boxes, the one that opens later wins; inner boxes close first.
                if is_box and start > last_start:
                    last_start, last_end = start, match.start()
        elif token.endswith("{") and token != "\\{":
            open_braces.append((match.end(), token != "{"))
    return text[last_start:last_end] if last_start >= 0 else None


# ---- numbers ------------------------------------------------------------------------------------


class Number(NamedTuple):
    """A number as an answer gives it."""

    value: Fraction
    is_percent: bool = False
    unit: str = ""
    """Lower case; empty when none is written."""


_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_DECIMAL = re.compile(rf"(?P<number>{_PLAIN})(?:[eE](?P<exponent>[-+]?\d{{1,3}}))?")
_FRACTION = re.compile(r"(?:(?P<whole>\d+)[ +])?(?P<top>\d+(?:\.\d+)?)/(?P<bottom>\d+(?:\.\d+)?)")
_LATEX_FRACTION = re.compile(
    r"\\[dtc]?frac(?:\{\s*(-?\d+(?:\.\d+)?)\s*\}\{\s*(\d+(?:\.\d+)?)\s*\}|\s*(\d)\s*(\d))"
)
_TIMES_POWER = re.compile(
    r"\s*(?:\\times|\\cdot|\*)\s*10\s*(?:\^|\*\*)\s*\{?\s*([-+]?\d{1,3})\s*\}?"
)
_VARIABLE = re.compile(r"[A-Za-z]\s*=\s*")
_UNIT = re.compile(r"(?P<number>.*[\d.)])(?P<space> ?)(?P<unit>[A-Za-z]+(?: [A-Za-z]+){0,3})")
_UNITS = {
    *("mm", "cm", "m", "km", "in", "ft", "yd", "mi", "mg", "g", "kg", "lb", "lbs", "oz", "ml", "l"),
    *("L", "s", "sec", "min", "h", "hr", "hrs", "mph", "kmh", "kph", "W", "kW", "V", "A", "N", "J"),
}
"""Units that may follow the number at once or be shorter than three letters."""
_NO_UNITS = {
    *("and", "or", "not", "to", "is", "but", "than", "plus", "minus", "times", "over", "by", "pi"),
    *("sqrt", "sin", "cos", "tan", "log", "exp", "mod", "root", "frac", "hundred", "thousand"),
    *("million", "billion", "trillion", "dozen", "half", "third", "quarter", "squared", "cubed"),
    *("factorial", "infinity", "inf", "nan", "maybe", "per"),
}
"""Words that change what the number before them means."""

_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox|textit)\s*\{([^{}]*)\}")
_IGNORED = re.compile(r"(?<!\\)\\[,!;: ]|\\left|\\right|\\displaystyle|\$|~")
_CURRENCY = re.compile(r"[€£¥]|\\(?:pounds|euro)(?![a-zA-Z])")
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|°")


def _tidy(text: str) -> str:
    """The same answer without what is typesetting only."""
    text = unicodedata.normalize("NFKC", text).replace("\u2212", "-").replace("{,}", ",")
    text = text.replace("\\$", "").replace("\\%", "%").replace("\\(", "").replace("\\)", "")
    text = _IGNORED.sub("", _TEXT.sub(r" \1 ", text))
    return " ".join(text.split()).removesuffix(".").strip()


def parse_number(text: str) -> Number | None:
    r"""Read an integer, decimal, fraction, mixed number or scientific notation; None if it is none.

    Understands thousands separators, percent, currency, degrees, LaTeX fractions, `x = ` before it
    and a unit after it ("12 apples", `5 \text{ cm}`).
    """
    if len(text) > _MAX_NUMBER:
        return None
    text = _DEGREES.sub("", _CURRENCY.sub("", _tidy(text))).strip()
    text = _VARIABLE.sub("", text, count=1) if _VARIABLE.match(text) else text
    is_percent = False
    for suffix in ("%", " percent"):
        if text.endswith(suffix):
            text, is_percent = text.removesuffix(suffix).rstrip(), True
    unit = ""
    found = _UNIT.fullmatch(text)
    if found and _is_unit(found["unit"], has_space=bool(found["space"])):
        text, unit = found["number"], found["unit"].lower()
    value = _parse_value(text)
    return None if value is None else Number(value, is_percent, unit)


def _is_unit(unit: str, *, has_space: bool) -> bool:
    if unit in _UNITS:
        return True
    words = unit.lower().split(" ")
    if not has_space or len(words[0]) < 3 or words[0] in _NO_UNITS:
        return False
    return _NO_UNITS.isdisjoint(word for word in words if word != "per")


def _parse_value(text: str) -> Fraction | None:
    text = text.strip()
    if text.startswith("(") and text.endswith(")") and "," not in text:
        text = text[1:-1].strip()
    sign = 1
    while text[:1] in ("-", "+"):
        if sign < 0:
            return None
        sign, text = (-1 if text[0] == "-" else 1), text[1:].lstrip()
    text = _LATEX_FRACTION.sub(lambda m: f" {m[1] or m[3]}/{m[2] or m[4]}", text).strip()
    if text.startswith("-") and sign > 0:  # \frac{-1}{2}
        sign, text = -1, text[1:]
    text = re.sub(r"\s*/\s*", "/", text)
    if fraction := _FRACTION.fullmatch(text):
        bottom = Fraction(fraction["bottom"])
        if bottom == 0:
            return None
        return sign * (Fraction(fraction["whole"] or 0) + Fraction(fraction["top"]) / bottom)
    scale = Fraction(1)
    if power := _TIMES_POWER.search(text):
        if power.end() != len(text):
            return None
        scale, text = Fraction(10) ** int(power[1]), text[: power.start()].rstrip()
    if decimal := _DECIMAL.fullmatch(text):
        number = Fraction(decimal["number"].replace(",", "").rstrip(".") or 0)
        return sign * number * scale * Fraction(10) ** int(decimal["exponent"] or 0)
    return None


def _agree(a: Number, b: Number) -> bool:
    if a.unit and b.unit and a.unit.rstrip("s") != b.unit.rstrip("s"):
        return False
    if a.value == b.value:
        return True
    if a.is_percent == b.is_percent:
        return False
    percent, other = (a, b) if a.is_percent else (b, a)
    return percent.value / 100 == other.value


def is_same_number(prediction: str, gold: str) -> bool:
    """Whether both are numbers and equal: exact arithmetic, a few microseconds, never sympy."""
    a, b = parse_number(prediction), parse_number(gold)
    return a is not None and b is not None and _agree(a, b)


# ---- everything else ----------------------------------------------------------------------------


def is_equal(prediction: str, gold: str) -> bool:
    """Whether two answers are the same: number, text, list, tuple, set, interval or expression."""
    return _is_equal(prediction, gold, _is_symbolically_equal)


async def agrees(prediction: str, gold: str) -> bool:
    """`is_equal`, without holding up the event loop: where algebra is needed, a worker does it.

    An answer on which a worker spends more than five seconds of processor time is not shown to be
    right.

    Raises:
        SandboxError: the worker failed, which says nothing about the answer.
    """
    try:
        return _is_equal(prediction, gold, _leave_to_worker)
    except _NeedsAlgebraError:
        from areal_gym.sandbox import Grader

        grader = Grader("areal_gym.envs.grading:is_equal", on_limit=False)
        return bool(await grader(prediction, gold))


class _NeedsAlgebraError(Exception):
    """The answers are neither numbers nor written alike."""


def _leave_to_worker(prediction: str, gold: str) -> bool:
    raise _NeedsAlgebraError


def _is_equal(prediction: str, gold: str, compare: Callable[[str, str], bool]) -> bool:
    """`compare` decides where neither numbers nor spelling do."""
    if not prediction.strip() or not gold.strip():
        return False
    a, b = parse_number(prediction), parse_number(gold)
    if a is not None and b is not None:
        return _agree(a, b)
    if _bare(prediction) == _bare(gold):
        return True
    if max(len(prediction), len(gold)) > _MAX_SYMBOLIC:
        return False
    if b is not None and _UNFINISHED.search(prediction):
        return False
    a_base, b_base = (_BASED.fullmatch(_tidy(text)) for text in (prediction, gold))
    if a_base or b_base:  # 52_8 is another number than 52_9; algebra would drop the base
        return a_base is not None and b_base is not None and a_base.groups() == b_base.groups()
    left, right = _collection(prediction), _collection(gold)
    if left is not None or right is not None:
        if left is None or right is None:
            return False
        return _are_same_collections(left, right, partial(_is_equal, compare=compare))
    if any(map(_is_beyond_algebra, (prediction, gold))):
        return False
    return compare(prediction, gold)


def _bare(text: str) -> str:
    """For comparison letter by letter: choices lose their parentheses, words their case."""
    text = _tidy(text).replace("dfrac", "frac").replace("tfrac", "frac")
    if re.fullmatch(r"\([A-Za-z]\)|[A-Za-z]", text):
        return text.strip("()").upper()
    text = text.replace(" ", "")
    return text.casefold() if text.isalpha() else text


_BASED = re.compile(r"([0-9A-F]+)_\s*\{?\s*(\d+)\s*\}?")


class _Collection(NamedTuple):
    brackets: str
    """ "()", "[)", ... of a tuple or an interval; empty for sets and bare lists."""
    items: list[str]


def _collection(text: str) -> _Collection | None:
    """The parts of an answer that is a list or a union; None when it is one thing."""
    text = _tidy(text)
    if "\\cup" in text:
        return _Collection("", [part.strip() for part in text.split("\\cup")])
    brackets = ""
    if text.startswith("\\{") and text.endswith("\\}"):
        text = text[2:-2]
    elif len(text) > 1 and text[0] in "([" and text[-1] in ")]" and len(_split(text)) == 1:
        brackets, text = text[0] + text[-1], text[1:-1]
    items = _split(text)
    return _Collection(brackets, items) if len(items) > 1 else None


def _split(text: str) -> list[str]:
    """Cut at commas (and "and", "or") outside of brackets."""
    text = re.sub(r",? (?:and|or) ", ",", text)
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    return [*parts, text[start:].strip()]


def _are_same_collections(
    a: _Collection, b: _Collection, is_equal: Callable[[str, str], bool]
) -> bool:
    if a.brackets != b.brackets or len(a.items) != len(b.items):
        return False
    if a.brackets:
        return all(map(is_equal, a.items, b.items))
    remaining = list(b.items)
    for item in a.items:
        match = next((other for other in remaining if is_equal(item, other)), None)
        if match is None:
            return False
        remaining.remove(match)
    return True


# Repeating "37*48+12" is no answer to it, and "41 ... 42" is two.
_UNFINISHED = re.compile(r"[\d)}]\s*(?:[-+*]|\\times|\\cdot)\s*[\d(\\]|\d\s+\d|\.\.")

# What makes sympy run for minutes: big exponents, powers of powers, factorials, huge numbers.
_EXPLOSIVE = re.compile(
    r"\d{30}|(?:\^|\*\*)\s*[{(]?\s*-?\d{4}|(?:\^|\*\*)[^+\-*/=,]*(?:\^|\*\*)|!|\\binom"
)
_MAX_POWERS = 6


def _is_beyond_algebra(answer: str) -> bool:
    text = _tidy(answer)
    if _EXPLOSIVE.search(text) or text.count("^") + text.count("**") > _MAX_POWERS:
        return True
    # A word: with another or with a formula, nothing that algebra could decide.
    return re.search(r"(?<![\\A-Za-z])[A-Za-z]{4,}", text) is not None


def _is_symbolically_equal(prediction: str, gold: str) -> bool:
    both = (_tidy(prediction), _tidy(gold))
    import math_verify

    # Its time limits are alarms, which work in the main thread only and disturb an event loop;
    # switching them off makes it log a notice every time.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed, target = (math_verify.parse(f"${text}$", parsing_timeout=None) for text in both)
            return bool(math_verify.verify(target, parsed, timeout_seconds=None))
    except Exception:  # whatever a parser trips over, the answer is not shown to be right
        return False
