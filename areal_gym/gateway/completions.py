"""Requests for completions and their results, independent of the API that a client uses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field

from areal_gym.engines.base import Generation
from areal_gym.gateway.output_constraints import OutputConstraint
from areal_gym.types import Message, ToolCall
from areal_gym.utils.files import MAX_JSON_DEPTH, is_nested_deeper

MaxTokens = Annotated[int, Field(ge=1, le=2**31)]
Shape = Annotated[dict[str, Any], Field(max_length=64)]
Stops = Annotated[list[str], Field(max_length=16)]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """A request for completions, whichever API it came through."""

    messages: Sequence[Message] = ()
    prompt: str | None = None
    """A text to continue without a chat template, in place of messages."""
    tools: Sequence[dict[str, Any]] = ()
    has_calls: bool = True
    """Whether tool calls in the text are parsed, if the request has tools."""
    n: int = 1
    """The number of completions."""
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stops: Sequence[str] = ()
    constraint: OutputConstraint | None = None
    """A JSON schema or tools that the completion must follow."""
    role: str | None = None
    """The role that requests it, in an episode with several roles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled completion of a request."""

    message: Message
    generation: Generation
    num_prompt_tokens: int
    num_cached_tokens: int
    """The number of leading prompt tokens that the session sent or sampled before."""
    stop: str | None = None
    """The stop string that ended it, if any."""

    @property
    def is_cut(self) -> bool:
        """Whether it was cut at a token limit."""
        return self.generation.finish_reason == "length"

    @property
    def calls(self) -> Sequence[ToolCall]:
        """The tool calls of the message."""
        return self.message.get("tool_calls", ())


class PolicyRequest(BaseModel):
    """The fields that the bodies of all APIs share. Unknown fields are ignored."""

    model: str = "policy"
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None


def function_tool(name: str, description: str | None, parameters: object) -> dict[str, Any]:
    """Return a tool in OpenAI's format, without the fields that are None."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def tool_call(id: str, name: str, arguments: str | dict[str, Any]) -> ToolCall:
    """Return a tool call. Text that is not a JSON object becomes `{"arguments": text}`."""
    if isinstance(arguments, str):
        text = arguments
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            parsed = None
        is_usable = isinstance(parsed, dict) and not is_nested_deeper(parsed, MAX_JSON_DEPTH)
        arguments = parsed if is_usable else {"arguments": text}
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
