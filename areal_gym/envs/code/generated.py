"""Generated tasks of the environment `code`: functions that filter, map and reduce."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from areal_gym.envs.tasks import Draft, GeneratedTasks
from areal_gym.errors import UsageError

CODE_LEVELS = (1, 2, 3)
_NUM_TESTS = 8
_NAMES = ("solve", "compute", "process", "run", "answer")


class _Part(NamedTuple):
    """A piece of a function: its words, its source and the function itself."""

    words: str
    source: str
    """An expression of `x` (a number) or `values` (a list)."""
    function: Callable[[Any], Any]


def _conditions(k: int) -> Sequence[_Part]:
    return (
        _Part("that are even", "x % 2 == 0", lambda x: x % 2 == 0),
        _Part("that are odd", "x % 2 == 1", lambda x: x % 2 == 1),
        _Part(f"that are greater than {k}", f"x > {k}", lambda x: x > k),
        _Part(f"that are less than {k}", f"x < {k}", lambda x: x < k),
        _Part(f"that are divisible by {k}", f"x % {k} == 0", lambda x: x % k == 0),
        _Part(f"that are not divisible by {k}", f"x % {k} != 0", lambda x: x % k != 0),
    )


def _maps(k: int) -> Sequence[_Part]:
    return (
        _Part("squared", "x * x", lambda x: x * x),
        _Part("doubled", "2 * x", lambda x: 2 * x),
        _Part(f"increased by {k}", f"x + {k}", lambda x: x + k),
        _Part(f"multiplied by {k}", f"x * {k}", lambda x: x * k),
        _Part("negated", "-x", lambda x: -x),
        _Part(f"reduced modulo {k}", f"x % {k}", lambda x: x % k),
    )


_NONE = "(0 when there is none)"
_RESULTS = (
    _Part("the sum", "sum(values)", sum),
    _Part("the sorted list", "sorted(values)", sorted),
    _Part(f"the largest {_NONE}", "max(values, default=0)", lambda v: max(v, default=0)),
    _Part(f"the smallest {_NONE}", "min(values, default=0)", lambda v: min(v, default=0)),
    _Part("how many different ones there are", "len(set(values))", lambda v: len(set(v))),
    _Part("the list in reverse order", "values[::-1]", lambda v: v[::-1]),
)


@cache
def code_tasks(level: int) -> GeneratedTasks:
    """Return the tasks of a level, 1 to 3: how many steps the function takes.

    Raises:
        UsageError: there is no such level.
    """
    if isinstance(level, bool) or level not in CODE_LEVELS:
        raise UsageError(f"no level {level!r}", hints=["levels are 1 to 3"])
    return GeneratedTasks(f"code, level {level}", lambda rng: _draft(rng, level))


def _draft(rng: random.Random, level: int) -> Draft:
    name = rng.choice(_NAMES)
    first, second = (rng.choice(_maps(rng.randint(2, 60))) for _ in range(2))
    if level == 1:
        words = f"takes a number x and returns it {first.words}, then {second.words}"
        solution = f"def {name}(x):\n    x = {first.source}\n    return {second.source}"
        inputs: list[Any] = rng.sample(range(100), _NUM_TESTS)
        return _made(name, words, solution, inputs, lambda x: second.function(first.function(x)))
    result = rng.choice(_RESULTS)
    chosen = rng.choice(_conditions(rng.randint(2, 20))) if level == 3 else None
    those = "all of them" if chosen is None else f"those {chosen.words}"
    words = (
        f"takes a list of numbers and returns {result.words} of {those}, "
        f"each {first.words}, then {second.words}"
    )
    kept = "numbers" if chosen is None else f"[x for x in numbers if {chosen.source}]"
    solution = (
        f"def {name}(numbers):\n    values = [{first.source} for x in {kept}]\n"
        f"    values = [{second.source} for x in values]\n    return {result.source}"
    )

    def function(numbers: list[int]) -> Any:
        kept = [x for x in numbers if chosen is None or chosen.function(x)]
        return result.function([second.function(first.function(x)) for x in kept])

    inputs = [[rng.randint(0, 40) for _ in range(rng.randint(1, 8))] for _ in range(_NUM_TESTS - 1)]
    return _made(name, words, solution, [[], *inputs], function)


def _made(
    name: str, words: str, solution: str, inputs: Sequence[Any], function: Callable[[Any], Any]
) -> Draft:
    data: Mapping[str, Any] = {
        "question": f"Write a Python function {name} that {words}.",
        "entry_point": name,
        "solution": solution,
        "tests": [{"args": [value], "result": function(value)} for value in inputs],
    }
    return Draft(words, data)
