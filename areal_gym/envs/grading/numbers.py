"""Reads and compares numbers exactly."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from areal_gym.envs.grading.answer_cleaning import tidy

_MAX_NUMBER = 200
_MIN_DECIMALS = 4
"""Number of decimals from which a rounded number equals the exact one."""


class Number(NamedTuple):
    """A number as an answer writes it."""

    value: Fraction
    is_percent: bool = False
    unit: str = ""
    """Lower case; empty when none is written."""
    last_place: Fraction | None = None
    """The unit of its last decimal; None with fewer than four decimals."""


_WHOLE = re.compile(r"-?[0-9]{1,15}")
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,3}(?: \d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_DECIMAL = re.compile(rf"(?P<number>{_PLAIN})(?:[eE](?P<exponent>[-+]?\d{{1,3}}))?")
# 2,74 in other countries; 1,234 has thousands, and 1,2 is rather two numbers.
_DECIMAL_COMMA = re.compile(r"(?:\d+,\d{2}|\d+,\d{4,}|0+,\d+)")
_RECURRING = re.compile(r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{?(\d+)\}?|\((\d+)\))")
_GOES_ON = re.compile(r"(\d*)\.(\d{0,9}?)(\d{1,9}?)\3{2,20}\.\.\.")
"""0.1666...: digits that occur three times repeat for ever."""
_FRACTION = re.compile(
    r"(?:(?P<whole>\d{1,3}(?:[ ,]\d{3})+|\d+)[ +])?(?P<top>\d[\d,]*(?:\.\d+)?|\.\d+)"
    r"/(?P<bottom>\d[\d,]*(?:\.\d+)?|\.\d+)"
)
_PART = r"\{\s*([-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+))\s*\}"
_LATEX_FRACTION = re.compile(rf"\\frac\s*{_PART}\s*{_PART}")
_TIMES_POWER = re.compile(
    r"\s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*\{?\s*([-+]?\d{1,3})\s*\}?"
)
NAME = (
    r"(?!\\(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|frac))(?:m?\\angle\s*)?\\?[A-Za-z]+(?:\^\{-1\})?(?:_\{?\\?\w+\}?|'*)?"
    r"(?:\s*\([A-Za-z, ]+\))?"
)
"""A variable or `f(x)`, which may precede "=" without being part of the answer."""
_VARIABLE = re.compile(rf"{NAME}\s*(?:=|\\approx)\s*|\\approx\s*")
_PERCENT = re.compile(r"\s*(?:%|percent(?:age)?|pct|per cent)$")
_CURRENCY = re.compile(r"[$€£¥₹]|\bRs\.?\s|\\(?:pounds|euro)(?![a-zA-Z])|\b(?:USD|EUR|GBP)\b")
_DEGREES = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)")
_UNIT = re.compile(
    r"(?P<number>.*(?:[\d.)}]|\\pi))(?P<space> ?)(?P<unit>[A-Za-z]+(?:[ -][A-Za-z]+){0,3}\.?)"
    r"(?:\s*\^\s*\{?\s*(?P<power>[23])\s*\}?)?(?:/[A-Za-z]+(?:\s*\^\s*\{?\s*[23]\s*\}?)?)?"
)
_CHINESE_UNIT = re.compile(
    r"(?P<number>.*[\d.)}]) ?(?P<unit>(?!千(?![克米])|分之|[十百万亿兆半成折点])[一-鿿]{1,4})"
)
_PREFIXES = (("", ""), ("milli", "m"), ("centi", "c"), ("deci", "d"), ("kilo", "k"))
_UNITS = {
    *("mm", "cm", "m", "km", "in", "ft", "yd", "mi", "mg", "g", "kg", "lb", "lbs", "oz", "ml", "l"),
    *("L", "s", "sec", "min", "h", "hr", "hrs", "mph", "kmh", "kph", "W", "kW", "V", "A", "N", "J"),
    *("Hz", "K", "F", "C", "Pa", "mol", "am", "pm", "sq", "cu", "dm", "mL"),
}
"""Units that may follow the number at once or be shorter than three letters."""
_SHORT = {
    **{f"{prefix}met{end}": f"{short}m" for prefix, short in _PREFIXES for end in ("er", "re")},
    **{f"{prefix}lit{end}": f"{short}l" for prefix, short in _PREFIXES for end in ("er", "re")},
    **{f"{prefix}gram": f"{short}g" for prefix, short in _PREFIXES},
    **{"inches": "in", "inch": "in", "feet": "ft", "foot": "ft", "yard": "yd", "mile": "mi"},
    **{"pound": "lb", "ounce": "oz", "second": "s", "sec": "s", "minute": "min", "hour": "h"},
    **{"hr": "h", "mph": "mi", "kmh": "km", "kph": "km", "square": "sq", "cubic": "cu"},
}
"""Short forms of units' names; the divisor of a unit is not read."""
_POWERS = {None: "", "2": "sq ", "3": "cu "}
_FIRST_WORDS = {"of", "sq", "cu"}
"""Words that begin units, although they are too short for one."""
_NO_UNITS = {
    *("and", "or", "not", "to", "is", "but", "than", "plus", "minus", "times", "over", "by", "pi"),
    *("sqrt", "sin", "cos", "tan", "log", "exp", "mod", "root", "frac", "hundred", "dozen", "half"),
    *("third", "quarter", "squared", "cubed", "factorial", "infinity", "inf", "nan", "maybe"),
    *("per", "thirds", "halves", "quarters", "i", "e", "x", "y", "z", "less", "more", "through"),
}
"""Words that change what the number before them means."""
_WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_IN_WORDS = {
    **{word: number for number, word in enumerate(_WORDS)},
    **{word: 10 * number for number, word in enumerate(_TENS, 2)},
    **{
        f"{ten} {unit}": 10 * tens + ones
        for tens, ten in enumerate(_TENS, 2)
        for ones, unit in enumerate(_WORDS[1:10], 1)
    },
    **{"hundred": 100, "one hundred": 100, "one thousand": 1000, "one million": 10**6},
}
_ORDINAL = re.compile(r"(?<=\d)(?:st|nd|rd|th)$")
_ABOUT = re.compile(r"^(?:about|approximately|approx\.?|roughly|exactly)\s+", re.IGNORECASE)
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(rf"(?P<number>.*\d)\s*(?P<scale>{'|'.join(_SCALES)})s?\b(?P<rest>.*)")


