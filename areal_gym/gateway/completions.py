"""Requests for completions and their results, whichever API they came through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal_gym.engines.base import Generation
from areal_gym.gateway.output_constraints import OutputConstraint
from areal_gym.types import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """One call, whichever API it came through."""

    messages: Sequence[Message] = ()
    prompt: str | None = None
    """In place of messages: a text to continue, without any chat template."""
    tools: Sequence[dict[str, Any]] = ()
    has_calls: bool = True
    """Whether tool calls in the text are parsed; only where there are tools."""
    n: int = 1
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stops: Sequence[str] = ()
    constraint: OutputConstraint | None = None
    """How the completion must look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One choice."""

    message: Message
    generation: Generation
    num_prompt_tokens: int
    num_cached_tokens: int
    """Tokens of the prompt that were sent or sampled before."""
    stop: str | None = None
    """The stop string that ended it."""

    @property
    def is_cut(self) -> bool:
        """Whether a limit of tokens cut it."""
        return self.generation.finish_reason == "length"
