"""The input of a reward function, and the scores that it may return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_gym.types import Message

SAMPLE_NAMES = ("completion", "messages", "prompt", "tool_results", "row")
"""Parameter names that get a field of `RewardInput`; every other parameter names a column."""
BATCH_NAMES = ("completions", "prompts")
"""The same for batch functions, in TRL's convention: lists with one item per completion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardInput:
    """An episode that reward functions score."""

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
    """The row's name in error messages: `"prompts.jsonl, line 3"`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """The reward of an episode and its parts. A reward function may return one, too."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """The unweighted value of each reward function, by its name."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers to record, such as the disagreement of judges."""
