"""The protocol between a served environment and its clients: JSON over HTTP.

    GET    /v1/env                          what it is: tools, limits, number of tasks
    POST   /v1/sessions                     {seed, options} -> {session, task, messages}
    POST   /v1/sessions/{session}/reset     {seed, options} -> {session, task, messages}
    POST   /v1/sessions/{session}/step      {turn, message} -> {messages, reward, terminated, ...}
    GET    /v1/sessions/{session}/noop      -> {action}
    GET    /v1/sessions/{session}/gold      -> {action}, for who sends the server's owner key
    DELETE /v1/sessions/{session}
    GET    /v1/images/{sha256}              -> {png}, in base64: a picture that a message names

What fails is `{"error": {"kind", "message", "hints"}}`; the kinds are in `ERRORS`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from areal_gym.envs.base import StepResult, TextEnv
from areal_gym.envs.server.env_sessions import FullError, GoneError
from areal_gym.errors import (
    EnvError,
    EnvUnreachableError,
    EpisodeError,
    GymError,
    RewardError,
    SandboxError,
    UsageError,
)
from areal_gym.tasks.base import SPLITS
from areal_gym.types import Message, Task, content_hash, thaw

M = TypeVar("M", bound=BaseModel)

OWNER_HEADER = "X-Areal-Gym-Owner-Key"
OWNER_VARIABLE = "AREAL_GYM_ENV_OWNER_KEY"

owner_keys: dict[str, str] = {}
"""Owner keys of the servers of this process, by URL."""

ERRORS: Mapping[str, tuple[int, type[GymError]]] = {
    "usage": (400, UsageError),
    "denied": (401, UsageError),
    "gone": (404, GoneError),
    "full": (503, FullError),
    "sandbox": (500, SandboxError),
    "reward": (500, RewardError),
    "env": (500, EnvError),
}
"""Maps each kind of error to its HTTP status and its class in a process."""


def plain(value: Any) -> Any:
    """Return the value in a form that JSON can hold: tasks as rows, numpy's numbers as numbers."""
    return json.loads(json.dumps(thaw(value), default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, Task):
        return value.to_dict()
    if hasattr(value, "item"):
        return value.item()
    raise UsageError(f"{value!r} cannot be sent to another process: it is not JSON")


def describe(env: TextEnv, env_id: str) -> dict[str, Any]:
    """Return the body of `/v1/env`. `hash` changes whenever anything else does."""
    card = {
        "env": env_id,
        "description": (type(env).__doc__ or "").strip(),
        "tools": [tool.schema()["function"] for tool in env.tools],
        "max_turns": env.max_turns,
        "tool_dialect": env.tool_dialect,
        "has_gold": env.has_gold,
        "num_tasks": {split: _num_tasks(env, split) for split in SPLITS},
    }
    if env.roles:
        card["roles"] = list(env.roles)
    return {**card, "hash": content_hash(card)}


def _num_tasks(env: TextEnv, split: str) -> int | None:
    try:
        return env.num_tasks(split)
    except (KeyError, UsageError):  # it has no such split
        return 0


def step_body(result: StepResult) -> dict[str, Any]:
    """Return the body that answers a turn."""
    info = result.info
    return {
        "messages": list(info["messages"]),
        "reward": result.reward,
        "reward_parts": info.get("reward_parts", {}),
        "metrics": info.get("metrics", {}),
        "terminated": result.terminated,
        "truncated": result.truncated,
        "truncated_by": info.get("truncated_by"),
        "state_key": info.get("state_key"),
        **{name: info[name] for name in ("role", "role_rewards") if name in info},
    }


def error_body(error: GymError) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body for an error."""
    kind = next((k for k, (_, cls) in ERRORS.items() if isinstance(error, cls)), "env")
    if isinstance(error, EpisodeError) and kind == "usage":
        kind = "env"
    return ERRORS[kind][0], {
        "error": {"kind": kind, "message": error.message, "hints": list(error.hints)}
    }


def error_from(body: Any) -> GymError:
    """Return the error in a body; a session that is gone is the environment's failure."""
    error = body["error"]
    cls = ERRORS.get(error["kind"], (500, EnvError))[1]
    if cls in (GoneError, FullError):
        cls = EnvUnreachableError
    return cls(error["message"], hints=error["hints"])


# ---- what clients send ---------------------------------------------------------------------------


class OpenEpisode(BaseModel):
    """Begins an episode, in a new session or in one that is open."""

    seed: Annotated[int, Field(strict=True, ge=0, lt=2**64)] | None = None
    options: dict[str, Any] | None = None


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="allow")


class CalledFunction(_Lenient):
    """The tool that a call names, and its arguments."""

    name: str
    arguments: dict[str, Any]


class CalledTool(_Lenient):
    """One tool call of a message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(_Lenient):
    """An assistant's message whose tool calls are parsed already."""

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


def checked(model: type[M], body: Any) -> M:
    """Return the request that a body holds; raise UsageError before anything has happened."""
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
            {**dict(call), "function": dict(call.function)} for call in given.tool_calls
        ]
    return cast(Message, message)