def parse_number(text: str) -> Number | None:
    r"""Read an integer, decimal, fraction, mixed number or scientific notation; None if it is none.

    Understands thousands separators, percent, currency, degrees, LaTeX fractions, `x = ` before it,
    "million", and a unit after it ("12 apples", `5 \text{ cm}`).
    """
    if _WHOLE.fullmatch(text):  # nearly always
        return Number(Fraction(int(text)))
    return parse_tidy_number(tidy(text)) if len(text) <= _MAX_NUMBER else None


def parse_tidy_number(text: str) -> Number | None:
    """Return `parse_number` of a text that is tidy already."""
    if len(text) > _MAX_NUMBER:
        return None
    text, num_degrees = _DEGREES.subn("", _CURRENCY.sub("", text).strip())
    text = _ABOUT.sub("", text.strip())
    in_words = _IN_WORDS.get(text.lower().replace("-", " "))
    if in_words is not None:
        return Number(Fraction(in_words))
    variable = _VARIABLE.match(text)
    text = text[variable.end() :] if variable else text
    text, num_percents = _PERCENT.subn("", _ORDINAL.sub("", text))
    scale = Fraction(1)
    if scaled := _SCALE.fullmatch(text):
        text, scale = scaled["number"] + scaled["rest"], Fraction(_SCALES[scaled["scale"]])
    text, unit, power = _split_unit(text)
    unit = power + unit or ("degrees" if num_degrees else "")
    value = _parse_value(text)
    if value is None:
        return None
    last_place = _last_place(text)
    last_place = None if last_place is None else last_place * scale
    return Number(value * scale, num_percents > 0, unit, last_place)


def without_unit(text: str) -> str:
    """Return a tidy formula without its unit. A single letter is a variable."""
    formula, unit, _ = _split_unit(text) if " " in text else (text, "", "")
    return formula if len(unit) > 1 else text


def _split_unit(text: str) -> tuple[str, str, str]:
    """Return the text before a unit, the unit, and "sq " or "cu " for its square or cube."""
    match = _UNIT.fullmatch(text)
    if match and _is_unit(match["unit"].rstrip("."), has_space=bool(match["space"])):
        return match["number"], match["unit"].lower().rstrip("."), _POWERS[match["power"]]
    if not text.isascii() and (match := _CHINESE_UNIT.fullmatch(text)):
        return match["number"], match["unit"], ""
    return text, "", ""


def _is_unit(unit: str, *, has_space: bool) -> bool:
    if unit in _UNITS:
        return True
    words = unit.lower().replace("-", " ").split(" ")
    if any(word in _NO_UNITS for word in words if word != "per"):
        return False
    # "10 weeks", "10weeks"; but 5x, 5ab, 5 x
    return len(words[0]) >= (3 if has_space else 4) or (has_space and words[0] in _FIRST_WORDS)


