"""Tools: functions that an assistant may call, described by a JSON schema."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import types
import typing
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from areal_gym.errors import ToolError

__all__ = ["Tool", "tool"]

_JSON_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}


_PYTHON_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A function the policy may call.

    Example::

        @tool
        def add(a: int, b: int) -> str:
            \"\"\"Add two numbers.\"\"\"
            return str(a + b)
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments object."""
    function: Callable[..., str | Awaitable[str]] | None = None
    """None for a tool whose calls the environment answers by itself."""

    def schema(self) -> dict[str, Any]:
        """Return the function's description in OpenAI's format, as chat templates take it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """Check the arguments' names and outermost types, and call the function.

        Raises:
            ToolError: arguments missing, unknown or of a wrong type, or the tool says so; it is
                told to the model.
        """
        if self.function is None:
            raise ToolError(f"{self.name} cannot be called here")
        self._check_arguments(arguments)
        result = self.function(**arguments)
        if isinstance(result, str) or not inspect.isawaitable(result):
            return result
        return await result

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Raise ToolError if the arguments are wrong; an optional one may be null."""
        properties = self.parameters.get("properties", {})
        required = self.parameters.get("required", ())
        unknown = [str(name) for name in arguments if name not in properties]
        missing = [name for name in required if name not in arguments]
        mistyped = [
            f"{name} is no {properties[name]['type']}"
            for name, value in arguments.items()
            if name in properties
            and not (value is None and name not in required)
            and not _fits(value, properties[name])
        ]
        if unknown or missing or mistyped:
            problems = []
            if missing:
                problems.append(f"missing: {', '.join(missing)}")
            if unknown:
                problems.append(f"unknown: {', '.join(unknown)}")
            problems += mistyped
            raise ToolError(f"{self.name} takes ({', '.join(properties)}); {'; '.join(problems)}")


_Function = Callable[..., str | Awaitable[str]]


@typing.overload
def tool(function: _Function) -> Tool: ...


@typing.overload
def tool(*, in_thread: bool) -> Callable[[_Function], Tool]: ...


def tool(
    function: _Function | None = None, *, in_thread: bool = False
) -> Tool | Callable[[_Function], Tool]:
    """Make a `Tool` of a typed function: its name, first docstring paragraph and signature.

    Args:
        function: the tool; a plain function is called on the event loop, which does nothing else
            meanwhile: right for what is quick.
        in_thread: for plain functions that wait, `@tool(in_thread=True)`: each call has a thread,
            other episodes go on, and a time limit can end the wait (not the thread).
    """
    if function is None:
        return functools.partial(_make_tool, in_thread=in_thread)
    return _make_tool(function, in_thread=in_thread)


def _make_tool(function: _Function, *, in_thread: bool) -> Tool:
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        properties[name] = _json_schema(hints.get(name, str))
        if parameter.default is parameter.empty:
            required.append(name)
    return Tool(
        name=function.__name__,
        description=(inspect.getdoc(function) or "").split("\n\n")[0].strip(),
        parameters={"type": "object", "properties": properties, "required": required},
        function=_on_thread(function) if in_thread else function,
    )


def _on_thread(function: Callable[..., Any]) -> Callable[..., Awaitable[str]]:
    @functools.wraps(function)
    async def call(**arguments: Any) -> str:
        answer: Future[str] = Future()
        answer.set_running_or_notify_cancel()  # a caller that stops waiting does not undo the call

        def work() -> None:
            try:
                answer.set_result(function(**arguments))
            except Exception as error:
                answer.set_exception(error)

        # A pool would not do: a process waits for its threads at the end, for ever if one hangs.
        threading.Thread(
            target=work, name=f"areal-gym-tool-{function.__name__}", daemon=True
        ).start()
        return await asyncio.wrap_future(answer)

    return call


def _fits(value: object, schema: Mapping[str, Any]) -> bool:
    """Return whether the value is of the schema's outermost type; schemas without one take
    anything."""
    expected = _PYTHON_TYPES.get(schema.get("type", ""))
    if expected is None:
        return True
    if isinstance(value, bool):  # an int for Python, not for JSON
        return expected is bool
    return isinstance(value, expected)


def _json_schema(annotation: Any) -> dict[str, Any]:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        options = [a for a in typing.get_args(annotation) if a is not type(None)]
        return (
            _json_schema(options[0])
            if len(options) == 1
            else {"anyOf": [_json_schema(a) for a in options]}
        )
    if origin is list:
        (item,) = typing.get_args(annotation)
        return {"type": "array", "items": _json_schema(item)}
    json_type = _JSON_TYPES.get(origin or annotation)
    if json_type is None:
        raise TypeError(
            f"no JSON schema for {annotation!r}; use str, int, float, bool, list or dict"
        )
    return {"type": json_type}


def cut_text(text: str, limit: int) -> str:
    """Return at most `limit` characters of a tool's output, and how many are left out."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}... ({len(text) - limit} more characters)"
