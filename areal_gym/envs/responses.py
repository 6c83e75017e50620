"""The records that an environment's step consists of, and their validation."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from areal_gym.envs.judging import JUDGE_ERRORS
from areal_gym.errors import EnvError, RewardError
from areal_gym.message_types import is_content
from areal_gym.types import Content, Message, ToolCall, readable
from areal_gym.utils.markup import short

Info = dict[str, Any]
_ROLES = ("system", "user", "assistant", "tool")


class StepResult(NamedTuple):
    """The result of one step; unpacks as Gymnasium's five values."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: Info


@dataclass(kw_only=True, slots=True)
class Response:
    """An environment's answer to one assistant message."""

    messages: Sequence[Message] = ()
    """The messages that the policy reads next (tool results, a user's reply). Empty at the end."""
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, finite numbers, for people; they need not add up to it."""
    is_terminated: bool = False
    """The task's own end (solved, failed, given up)."""
    is_truncated: bool = False
    """A limit of the environment's own; `max_turns` is applied for you."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Finite numbers to add up over the episode (tool calls, tool errors, ...)."""
    state_key: str | None = None
    """A text that names the state in which the policy wrote the message that this answers: the same
    for equal states of a task, in any of its episodes. `trainer.advantage=gigpo` compares what was
    done in equal states; None compares the message with no other."""
    role: str | None = None
    """The role that reads `messages` and writes next; None: the one that has just written."""
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of roles by name, added to each role's newest turn; `reward` is that of the role
    that has just written."""


@dataclass(slots=True)
class ToolResults:
    """The result of `call_tools`."""

    messages: list[Message]
    num_calls: int
    num_errors: int
    """Malformed calls, unknown tools, wrong arguments, errors of tools, refused calls."""
    num_refused: int
    """Calls beyond a limit, which were not run."""


def tool_message(call: ToolCall, content: Content) -> Message:
    """Return the message that answers a tool call."""
    name = call["function"]["name"]
    return {"role": "tool", "name": name, "tool_call_id": call["id"], "content": content}


def refusal(
    num_refused: int, max_calls: int, num_allowed: int, max_tool_calls: int | None
) -> Message:
    """Return the message about calls that were not run: beyond a message's or episode's limit."""
    text = (
        f"{num_refused} more calls were not run; at most {max_calls} are"
        if num_allowed == max_calls
        else f"{num_refused} calls were not run; the {max_tool_calls} of an episode are used up: "
        "answer without a tool"
    )
    return {"role": "tool", "content": f"error: {text}"}


def require_messages(messages: Sequence[Message], source: str, *, are_needed: bool = False) -> None:
    """Raise EnvError unless every message of the method `source` has a role and a content."""
    if are_needed and not messages:
        raise EnvError(f"{source} gave no message")
    for message in messages:
        is_message = isinstance(message, Mapping) and is_content(message.get("content"))
        if not is_message or message.get("role") not in _ROLES:
            raise EnvError(
                f"{source} gave {short(message)}, which is not a message: it needs a role "
                f"({', '.join(_ROLES)}) and a content, a text or a list of texts and pictures"
            )


def step_result(response: object, source: str, task_id: str, num_judge_errors: int) -> StepResult:
    """Return the step that a response of the method `source` makes; raise EnvError for others."""
    if not isinstance(response, Response):
        raise EnvError(f"{source} gave {response!r}, which is not a Response")
    messages = tuple(response.messages)
    require_messages(messages, source)
    reward = finite_reward(response.reward, source)
    info: Info = {"messages": messages, "task_id": task_id}
    if parts := _numbers(response.reward_parts, source, "reward_parts", "part of the reward"):
        info["reward_parts"] = parts
    if response.state_key is not None:
        info["state_key"] = _state_key(response.state_key, source)
    if response.role is not None:
        info["role"] = response.role
    if rewards := _numbers(response.role_rewards, source, "role_rewards", "reward of the role"):
        info["role_rewards"] = rewards
    metrics = _numbers(response.metrics, source, "metrics", "metric")
    if num_judge_errors:
        metrics[JUDGE_ERRORS] = metrics.get(JUDGE_ERRORS, 0) + num_judge_errors
    if metrics:
        info["metrics"] = metrics
    observation = readable(messages[-1]["content"]) if messages else ""
    is_truncated = response.is_truncated and not response.is_terminated
    return StepResult(observation, reward, response.is_terminated, is_truncated, info)


def finite_reward(reward: object, source: str) -> float:
    """Return the reward, maybe of int, bool or numpy, as a finite float; else raise RewardError."""
    return _finite(reward, f"{source} gave the reward {reward!r}")


def _numbers(given: object, source: str, field_name: str, what: str) -> dict[str, float]:
    """Return a field of a response, numbers by name, with finite floats; else raise RewardError."""
    if not isinstance(given, Mapping):
        raise RewardError(
            f"{source} gave {field_name}={short(repr(given))}; numbers by name are needed",
            hints=[f"as in Response({field_name}={{'name': 1.0}}); without any, leave it out"],
        )
    numbers_by_name: dict[str, float] = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise RewardError(
                f"{source} gave {field_name} with the name {name!r}, which is not a text",
                hints=[f"as in Response({field_name}={{{str(name)!r}: {value!r}}})"],
            )
        claim = f"{source} gave the {what} {name!r} = {short(repr(value))}"
        numbers_by_name[name] = _finite(value, claim)
    return numbers_by_name


def _finite(value: object, claim: str) -> float:
    """Return the value as a finite float; else raise RewardError, which begins with `claim`."""
    if isinstance(value, numbers.Real | np.number | np.bool_):
        with contextlib.suppress(OverflowError, TypeError):  # 10**400; a complex number
            if math.isfinite(number := float(value)):
                return number
    raise RewardError(f"{claim}; a finite number is needed")


def _state_key(key: object, source: str) -> str:
    """Return the key, which is compared and recorded, as a plain text; else raise EnvError."""
    if isinstance(key, str):
        return str(key)
    raise EnvError(
        f"{source} gave the state_key {short(repr(key))}, a {type(key).__name__}; a text is needed",
        hints=["as in Response(state_key=str(state)): equal states need equal texts", "or None"],
    )
