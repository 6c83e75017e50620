r"""Grades answers: extracts the answer from a text, and compares it with the right one.

    text --extract_answer--> "\frac{1}{2}" --is_equal--> bool

Pass assistant text only: a number that a tool printed is not an answer. Nothing here raises or
hangs, whatever the text.

    numbers     compared exactly and without sympy, in microseconds (`is_same_number`)
    structure   lists, tuples, sets, intervals, matrices, choices, words: part by part
    algebra     what is left goes to math-verify and sympy, in a process of its own whose processor
                time and memory the kernel limits; who uses them up is not shown to be right

`is_equal` waits for that process; an event loop awaits `agrees`.
"""

from areal_gym.envs.grading.equality import agrees, decide, is_equal
from areal_gym.envs.grading.extraction import extract_answer
from areal_gym.envs.grading.numbers import Number, is_same_number, parse_number

__all__ = [
    "Number",
    "agrees",
    "decide",
    "extract_answer",
    "is_equal",
    "is_same_number",
    "parse_number",
]
