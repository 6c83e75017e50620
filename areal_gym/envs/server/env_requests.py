"""Requests of a served environment's clients, validated before anything is played."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from areal_gym.errors import UsageError
from areal_gym.types import Message


class OpenEpisode(BaseModel):
    """Begins an episode, in a new session or in one that is open."""

    seed: Annotated[int, Field(strict=True, ge=0, lt=2**64)] | None = None
    options: dict[str, Any] | None = None


class CalledFunction(BaseModel):
    """The tool that a call names, and its arguments."""

    model_config = ConfigDict(extra="allow")

    name: str
    arguments: dict[str, Any]


class CalledTool(BaseModel):
    """One tool call of a message."""

    model_config = ConfigDict(extra="allow")

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(BaseModel):
    """An assistant's message whose tool calls are parsed already."""

    model_config = ConfigDict(extra="allow")

    role: Literal["assistant"] = "assistant"
    content: str
    tool_calls: list[CalledTool] | None = None
    reasoning_content: str | None = None
    parse_error: str | None = None


class PlayTurn(BaseModel):
    """Plays one turn: its number, from 1 on, and what the assistant says."""

    turn: Annotated[int, Field(strict=True, ge=0, lt=2**63)]
    message: str | AssistantMessage


_EXPLAINED = {
    "seed": "a seed is a whole number from 0 on",
    "options": "options are an object",
    "turn": "which turn? `turn` is 1 for the first",
    "message": "a message is a text, or an object with a text as its `content`",
}

M = TypeVar("M", bound=BaseModel)


def checked(model: type[M], body: Any) -> M:
    """Return the request that a body holds.

    Raises:
        UsageError: it is not what the route takes; nothing has happened yet.
    """
    if not isinstance(body, dict):
        raise UsageError("the body is not an object")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[-1]
        place = ".".join(str(part) for part in problem["loc"])
        explained = _EXPLAINED.get(str(problem["loc"][0]), "the request cannot be read")
        raise UsageError(f"{explained} ({place}: {problem['msg']})") from None


def message_of(turn: PlayTurn) -> Message | str:
    """Return the action for the environment, complete in every field that it may read."""
    given = turn.message
    if isinstance(given, str):
        return given
    # By hand: pydantic writes out what is nested deeply as an error.
    message: dict[str, Any] = {
        name: value for name, value in given if name != "tool_calls" and value is not None
    }
    if given.tool_calls is not None:
        message["tool_calls"] = [
            {
                **dict(call),
                "function": {**dict(call.function), "arguments": call.function.arguments},
            }
            for call in given.tool_calls
        ]
    return cast(Message, message)
