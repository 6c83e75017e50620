"""The input of a reward function, and the scores that it may return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_gym.types import Message

SAMPLE_NAMES = ("completion", "messages", "prompt", "tool_results", "row")
"""Parameters of a reward function that are no columns: the fields of `RewardInput`."""
BATCH_NAMES = ("completions", "prompts")
"""The same of batch functions, as TRL calls them: lists with one item per completion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardInput:
    """One episode to score."""

    completion: str
    """The text of the policy's last message, without its reasoning."""
    messages: Sequence[Message] = ()
    """The whole dialogue, the prompt first."""
    prompt: str | Sequence[Message] = ""
    """The prompt as the row has it: a text, or messages."""
    tool_results: Sequence[str] = ()
    """The texts that tools returned, in order."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The row of data, with all its columns."""
    where: str = ""
    """Names the row in errors: `"prompts.jsonl, line 3"`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The reward of an episode, and what it is made of. A reward function may return one, too."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """What each reward function returned, by name, without its weight."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to record besides, like the disagreement of judges."""
