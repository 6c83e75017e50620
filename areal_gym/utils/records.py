"""Frozen records that are made by the thousand."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

_T = TypeVar("_T")


def quickly_made(cls: type[_T]) -> type[_T]:
    """Give a frozen dataclass with slots an `__init__` that takes two thirds of the time.

    Its own one sets each field by `object.__setattr__`, which finds out every time where the field
    is kept. This one asks the slot. Nothing else changes: arguments, defaults, `__post_init__`.

    Example::

        @quickly_made
        @dataclass(frozen=True, kw_only=True, slots=True)
        class Turn: ...
    """
    slow_init: Any = cls.__init__
    known: dict[str, Any] = {}
    lines = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        name = field.name
        known[f"set_{name}"] = cls.__dict__[name].__set__
        value = name
        if field.default_factory is not dataclasses.MISSING:
            known[f"new_{name}"] = field.default_factory
            known["unset"] = slow_init.__kwdefaults__[name]
            value = f"new_{name}() if {name} is unset else {name}"
        lines.append(f"    set_{name}(self, {value})")
    if hasattr(cls, "__post_init__"):
        lines.append("    self.__post_init__()")
    names = ", ".join(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
    exec(f"def __init__(self, *, {names}):\n" + "\n".join(lines), known)
    init = known["__init__"]
    for attribute in ("__kwdefaults__", "__annotations__", "__qualname__", "__module__"):
        setattr(init, attribute, getattr(slow_init, attribute))
    cls.__init__ = init  # type: ignore[method-assign]
    return cls