def _parse_value(text: str) -> Fraction | None:
    text = text.strip()
    while len(text) > 1 and text[0] + text[-1] in ("()", "{}") and "," not in text:
        text = text[1:-1].strip()
    sign = 1
    while text[:1] in ("-", "+"):
        if sign < 0:
            return None
        sign, text = (-1 if text[0] == "-" else 1), text[1:].lstrip()
    text = _LATEX_FRACTION.sub(r" \1/\2", text).strip()
    if text.startswith("-") and sign > 0:  # \frac{-1}{2}
        sign, text = -1, text[1:]
    text = re.sub(r"\s*/\s*", "/", text)
    if "/-" in text:
        sign, text = -sign, text.replace("/-", "/", 1)
    if fraction := _FRACTION.fullmatch(text):
        top, bottom = (Fraction(fraction[name].replace(",", "")) for name in ("top", "bottom"))
        whole = fraction["whole"]
        # 11 7/6 is a slip of the pen or two numbers
        if bottom == 0 or (whole is not None and top >= bottom):
            return None
        return sign * (Fraction(re.sub("[ ,]", "", whole or "0")) + top / bottom)
    if recurring := _RECURRING.fullmatch(text) or _GOES_ON.fullmatch(text):
        first, once, *again_as = recurring.groups()
        again = next(digits for digits in again_as if digits)
        ones, tens = Fraction(10) ** -len(once), Fraction(10) ** len(again)
        return sign * ones * (int((first + once) or 0) + int(again) / (tens - 1))
    scale = Fraction(1)
    if power := _TIMES_POWER.search(text):
        if power.end() != len(text):
            return None
        scale, text = Fraction(10) ** int(power[1]), text[: power.start()].rstrip()
    if _DECIMAL_COMMA.fullmatch(text):
        text = text.replace(",", ".")
    if decimal := _DECIMAL.fullmatch(text):
        number = Fraction(re.sub("[ ,]", "", decimal["number"]).rstrip(".") or 0)
        return sign * number * scale * Fraction(10) ** int(decimal["exponent"] or 0)
    return None


_DECIMALS = re.compile(r"\.(\d+)")
_EXPONENT = re.compile(r"(?:[eE]|10\s*\^\s*\{?\s*)([-+]?\d{1,3})")


def _last_place(text: str) -> Fraction | None:
    decimals = _DECIMALS.findall(text)
    if len(decimals) != 1 or len(decimals[0]) < _MIN_DECIMALS or "/" in text or "\\frac" in text:
        return None
    exponent = _EXPONENT.search(text)
    power = int(exponent[1]) if exponent else 0
    return Fraction(10) ** (power - len(decimals[0]))


_SCALES_OF_DEGREES = {"c", "f", "celsius", "fahrenheit", "degrees celsius", "degrees fahrenheit"}


def _have_other_units(a: Number, b: Number) -> bool:
    """Return whether both have units that differ; 20 degrees may mean Celsius."""
    units = ["percent" if number.is_percent else number.unit for number in (a, b)]
    if "percent" in units and not (a.unit or b.unit):
        return False
    if "degrees" in units and not _SCALES_OF_DEGREES.isdisjoint(units):
        return False
    return all(units) and _short_unit(units[0]) != _short_unit(units[1])


def _short_unit(unit: str) -> str:
    """Return "square inches" as "sq in", which "in^2" has become already."""
    words = unit.replace("-", " ").replace(".", "").partition(" per ")[0].split(" ")
    singular = [word if word in _SHORT or len(word) == 1 else word.rstrip("s") for word in words]
    return " ".join(_SHORT.get(word, word) for word in singular)


def numbers_agree(a: Number, b: Number) -> bool:
    """Return whether the numbers are equal; 50% is 50 and 0.5, and 0.3333 is 1/3."""
    if _have_other_units(a, b):
        return False
    if _are_same(a, b):
        return True
    if a.is_percent == b.is_percent:
        return False
    percent, other = (a, b) if a.is_percent else (b, a)
    return _are_same(percent._replace(value=percent.value / 100), other)


def _are_same(a: Number, b: Number) -> bool:
    """Return whether both are equal, or one is the other to four decimals, rounded or cut off."""
    if a.value == b.value:
        return True
    exact, rounded = (a, b) if a.last_place is None else (b, a)
    if exact.last_place is not None or rounded.last_place is None:
        return False
    difference = abs(rounded.value - exact.value)
    is_cut_off = difference < rounded.last_place and abs(rounded.value) < abs(exact.value)
    return is_cut_off or difference <= rounded.last_place / 2


_CALCULATION = re.compile(
    r"(?=.*\d)(?:[-\d\s.,+*/()^={}$×·÷−]|\\(?:times|cdot|div|[dt]?frac|left|right|[(),;!]))+=([^=]+)"
)
"""Numbers and operations, an equals sign, and the result."""


def is_same_number(prediction: str, gold: str) -> bool:
    """Return whether both are numbers and equal, by exact arithmetic; this takes microseconds.

    Of a calculation, the right side is the prediction: `3+4=7` is 7.
    """
    a, b = parse_number(prediction), parse_number(gold)
    if a is None and (calculation := _CALCULATION.fullmatch(prediction)):
        a = parse_number(calculation[1])
    return a is not None and b is not None and numbers_agree(a, b)
