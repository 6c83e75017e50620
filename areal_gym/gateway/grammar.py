"""What an answer must look like, where a client says so: a schema of JSON, or a call of a tool.

The engine keeps to it, if it can: it masks tokens while it samples. The log-probabilities that it
tells are then those of what the mask has left (measured with SGLang 0.5.23 and a policy of random
weights: 0 for a token without alternative, which the policy itself gives e^-5.9), and not the
policy's own. So nothing is learned from such answers, and sessions of a training run refuse them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_gym.chat import Renderer
from areal_gym.chat.tool_call_formats import write_call
from areal_gym.engines.base import Engine, Grammar, GrammarEngine
from areal_gym.errors import ConfigError
from areal_gym.gateway.error_replies import ApiError
from areal_gym.utils.markup import short


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How an answer must look; one of the two."""

    param: str
    """The field of the request that says so."""
    schema: Mapping[str, Any] | None = None
    """JSON of this schema, and nothing else."""
    calls: Mapping[str, Mapping[str, Any]] | None = None
    """A call of one of these tools: their names, and the schemas of their arguments."""

    def grammar(self, engine: Engine, renderer: Renderer, dialect: str) -> Grammar:
        """What the engine is told.

        Raises:
            ApiError: the engine cannot do it, or the policy's way of writing is in the way.
        """
        if not isinstance(engine, GrammarEngine):
            name = type(engine).__name__
            raise self._refused(f"{name} samples freely; an engine of SGLang servers can")
        if self.calls is None:
            if renderer.opens_thinking:
                raise self._refused("the chat template begins answers with thoughts")
            return "json_schema", json.dumps(self.schema)
        try:
            parts = [_call(name, schema, dialect) for name, schema in self.calls.items()]
        except ConfigError as error:
            raise self._refused(str(error)) from None
        shape = {"type": "or", "elements": parts}
        return "structural_tag", json.dumps({"type": "structural_tag", "format": shape})

    def refuse_training(self) -> None:
        """Raise ApiError: somebody learns from the answer."""
        raise self._refused(
            "the policy learns from its answers, and under a grammar they are not sampled from it: "
            "say in the prompt what an answer must look like, and let the environment reward it "
            "(areal-gym serve takes it)"
        )

    def _refused(self, why: str) -> ApiError:
        return ApiError(
            400,
            f"{self.param} is not supported: {why}",
            code="unsupported_value",
            param=self.param,
        )


def form_of(param: str, shape: Mapping[str, Any] | None) -> Form | None:
    """What `response_format` or `text.format` asks for; None is any text.

    Raises:
        ApiError: there is no such format, or no schema in it.
    """
    kind = "text" if shape is None else shape.get("type", "text")
    if shape is None or kind == "text":
        return None
    if kind == "json_object":
        return Form(param=param, schema={"type": "object"})
    if kind != "json_schema":
        raise unsupported(param, kind, "text, json_object and json_schema are")
    described = shape.get("json_schema", shape)
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise ApiError(400, f"{param} = json_schema needs the schema, an object", param=param)
    return Form(param=param, schema=schema)


def called_tools(choice: object, tools: Sequence[Mapping[str, Any]]) -> Form | None:
    """The call that `tool_choice` insists on; None: the policy decides.

    Args:
        choice: a word, or the name of one tool in any API's words.
        tools: those that there are, in OpenAI's shape.

    Raises:
        ApiError: there is no such choice, or no such tool.
    """
    if choice in (None, "auto", "none"):
        return None
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    named = choice.get("function", choice) if isinstance(choice, dict) else None
    if isinstance(named, dict) and isinstance(named.get("name"), str):
        names = [named["name"]]
    elif choice in ("required", "any"):
        names = list(schemas)
    else:
        raise unsupported("tool_choice", choice, "auto, none, required and one function are")
    if not names or any(name not in schemas for name in names):
        known = ", ".join(schemas) or "none"
        raise ApiError(
            400,
            f"tool_choice = {short(choice)} asks for a tool that there is not; there is: {known}",
            param="tool_choice",
        )
    calls = {name: schemas[name] or {"type": "object"} for name in names}
    return Form(param="tool_choice", calls=calls)


def refuse(field: str, value: object, why: str) -> None:
    """Raise ApiError where an optional field, unless empty, asks for what cannot be done."""
    if value:
        raise unsupported(field, value, why)


def unsupported(field: str, value: object, why: str) -> ApiError:
    """Returns the error of a field whose value cannot be served, whatever it is."""
    return ApiError(
        400,
        f"{field} = {short(value)} is not supported: {why}",
        code="unsupported_value",
        param=field,
    )


def _call(name: str, schema: Mapping[str, Any], dialect: str) -> dict[str, Any]:
    """A call as the policy writes it, with any arguments of the schema."""
    begin, _, end = write_call(name, {}, dialect).rpartition("{}")
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": begin, "content": content, "end": end}
