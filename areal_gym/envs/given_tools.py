"""Tools that a user gives an environment: functions, `@tool`s, classes, or references to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from areal_gym.envs.tools import Tool, tool
from areal_gym.errors import ConfigError, UsageError, choices
from areal_gym.plugins import registry
from areal_gym.utils.code_references import is_code_reference, load_reference
from areal_gym.utils.markup import short
from areal_gym.utils.session_objects import with_objects


class GivenTools:
    """The tools of an environment; those of a class are of a new object in each episode.

    `given` is one, or a list, of: a function with types and a docstring, an `@areal_gym.tool`, a
    class or an object with such methods, `FILE.py:NAME`, `module:NAME`, or the id of a tool of a
    plugin (`areal-gym list tools`).

    Raises:
        ConfigError: a reference does not load, or is no tool; two tools have one name.
        UnknownIdError: no plugin offers the id.
    """

    def __init__(self, given: Any) -> None:
        each = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
        self._sources = [_source(one) for one in with_objects(list(each))]
        names = [tool.name for tool in self.fresh()]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two tools are called {name!r}", hints=["rename one of them"])

    def fresh(self) -> tuple[Tool, ...]:
        """Return the tools for a new episode."""
        return tuple(tool for source in self._sources for tool in source())


def _source(given: Any) -> Callable[[], Sequence[Tool]]:
    """Return a function that gives the tools of one reference."""
    shown = short(given if isinstance(given, str) else repr(given), 80)
    if isinstance(given, str):
        given = _loaded(given)
    if isinstance(given, Tool):
        if given.is_method:
            raise ConfigError(
                f"tool {given.name!r} is a method, and {shown} gives it no object",
                hints=["name the class: its objects are made, and all of its tools taken"],
            )
        return lambda: (given,)
    if inspect.isclass(given):
        return lambda: _tools_of(_made(given, shown), shown)
    if inspect.isroutine(given):
        try:
            made = tool(given)
        except (TypeError, NameError) as error:
            raise ConfigError(f"{shown} is no tool: {error}") from error
        return lambda: (made,)
    tools = _tools_of(given, shown)
    return lambda: tools


def _loaded(reference: str) -> Any:
    ids = [entry.id for entry in registry().entries("tools")]
    if reference in ids:
        return registry().load("tools", reference)
    if is_code_reference(reference):
        return load_reference(reference, "tool")
    hint = f"write {reference}:NAME" if reference.endswith(".py") else "write FILE.py:NAME"
    raise UsageError(
        f"{reference!r} names no tool", hints=[hint, *(choices(reference, ids) if ids else ())]
    )


def _made(cls: type, shown: str) -> Any:
    try:
        return cls()
    except TypeError as error:
        raise ConfigError(
            f"{shown}: an object of the class is made for each episode, without arguments: {error}",
            hints=["give its arguments defaults"],
        ) from error


def _tools_of(thing: Any, shown: str) -> tuple[Tool, ...]:
    """Return the tools among the attributes of an object, in the order of their definition."""
    names = [name for cls in reversed(type(thing).__mro__) for name in vars(cls)]
    values = (
        getattr(thing, name, None)
        for name in dict.fromkeys([*names, *getattr(thing, "__dict__", ())])
    )
    tools = tuple(value for value in values if isinstance(value, Tool))
    if not tools:
        raise ConfigError(
            f"{shown} has no tool",
            hints=["mark its methods with @areal_gym.tool, or name a function"],
        )
    return tools
