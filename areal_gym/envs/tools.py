"""Tools: functions that an assistant may call, described by a JSON schema."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from areal_gym.errors import ToolError, UsageError
from areal_gym.message_types import Content

__all__ = ["Tool", "tool"]

_JSON_TYPES: Mapping[Any, str] = {
    **{str: "string", int: "integer", float: "number", bool: "boolean"},
    **{list: "array", dict: "object"},
}
_PYTHON_TYPES: Mapping[str, Any] = {
    **{json_type: python_type for python_type, json_type in _JSON_TYPES.items()},
    "number": (int, float),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A function the policy may call.

    Example::

        @tool
        def add(a: int, b: int) -> str:
            \"\"\"Add two numbers.\"\"\"
            return str(a + b)

    On a method, the tools of an object use that object, such as the state of an episode.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments object."""
    function: Callable[..., Content | Awaitable[Content]] | None = None
    """None for a tool whose calls the environment answers by itself."""
    is_method: bool = False
    """Whether the function takes `self`: `bound_to` gives it an object."""

    def __get__(self, instance: object, owner: type | None = None) -> Tool:
        """Return the tool, of an object's attribute with that object as `self`."""
        return self if instance is None else self.bound_to(instance)

    def bound_to(self, instance: object) -> Tool:
        """Return the tool of an object: a method is called with it, a function as it is."""
        if not self.is_method or self.function is None:
            return self
        return replace(self, function=functools.partial(self.function, instance), is_method=False)

    def schema(self) -> dict[str, Any]:
        """Return the function's description in OpenAI's format, as chat templates take it."""
        function = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**function, "parameters": dict(self.parameters)}}

    async def __call__(self, arguments: Mapping[str, Any]) -> Content:
        """Check the arguments' names and outermost types, and call the function.

        Wrong arguments, and what the tool objects to, are a ToolError, which is told to the model.
        """
        if self.function is None:
            raise ToolError(f"{self.name} cannot be called here")
        if self.is_method:
            raise UsageError(
                f"tool {self.name!r} is a method and has no object",
                hints=[f"take it of an object: Shop().{self.name}, not Shop.{self.name}"],
            )
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
        problems = [f"missing: {', '.join(missing)}"] if missing else []
        problems += [f"unknown: {', '.join(unknown)}"] if unknown else []
        problems += mistyped
        if problems:
            raise ToolError(f"{self.name} takes ({', '.join(properties)}); {'; '.join(problems)}")


_Function = Callable[..., Content | Awaitable[Content]]


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
        return functools.partial(tool, in_thread=in_thread)
    hints = typing.get_type_hints(function)
    parameters = dict(inspect.signature(function).parameters)
    is_method = next(iter(parameters), None) == "self" and not inspect.ismethod(function)
    parameters.pop("self", None)
    properties = {name: _json_schema(hints.get(name, str)) for name in parameters}
    required = [name for name, p in parameters.items() if p.default is p.empty]
    return Tool(
        name=function.__name__,
        description=(inspect.getdoc(function) or "").split("\n\n")[0].strip(),
        parameters={"type": "object", "properties": properties, "required": required},
        function=_on_thread(function) if in_thread else function,
        is_method=is_method,
    )


def _on_thread(function: Callable[..., Any]) -> Callable[..., Awaitable[Content]]:
    @functools.wraps(function)
    async def call(*instance: Any, **arguments: Any) -> Content:
        answer: Future[Content] = Future()
        answer.set_running_or_notify_cancel()  # a caller that stops waiting does not undo the call

        def work() -> None:
            try:
                answer.set_result(function(*instance, **arguments))
            except Exception as error:
                answer.set_exception(error)

        # A pool would not do: a process waits for its threads at the end, for ever if one hangs.
        threading.Thread(
            target=work, name=f"areal-gym-tool-{function.__name__}", daemon=True
        ).start()
        return await asyncio.wrap_future(answer)

    return call


def _fits(value: object, schema: Mapping[str, Any]) -> bool:
    """Return whether the value is of the schema's outermost type, if it has one."""
    expected = _PYTHON_TYPES.get(schema.get("type", ""), object)
    if isinstance(value, bool):  # an int for Python, not for JSON
        return expected in (bool, object)
    return isinstance(value, expected)


def _json_schema(annotation: Any) -> dict[str, Any]:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        options = [a for a in typing.get_args(annotation) if a is not type(None)]
        schemas = [_json_schema(option) for option in options]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
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


def one_argument_tool(
    name: str,
    description: str,
    argument: Mapping[str, Any],
    function: Callable[..., str | Awaitable[str]],
) -> Tool:
    """Return a tool with one argument, which is needed: its name, mapped to its JSON schema."""
    properties = dict(argument)
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return Tool(name=name, description=description, parameters=parameters, function=function)


def chosen_tools(names: Sequence[str], *available: Tool) -> tuple[Tool, ...]:
    """Return the tools of these names, in their order; raise UsageError for other names or none."""
    by_name = {tool.name: tool for tool in available}
    if isinstance(names, str) or not names or any(name not in by_name for name in names):
        *others, last = by_name
        raise UsageError(f"tools = {names!r}: a list of {', '.join(others)} and {last}")
    return tuple(by_name[name] for name in dict.fromkeys(names))
