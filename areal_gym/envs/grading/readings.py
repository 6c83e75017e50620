"""Readings of an answer: what one text may mean, without its name, unit, choice letter or steps."""

from __future__ import annotations

import re
from typing import NamedTuple

from areal_gym.envs.grading.numbers import NAME, without_unit
from areal_gym.envs.grading.parts import has_list_words

CHOICE = re.compile(r"\(?\s*([A-Za-z])\s*[).]?|([A-Za-z])\s*[).:]")
_OPTION = re.compile(r"(?:option|choice|answer) (?=\(?[A-Z]\)?$)", re.IGNORECASE)
_CHOICE_AND_TEXT = re.compile(r"\(?([A-J])[).:]\s+((?!and\b|or\b)\S.*)")
_RATIO = re.compile(r"(\d+) to (\d+)")
_SEVERAL_UNITS = re.compile(r"[\d.]+ ?[a-z]+(?:,? (?:and )?[\d.]+ ?[a-z]+)+")
_BETWEEN_UNITS = re.compile(r",? and |, ")
_TIGHT = re.compile(r"\s+|\\(?=[ ])")


def bare(text: str) -> str:
    """Return the text for comparison letter by letter, without parentheses of choices and case."""
    choice = CHOICE.fullmatch(_OPTION.sub("", text))
    if choice:
        return (choice[1] or choice[2]).upper()
    if _SEVERAL_UNITS.fullmatch(text):
        text = _BETWEEN_UNITS.sub(" ", text)
    text = _RATIO.sub(r"\1:\2", text)
    text = re.sub(r"\{([A-Za-z0-9])\}", r"\1", _TIGHT.sub("", text))
    return text.casefold() if "\\" not in text else text


def is_choice(text: str, letter: str) -> bool:
    """Return whether the text is that choice: "(B) 12" is the choice "B"."""
    single, full = CHOICE.fullmatch(letter), _CHOICE_AND_TEXT.fullmatch(text)
    if single is None or full is None or not letter.strip("().: ").isupper():
        return False
    return full[1] == (single[1] or single[2])


# "k = 1/2", "f(x) = 2x", "x \in [1, 2]": the name is not part of the answer
_RATIO_OF = r"[a-z](?:\s*:\s*[a-z])+"
_SEGMENT = r"[A-Z]{1,4}(?:_\{?\w+\}?)?"
_MEASURE = rf"\|{_SEGMENT}\||{_SEGMENT}\s*[:/]\s*{_SEGMENT}|\\frac\{{{_SEGMENT}\}}\{{{_SEGMENT}\}}"
_NAME = rf"(?:{_MEASURE}|{_RATIO_OF}|{NAME}|\([A-Za-z]\s*(?:,\s*[A-Za-z]\s*)+\))"
_NAMED = re.compile(rf"\s*({_NAME})\s*(?:=|\\in(?![a-zA-Z])|\\approx)\s*")
_NO_LETTERS = r"(?:[-+*/().,\d\s{}^%]|\\(?:frac|sqrt|times|cdot|div|pi)(?![a-zA-Z]))+"
_COMPUTED = re.compile(rf"{_NO_LETTERS}=({_NO_LETTERS})")
_APPROXIMATELY = re.compile(r"\\approx(?![a-zA-Z])|\\simeq|\\sim(?![a-zA-Z])")


def readings(a: str, b: str) -> list[tuple[str, str]]:
    """Return the pairs of readings, likeliest first: a value without its name or unit, ..."""
    a, b = _value(_without_letter(a, b)), _value(_without_letter(b, a))
    values = _spelled_out(a, b), _spelled_out(b, a)
    has_equation = len(_sides(values[0])) > 1, len(_sides(values[1])) > 1
    names = assigned_name(values[0]), assigned_name(values[1])
    if all(has_equation) and not all(names):
        return [values]
    unnamed = name_and_value(values[0])[1], name_and_value(values[1])[1]
    if all(has_equation) and names[0] != names[1]:
        return [unnamed, values]  # y = 2x + 3 is f(x) = 2x + 3, and x = 2y is y = x/2
    return [unnamed]


