"""A world: the state that tools of a domain read and change, for one episode."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, ClassVar, Literal, NamedTuple

from areal_gym.envs.tools import Tool
from areal_gym.errors import DataError

Requestor = Literal["assistant", "user"]


class CallResult(NamedTuple):
    """What a tool call gave."""

    text: str
    is_error: bool


class ToolInfo(NamedTuple):
    """A tool and what the benchmark knows of it."""

    tool: Tool
    kind: Literal["read", "write", "generic"]
    mutates: bool
    schema: Mapping[str, Any]
    """OpenAI's description of the function."""

    @classmethod
    def of(cls, schema: Mapping[str, Any], kind: Any, mutates: bool) -> ToolInfo:
        """A tool that is described so."""
        function = schema["function"]
        tool = Tool(
            name=function["name"],
            description=function["description"],
            parameters=function["parameters"],
        )
        return cls(tool, kind, mutates, schema)


Tools = Mapping[Requestor, Mapping[str, ToolInfo]]
"""Of a domain, for either side."""


@cache
def load_tools(domain: str) -> Tools:
    """The tools of a domain in our own words, from `schemas/DOMAIN.json`."""
    text = resources.files(__package__).joinpath("schemas", f"{domain}.json").read_text("utf-8")
    return {
        side: {
            name: ToolInfo.of(row["openai_schema"], row["type"], row["mutates_state"])
            for name, row in rows.items()
        }
        for side, rows in json.loads(text).items()
    }


class World:
    """Base of the domains' worlds: finds the tool, runs it, writes its result as text.

    A tool is a method of the same name on the object that `side` gives. It returns a text, a
    record or a list of records, and raises an exception to refuse: whatever it raises is told to
    the caller as `Error: ...`, as in the benchmark, where this is also what wrong arguments give.
    """

    domain: ClassVar[str]

    def side(self, requestor: Requestor) -> object:
        """Whose methods are the tools of that party."""
        return self

    def sync(self) -> None:
        """Let the two sides of the world see each other; after every call."""

    def initialize(self, actions: Sequence[Mapping[str, Any]]) -> None:
        """Run a task's initialisation actions (`env_type`, `func_name`, `arguments`)."""
        for action in actions:
            self._function(action["env_type"], action["func_name"])(**action["arguments"])
            self.sync()

    def call(
        self,
        requestor: Requestor,
        name: str,
        arguments: Mapping[str, Any],
        *,
        should_sync: bool = True,
    ) -> CallResult:
        """Run a tool call of one party; mistakes are results, too."""
        if name not in load_tools(self.domain)[requestor]:
            return CallResult(f"Error: Tool '{name}' not found.", True)
        try:
            value = getattr(self.side(requestor), name)(**arguments)
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            result = CallResult(text, False)
        except Exception as error:  # part of the benchmark's contract, see the class
            result = CallResult(f"Error: {error}", True)
        if should_sync:
            self.sync()
        return result

    def holds(self, requestor: Requestor, assertion: str, arguments: Mapping[str, Any]) -> bool:
        """Whether an assertion about the state is true."""
        return bool(self._function(requestor, assertion)(**arguments))

    def _function(self, requestor: Requestor, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] | None = getattr(self.side(requestor), name, None)
        if function is None:
            raise DataError(
                f"a task uses {name!r} of the {requestor}, which tau2/{self.domain} has not",
                hints=["the tasks are of a version that areal-gym does not know"],
            )
        return function

    def state(self) -> tuple[object, ...]:
        """What is compared to decide whether two worlds are in the same state."""
        raise NotImplementedError

    def digests(self) -> tuple[str, str | None]:
        """The benchmark's hashes of the assistant's and of the user's database."""
        raise NotImplementedError
