"""Constraints on completions that a client may set: a JSON schema, or a call of a tool.

An engine that supports them masks tokens while it samples. The log-probabilities that it returns
are then those of the masked distribution and not the policy's own. (Measured with SGLang 0.5.23
and random weights: 0 for a token without alternative, whose log-probability under the policy is
-5.9.) Such completions are therefore not trained on, and sessions of a training run refuse them.
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
from areal_gym.gateway.http_messages import ApiError
from areal_gym.utils.markup import short


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputConstraint:
    """A schema that a completion must follow, or the tools of which it must call one."""

    param: str
    """The field of the request that sets it."""
    schema: Mapping[str, Any] | None = None
    """The completion must be JSON of this schema."""
    calls: Mapping[str, Mapping[str, Any]] | None = None
    """The completion must call one of these tools: the schemas of their arguments, by name."""

    def grammar(self, engine: Engine, renderer: Renderer, dialect: str) -> Grammar:
        """Return the grammar for the engine.

        Args:
            engine: the engine that samples.
            renderer: the renderer of the policy's chat template.
            dialect: the policy's tool-call format.

        Raises:
            ApiError: the engine, the chat template or the tool-call format does not support it.
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
        """Raise ApiError, because the session's completions are trained on."""
        raise self._refused(
            "the policy learns from its answers, and under a grammar they are not sampled from it: "
            "say in the prompt what an answer must look like, and let the environment reward it "
            "(areal-gym serve takes it)"
        )

    def _refused(self, reason: str) -> ApiError:
        message = f"{self.param} is not supported: {reason}"
        return ApiError(400, message, code="unsupported_value", param=self.param)


def constraint_of(param: str, shape: Mapping[str, Any] | None) -> OutputConstraint | None:
    """Return the constraint of `response_format` or `text.format`; None if any text is allowed.

    Raises ApiError if the format is unknown, or has no schema.
    """
    format_type = "text" if shape is None else shape.get("type", "text")
    if shape is None or format_type == "text":
        return None
    if format_type == "json_object":
        return OutputConstraint(param=param, schema={"type": "object"})
    if format_type != "json_schema":
        raise unsupported(param, format_type, "text, json_object and json_schema are")
    described = shape.get("json_schema", shape)
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise ApiError(400, f"{param} = json_schema needs the schema, an object", param=param)
    return OutputConstraint(param=param, schema=schema)


def called_tools(choice: object, tools: Sequence[Mapping[str, Any]]) -> OutputConstraint | None:
    """Return the constraint of `tool_choice`; None if the policy decides whether to call a tool.

    `choice` is a word or names one of the tools, in the format of any of the APIs. Raises ApiError
    if the choice or the tool is unknown.
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
        message = f"tool_choice = {short(choice)} names an unknown tool; available: {known}"
        raise ApiError(400, message, param="tool_choice")
    calls = {name: schemas[name] or {"type": "object"} for name in names}
    return OutputConstraint(param="tool_choice", calls=calls)


def may_call(choice: object, parallel: bool | None) -> bool:
    """Return whether tool calls are parsed; raise ApiError if parallel calls are forbidden."""
    if parallel is False and choice in (None, "auto", "none"):
        reason = "the policy decides how many calls it makes"
        raise ApiError(400, f"parallel_tool_calls = false is not supported: {reason}")
    return choice != "none"


def refuse(field: str, value: object, reason: str) -> None:
    """Raise ApiError if an optional field that is not supported has a value."""
    if value:
        raise unsupported(field, value, reason)


def unsupported(field: str, value: object, reason: str) -> ApiError:
    """Return the error for a field whose value is not supported."""
    message = f"{field} = {short(value)} is not supported: {reason}"
    return ApiError(400, message, code="unsupported_value", param=field)


def _call(name: str, schema: Mapping[str, Any], dialect: str) -> dict[str, Any]:
    """Return the structural tag of a call: the text around its arguments, and their schema."""
    begin, braces, end = write_call(name, {}, dialect).rpartition("{}")
    if not braces:
        raise ConfigError(
            f"the model writes calls in the format {dialect!r}, whose arguments are no JSON; "
            "auto and none are supported"
        )
    content = {"type": "json_schema", "json_schema": schema}
    return {"type": "tag", "begin": begin, "content": content, "end": end}
