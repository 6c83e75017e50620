"""Arguments that every environment takes, whatever its class: they make a wrapper around it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from areal_gym.utils.code_references import load_reference

ENV_WRAPPERS: Mapping[tuple[str, ...], str] = {
    ("mcp_servers", "mcp_turns"): "areal_gym.envs.mcp_tools.env_with_servers:EnvWithServers",
}
"""The names of the arguments, the one that asks for the wrapper first -> the wrapper's class."""


def split_wrapper_arguments(
    factory: Any, arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """Return an environment's own arguments, and a function that wraps the made environment.

    An environment whose signature has such an argument itself gets it.
    """
    own, wrappers = dict(arguments), []
    for names, reference in ENV_WRAPPERS.items():
        if not own.get(names[0]) or names[0] in inspect.signature(factory).parameters:
            continue
        taken = {name: own.pop(name) for name in names if name in own}
        wrappers.append((reference, taken))

    def wrap(made: Any) -> Any:
        for reference, taken in wrappers:
            made = load_reference(reference, "environment")(made, **taken)
        return made

    return own, wrap
