"""Keyword arguments from settings, checked before anything is made of them."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from areal_gym.errors import ConfigError, GymError, did_you_mean


def make_with(thing: Any, kwargs: Mapping[str, Any], *, key: str, id: str) -> Any:
    """Makes `thing(**kwargs)`; whatever fails says which setting is to blame.

    Args:
        thing: a class of a plugin, or of this package.
        kwargs: from the settings.
        key: the setting that they come from, such as "env.kwargs".
        id: the registered id.

    Raises:
        ConfigError: an argument is unknown, is missing, or has the wrong type.
        GymError: what the thing raises on purpose.
    """
    check_arguments(thing, kwargs, key=key, id=id)
    try:
        return thing(**kwargs)
    except GymError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key}: {id!r} cannot be made with these arguments: {error!r}",
            hints=[f"its arguments: areal-gym show {id}"],
        ) from error


def check_arguments(thing: Any, kwargs: Mapping[str, Any], *, key: str, id: str) -> None:
    """Compares arguments with the signature and its annotations, as far as pydantic knows them.

    Raises:
        ConfigError: an argument is unknown, is missing, or has the wrong type.
    """
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):  # classes in C have none
        return
    hints = [f"its arguments: areal-gym show {id}"]
    if key == "env.kwargs":
        hints.append("to leave out those of a run or a recipe: env.kwargs={}")
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        why, near = misfit(error, thing, kwargs)
        raise ConfigError(
            f"{key}: the arguments of {id!r} do not fit: {why}", hints=[*near, *hints]
        ) from error
    check_types(thing, kwargs, key=key, id=id)


def check_types(thing: Any, kwargs: Mapping[str, Any], *, key: str, id: str) -> None:
    """Compares arguments with the annotations of those parameters that have any.

    Raises:
        ConfigError: one has the wrong type.
    """
    types = _annotations(thing)
    for name, value in kwargs.items():
        problem = _type_problem(types.get(name), value) if name in types else None
        if problem is not None:
            raise ConfigError(
                f"{key}: the arguments of {id!r} do not fit: {name} = {value!r}: {problem}",
                hints=[f"its arguments: areal-gym show {id}"],
            )


def misfit(error: TypeError, thing: Any, given: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Returns what is wrong with the arguments, and hints at those that may have been meant."""
    known = list(inspect.signature(thing).parameters)
    near = [did_you_mean(name, known) for name in given if name not in known]
    return re.sub(r"^[\w.]+\(\) ", "", str(error)), [hint for hint in near if hint]


def _annotations(thing: Any) -> dict[str, Any]:
    function = thing.__init__ if inspect.isclass(thing) else thing
    try:
        return typing.get_type_hints(function)
    except Exception:  # names that exist for type checkers only
        return {}


def _type_problem(annotation: Any, value: Any) -> str | None:
    """Returns why the value is not of that type; None where it is, or nobody can tell."""
    try:
        adapter = TypeAdapter(annotation)
        adapter.validate_python(value, strict=False)
    except ValidationError as error:
        return str(error.errors()[0]["msg"]).lower()
    except (PydanticUserError, TypeError, NameError, AttributeError):
        return None
    return None
