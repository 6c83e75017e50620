"""Tasks of the environment `code`: generated functions; rows of MBPP, HumanEval or your own."""

from __future__ import annotations

import ast
import builtins
import random
from collections.abc import Mapping
from functools import cache
from typing import Any

from areal_gym.envs.code.statements import parsed
from areal_gym.errors import DataError, UsageError
from areal_gym.tasks import Draft, GeneratedTasks, key_of_text
from areal_gym.tasks.row_checks import text_field, texts_field
from areal_gym.tasks.rows import SourceRow

CODE_LEVELS = (1, 2, 3)
_NUM_TESTS = 8
_NAMES = ("solve", "compute", "process", "run", "answer")


# Pieces of functions: words -> an expression of `x` (a number) or `values` (a list).
_CONDITIONS = {
    "that are even": "x % 2 == 0",
    "that are odd": "x % 2 == 1",
    "that are greater than {k}": "x > {k}",
    "that are less than {k}": "x < {k}",
    "that are divisible by {k}": "x % {k} == 0",
    "that are not divisible by {k}": "x % {k} != 0",
}
_MAPS = {
    **{"squared": "x * x", "doubled": "2 * x", "increased by {k}": "x + {k}"},
    **{"multiplied by {k}": "x * {k}", "negated": "-x", "reduced modulo {k}": "x % {k}"},
}
_RESULTS = {
    "the sum": "sum(values)",
    "the sorted list": "sorted(values)",
    "the largest (0 when there is none)": "max(values, default=0)",
    "the smallest (0 when there is none)": "min(values, default=0)",
    "how many different ones there are": "len(set(values))",
    "the list in reverse order": "values[::-1]",
}


@cache
def code_tasks(level: int) -> GeneratedTasks:
    """Return the tasks of a level, 1 to 3 (else UsageError): how many steps the function takes."""
    if isinstance(level, bool) or level not in CODE_LEVELS:
        raise UsageError(f"no level {level!r}", hints=["levels are 1 to 3"])
    return GeneratedTasks(f"code, level {level}", lambda rng: _draft(rng, level))


def _draft(rng: random.Random, level: int) -> Draft:
    name = rng.choice(_NAMES)
    first, first_source = _piece(rng, _MAPS, 60)
    second, second_source = _piece(rng, _MAPS, 60)
    if level == 1:
        words = f"takes a number x and returns it {first}, then {second}"
        solution = f"def {name}(x):\n    x = {first_source}\n    return {second_source}"
        inputs: list[Any] = rng.sample(range(100), _NUM_TESTS)
    else:
        result, result_source = rng.choice(list(_RESULTS.items()))
        those, kept = "all of them", "numbers"
        if level == 3:
            condition, condition_source = _piece(rng, _CONDITIONS, 20)
            those, kept = f"those {condition}", f"[x for x in numbers if {condition_source}]"
        words = (
            f"takes a list of numbers and returns {result} of {those}, each {first}, then {second}"
        )
        solution = (
            f"def {name}(numbers):\n    values = [{first_source} for x in {kept}]\n"
            f"    values = [{second_source} for x in values]\n    return {result_source}"
        )
        lengths = (rng.randint(1, 8) for _ in range(_NUM_TESTS - 1))
        inputs = [[], *([rng.randint(0, 40) for _ in range(length)] for length in lengths)]
    space: dict[str, Any] = {}
    exec(solution, space)
    data: Mapping[str, Any] = {
        "question": f"Write a Python function {name} that {words}.",
        "entry_point": name,
        "solution": solution,
        "tests": [{"args": [value], "result": space[name](value)} for value in inputs],
    }
    return Draft(words, data)


def _piece(rng: random.Random, pieces: Mapping[str, str], largest: int) -> tuple[str, str]:
    """Return the words and the source of a random piece, with a random number in both."""
    k = rng.randint(2, largest)
    words, source = rng.choice(list(pieces.items()))
    return words.format(k=k), source.format(k=k)


# ---- rows of files -------------------------------------------------------------------------------


