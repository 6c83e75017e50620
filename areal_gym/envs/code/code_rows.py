"""Tasks of the environment `code` from files: MBPP, HumanEval, or arguments and results."""

from __future__ import annotations

import ast
import builtins
from typing import Any

from areal_gym.envs.code.running import as_call
from areal_gym.envs.code.statements import parsed
from areal_gym.envs.data_files import SourceRow, text_field, texts_field
from areal_gym.envs.tasks import Draft, key_of_text
from areal_gym.errors import DataError


def code_draft(row: SourceRow) -> Draft:
    """Return the task of a row of MBPP, of HumanEval, or with arguments and results.

    Raises:
        DataError: the row is none of them.
    """
    if "test_list" in row.data:
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
    """Return the name of the function under test.

    Preferred is the first called name that the solution defines, then the first that is not a
    built-in function, then the first.
    """
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
