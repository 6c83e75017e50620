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


def make_with(factory: Any, kwargs: Mapping[str, Any], *, key: str, id: str) -> Any:
    """Return `factory(**kwargs)`; an error names the setting that is to blame.

    Args:
        factory: a class of a plugin, or of this package.
        kwargs: from the settings.
        key: the setting that they come from, such as "env.kwargs".
        id: the registered id.

    Raises:
        ConfigError: an argument is unknown, is missing, or has the wrong type.
        GymError: what the factory raises on purpose.
    """
    check_arguments(factory, kwargs, key=key, id=id)
    try:
        return factory(**kwargs)
    except GymError:
        raise
    except Exception as error:
        message = f"{key}: {id!r} cannot be made with these arguments: {error!r}"
        raise ConfigError(message, hints=[f"its arguments: areal-gym show {id}"]) from error


def check_arguments(factory: Any, kwargs: Mapping[str, Any], *, key: str, id: str) -> None:
    """Compare arguments with the signature and its annotations, as far as pydantic knows them.

    Raises:
        ConfigError: an argument is unknown, is missing, or has the wrong type.
    """
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # classes in C have none
        return
    hints = [f"its arguments: areal-gym show {id}"]
    if key == "env.kwargs":
        hints.append("to leave out those of a run or a recipe: env.kwargs={}")
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        known = list(signature.parameters)
        near = [did_you_mean(name, known) for name in kwargs if name not in known]
        why = re.sub(r"^[\w.]+\(\) ", "", str(error))
        raise ConfigError(
            f"{key}: the arguments of {id!r} do not fit: {why}", hints=[*filter(None, near), *hints]
        ) from error
    check_types(factory, kwargs, key=key, id=id)


def check_types(factory: Any, kwargs: Mapping[str, Any], *, key: str, id: str) -> None:
    """Compare arguments with the annotations of those parameters that have any.

    Raises:
        ConfigError: an argument has the wrong type.
    """
    function = factory.__init__ if inspect.isclass(factory) else factory
    try:
        types = typing.get_type_hints(function)
    except Exception:  # names that exist for type checkers only
        return
    for name, value in kwargs.items():
        if name not in types:
            continue
        try:
            TypeAdapter(types[name]).validate_python(value, strict=False)
        except ValidationError as error:
            problem = str(error.errors()[0]["msg"]).lower()
            raise ConfigError(
                f"{key}: the arguments of {id!r} do not fit: {name} = {value!r}: {problem}",
                hints=[f"its arguments: areal-gym show {id}"],
            ) from None
        except (PydanticUserError, TypeError, NameError, AttributeError):
            pass  # types that pydantic does not know