def code_draft(row: SourceRow) -> Draft:
    """Return the task of a row: of MBPP or HumanEval, or arguments and results; else DataError."""
    if "test_list" in row.data and isinstance(row.data.get("test"), str):
        data = _mbpp_plus(row)
    elif "test_list" in row.data:
        data = _mbpp(row)
    elif "entry_point" in row.data and "test" in row.data:
        data = _humaneval(row)
    else:
        data = _plain(row)
    return Draft(key_of_text(data["question"]), data)


def _mbpp(row: SourceRow) -> dict[str, Any]:
    question = text_field(row, "text" if "text" in row.data else "prompt")
    asserts = texts_field(row, "test_list")
    setup = row.data.get("test_setup_code") or "\n".join(row.data.get("test_imports") or ())
    name = _name_of(asserts, row.data.get("code"))
    return {
        "question": f"{question} The function is called {name}." if name else question,
        "entry_point": name or "",
        "solution": row.data.get("code"),
        "checks": [_call_of(text) or {"check": f"{setup}\n{text}"} for text in asserts],
    }


def _mbpp_plus(row: SourceRow) -> dict[str, Any]:
    """MBPP+ of EvalPlus: `test` has the base tests and many more; `test_list` has the first."""
    data = _mbpp(row)
    first = texts_field(row, "test_list")[0]
    return {
        **data,
        "question": f"{data['question']} It passes this test:\n\n{first}",
        "checks": [{"check": text_field(row, "test")}],
    }


def _humaneval(row: SourceRow) -> dict[str, Any]:
    prompt, name = text_field(row, "prompt"), text_field(row, "entry_point")
    solution = row.data.get("canonical_solution")
    check = f"{text_field(row, 'test')}\ncheck({name})"
    return {
        "question": f"Complete this Python function; write all of it:\n\n{prompt}",
        "entry_point": name,
        "prompt": prompt,
        "solution": None if solution is None else f"{prompt}{solution}",
        "checks": [{"check": check}],
    }


def _plain(row: SourceRow) -> dict[str, Any]:
    tests = row.data.get("tests")
    if not isinstance(tests, list) or not tests or not all(map(_is_test, tests)):
        raise DataError(
            f"{row.where}: tests = {tests!r}; [{{'args': [...], 'result': ...}}, ...] is needed",
            hints=["or rows of MBPP (test_list) or HumanEval (test, entry_point)"],
        )
    name = text_field(row, "entry_point")
    return {
        "question": text_field(row, "question"),
        "entry_point": name,
        "solution": row.data.get("solution"),
        "checks": [as_call(name, test) for test in tests],
    }


def _is_test(test: object) -> bool:
    return isinstance(test, dict) and isinstance(test.get("args"), list) and "result" in test


def _call_of(text: str) -> dict[str, Any] | None:
    """Convert `assert f(2) == 4` to a call and its result; None for any other statement."""
    match parsed(text.strip()):
        case ast.Module(
            body=[
                ast.Assert(
                    test=ast.Compare(left=ast.Call() as call, ops=[ast.Eq()], comparators=[right])
                )
            ]
        ):
            try:
                result = ast.literal_eval(right)
            except ValueError:
                return None
            if isinstance(result, int | float | str | list | tuple | dict | None):
                return {"call": ast.unparse(call), "result": result}
    return None


def _name_of(asserts: list[str], solution: object) -> str | None:
    """Return the name of the function under test; None if the asserts call no function."""
    trees = filter(None, (parsed(text.strip()) for text in asserts))
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = [call.func.id for call in calls if isinstance(call.func, ast.Name)]
    given = parsed(solution) if isinstance(solution, str) else None
    body = given.body if given is not None else []
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    preferred = (
        [name for name in called if name in defined],
        [name for name in called if not hasattr(builtins, name)],
        [name for name in called if name not in _AROUND],
    )
    return next((names[0] for names in preferred if names), None)


_AROUND = {"set", "sorted", "list", "tuple", "abs", "len", "round", "str", "int", "float", "range"}
"""Built-in functions that tests put around a call."""


def as_call(entry_point: str, test: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a test of arguments and result (`{"args": [...], "result": ...}`) to a call."""
    arguments = ", ".join(map(repr, test["args"]))
    return {"call": f"{entry_point}({arguments})", "result": test["result"]}
