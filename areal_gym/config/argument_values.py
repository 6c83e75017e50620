"""Check the values of settings that are keyword arguments of a plugin's function."""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from areal_gym.config.setting_errors import plain_reason
from areal_gym.errors import ConfigError, did_you_mean

_PLAIN = (bool, int, float, str, Mapping, list, tuple, type(None))
"""The types of the values that are given to the function as pydantic has read them."""


def fitting_values(
    function: Callable[..., Any], values: Mapping[str, Any], *, key: str
) -> dict[str, Any]:
    """Return the values with the types of the function's annotations: a number for the text "0.5".

    A value passes unchanged if the annotation of its parameter is missing or unknown to pydantic.

    Args:
        function: it takes the values as keyword arguments.
        values: by the names of parameters, which are known to exist.
        key: the setting that holds the values, such as "trainer.loss_kwargs".

    Raises:
        ConfigError: a value does not fit its parameter, is NaN, or is a mapping without entries
            where only null stands for the default.
    """
    annotations = _annotations(function)
    return {
        name: _fitting(annotations[name], value, f"{key}.{name}", _default(function, name))
        if name in annotations
        else value
        for name, value in values.items()
    }


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    is_plain = inspect.isroutine(function)
    try:
        return typing.get_type_hints(function if is_plain else type(function).__call__)
    except Exception:  # names that are imported for type checkers only
        return {}


def _default(function: Callable[..., Any], name: str) -> Any:
    parameter = inspect.signature(function).parameters.get(name)
    return inspect.Parameter.empty if parameter is None else parameter.default


def _fitting(annotation: Any, value: Any, setting: str, default: Any) -> Any:
    try:
        fitting = TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        raise _misfit(error, annotation, value, setting, default) from None
    except (PydanticUserError, TypeError, NameError, AttributeError):
        return value  # types that pydantic does not know
    numbers = fitting.values() if isinstance(fitting, Mapping) else (fitting,)
    if any(isinstance(number, float) and math.isnan(number) for number in numbers):
        raise ConfigError(
            f"{setting} = {value!r}: it takes a number, and NaN is none",
            hints=[_leave_out(default)],
        )
    if isinstance(fitting, Mapping) and not fitting and default is None:
        raise ConfigError(
            f"{setting} = {{}} names nothing, so that nothing would be learned from",
            hints=[f"as in {setting}={{NAME: VALUE}}", f"the default: {setting}=null"],
        )
    # Others, such as an iterator, would be used up or are not what the function got so far.
    return fitting if isinstance(fitting, _PLAIN) else value


def _misfit(
    error: ValidationError, annotation: Any, value: Any, setting: str, default: Any
) -> ConfigError:
    problems = error.errors()
    # Of an item that does not fit one alternative, the others say only that it is none of them.
    depth = max(len(problem["loc"]) for problem in problems)
    problems = [
        problem
        for problem in problems
        if len(problem["loc"]) == depth and problem["type"] != "callable_type"
    ] or problems
    reasons = list(dict.fromkeys(plain_reason(problem) for problem in problems))
    if depth == 0 and type(None) in typing.get_args(annotation):
        reasons.append("it takes null")
    first, *others = reasons
    reason = " or ".join([first, *(other.removeprefix("it takes ") for other in others)])
    if depth and isinstance(value, Mapping):
        *_, parent, item = ("", *problems[0]["loc"])
        is_name = item == "[key]"
        where = f"as a name, {parent} does not fit:" if is_name else f"for {item!r},"
        reason = f"{where} {reason}"
    hints: list[str | None] = []
    if isinstance(value, str):
        hints.append(did_you_mean(value, _literals(annotation)))
    hints.append(_leave_out(default))
    return ConfigError(f"{setting} = {value!r}: {reason}", hints=hints)


def _leave_out(default: Any) -> str | None:
    if isinstance(default, bool):
        return f"the default is {str(default).lower()}"
    if default is None or isinstance(default, int | float | str):
        return f"the default is {'null' if default is None else default}"
    return None


def _literals(annotation: Any) -> Sequence[str]:
    """Return the texts that an annotation, or an alternative of it, allows."""
    if typing.get_origin(annotation) is typing.Literal:
        return [word for word in typing.get_args(annotation) if isinstance(word, str)]
    return [word for part in typing.get_args(annotation) for word in _literals(part)]
