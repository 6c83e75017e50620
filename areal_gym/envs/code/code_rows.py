"""Tasks of the environment `code` from files: MBPP, HumanEval, or arguments and results."""

from __future__ import annotations

import ast
import builtins
from functools import cache
from pathlib import Path
from typing import Any

from areal_gym.envs.code.running import as_call
from areal_gym.envs.data_files import SourceRow, text_field
from areal_gym.envs.questions import file_tasks
from areal_gym.envs.tasks import Draft, RowTasks, key_of_text
from areal_gym.errors import DataError


@cache
def code_file_tasks(path: Path, test_path: Path | None, skip_broken: bool) -> RowTasks:
    """Return the tasks of files; the arguments are those of `CodeEnv`."""
    return file_tasks(path, test_path, _draft, skip_broken=skip_broken)


def _draft(row: SourceRow) -> Draft:
    if "test_list" in row.data:
        data = _mbpp(row)
    elif "entry_point" in row.data and "test" in row.data:
        data = _humaneval(row)
    else:
        data = _plain(row)
    return Draft(key_of_text(data["question"]), data)


def _mbpp(row: SourceRow) -> dict[str, Any]:
    """Convert a row with `text` (or `prompt`), `code`, `test_list`, `test_setup_code` (or
    `test_imports`)."""
    question = text_field(row, "text" if "text" in row.data else "prompt")
    asserts = _texts(row, "test_list")
    setup = row.data.get("test_setup_code") or "\n".join(row.data.get("test_imports") or ())
    calls = [_call_of(text) for text in asserts]
    name = _name_of(asserts, row.data.get("code"))
    return {
        "question": f"{question} The function is called {name}." if name else question,
        "entry_point": name or "",
        "solution": row.data.get("code"),
        "checks": [
            call or {"check": f"{setup}\n{text}"} for call, text in zip(calls, asserts, strict=True)
        ],
    }


def _humaneval(row: SourceRow) -> dict[str, Any]:
    """Convert a row with `prompt` (signature and docstring), `entry_point`, `test`,
    `canonical_solution`."""
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
    """Convert a row with `question`, `entry_point`, `tests`: [{"args": [...], "result": ...}],
    maybe `solution`."""
    tests = row.data.get("tests")
    if (
        not isinstance(tests, list)
        or not tests
        or not all(
            isinstance(t, dict) and isinstance(t.get("args"), list) and "result" in t for t in tests
        )
    ):
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


def _call_of(text: str) -> dict[str, Any] | None:
    """Convert `assert f(2) == 4` to a call and its result; None for any other statement."""
    try:
        (statement,) = ast.parse(text.strip()).body
        match statement:
            case ast.Assert(
                test=ast.Compare(left=ast.Call() as call, ops=[ast.Eq()], comparators=[r])
            ):
                result = ast.literal_eval(r)
                ok = isinstance(result, int | float | str | list | tuple | dict | None)
                return {"call": ast.unparse(call), "result": result} if ok else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        pass
    return None


def _name_of(asserts: list[str], solution: object) -> str | None:
    """Return the name of the function under test.

    Preferred is the first called name that the solution defines, then the first that is not a
    built-in function, then the first.
    """
    called = [name for text in asserts for name in _called(text)]
    defined = _defined(solution) if isinstance(solution, str) else set()
    preferred = (
        [name for name in called if name in defined],
        [name for name in called if not hasattr(builtins, name)],
        [name for name in called if name not in _AROUND],
    )
    return next((names[0] for names in preferred if names), None)


_AROUND = {"set", "sorted", "list", "tuple", "abs", "len", "round", "str", "int", "float", "range"}
"""Built-in functions that tests put around a call."""


def _called(text: str) -> list[str]:
    try:
        nodes = list(ast.walk(ast.parse(text.strip())))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]


def _defined(source: str) -> set[str]:
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def _texts(row: SourceRow, name: str) -> list[str]:
    values = row.data[name]
    if not isinstance(values, list) or not values or not all(isinstance(v, str) for v in values):
        raise DataError(f"{row.where}: field {name!r} is {values!r}; a list of texts is needed")
    return values