def _without_letter(text: str, other: str) -> str:
    """Return "(B) 12" as 12 where no letters are expected."""
    full = _CHOICE_AND_TEXT.fullmatch(text)
    return full[2] if full and not _CHOICE_AND_TEXT.fullmatch(other) else text


_POINT = re.compile(r"\(([A-Za-z](?:\s*,\s*[A-Za-z])+)\)\s*=\s*\(([^()]*)\)")


def _spelled_out(text: str, other: str) -> str:
    """Return "(a, b) = (2, 3)" as "a = 2, b = 3" if the other answer is written like that."""
    point = _POINT.fullmatch(text)
    if point is None or other.count("=") < 2:
        return text
    names, values = point[1].split(","), point[2].split(",")
    if len(names) != len(values):
        return text
    pairs = zip(names, values, strict=True)
    return ", ".join(f"{name.strip()} = {value.strip()}" for name, value in pairs)


def _value(text: str) -> str:
    """Drop a trailing "≈ 0.71", the steps of "x = 2 + 3 = 5", and a unit."""
    exact = _APPROXIMATELY.split(text)[0].strip()
    if exact and "=" not in text and assigned_name(text) is None:
        text = exact
    sides = _sides(text) if text.count("=") > 1 else ()
    if len(sides) > 2 and "," not in text and not has_list_words(text):
        text = sides[-1].strip()
    elif computed := _COMPUTED.fullmatch(text):  # 1/2 + 11/18 = 10/9
        text = computed[1].strip()
    return without_unit(text)


def _sides(text: str) -> list[str]:
    """Cut at equals signs, but not at those of `\\sum_{k=0}`."""
    depth, start, sides = 0, 0, []
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if character == "=" and depth == 0:
            sides.append(text[start:position])
            start = position + 1
    return [*sides, text[start:]]


def assigned_name(text: str) -> str | None:
    """Return the name that the text gives a value to."""
    return name_and_value(text)[0]


def name_and_value(text: str) -> tuple[str | None, str]:
    """Return the name and the value of an answer such as "x = 3"; the name may be missing."""
    named = _NAMED.match(text)
    if named and ("," not in text or text.count("=") < 2):
        value = text[named.end() :].strip()
        is_whole = named[1].count("{") == named[1].count("}")
        if is_whole and value and len(_sides(value)) == 1:
            return named[1], value
    return None, text


# ---- times of day --------------------------------------------------------------------------------

_CLOCK = re.compile(
    r"(?P<hour>[01]?\d|2[0-3])(?::(?P<minute>[0-5]\d)(?::(?P<second>[0-5]\d))?)?"
    r"(?: ?(?P<half>[ap])m|(?P<named> noon| midnight))?",
    re.IGNORECASE,
)


class Time(NamedTuple):
    """A time of day as an answer writes it."""

    hour: int
    minutes: tuple[int, int]
    """Minutes and seconds."""
    half: str
    """The half of the day, "a" or "p"; empty when it is left out."""


def read_time(text: str) -> Time | None:
    """Return the time in a tidy text with a colon or "am", "pm", "noon"; None for other texts."""
    clock = _CLOCK.fullmatch(text)
    if clock is None or not (clock["minute"] or clock["half"] or clock["named"]):
        return None
    half = (clock["half"] or "").lower()
    if clock["named"]:
        half = "p" if clock["named"].lower() == " noon" else "a"
    time = Time(int(clock["hour"]), (int(clock["minute"] or 0), int(clock["second"] or 0)), half)
    return None if half and not 1 <= time.hour <= 12 else time


def are_same_times(a: Time, b: Time) -> bool:
    """Return whether 17:45 is 5:45 pm, or one of the times leaves "pm" out."""
    if a.hour == b.hour:
        return a.minutes == b.minutes and (a.half == b.half or not (a.half and b.half))
    return a.minutes == b.minutes and _hour_of_day(a) == _hour_of_day(b)


def _hour_of_day(time: Time) -> int:
    return time.hour % 12 + (12 if time.half == "p" else 0) if time.half else time.hour
