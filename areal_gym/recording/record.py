"""The record of one episode: turns, tokens, rewards, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from areal_gym.envs.base import StepResult
from areal_gym.errors import EpisodeError
from areal_gym.types import FinishReason, Message, StopReason, TokenSpan, Turn


def stop_reason_of(error: EpisodeError) -> StopReason:
    """Return the stop reason of an episode that failed with this error."""
    if error.boundary == "episode":
        return StopReason.ENV_ERROR  # an environment may raise the base class
    name = "timeout" if error.boundary == "timeout" else f"{error.boundary}_error"
    return StopReason(name)


@dataclass(slots=True)
class TurnDraft:
    """A turn whose reward may still change."""

    finish_reason: FinishReason
    engine_s: float = 0.0
    branch: int = 0
    env_s: float = 0.0
    tool_s: float = 0.0
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    state_key: str | None = None
    role: str | None = None
    is_fixed: bool = False

    def turn(self) -> Turn:
        """Return the finished turn."""
        return Turn(**{name: getattr(self, name) for name in _RECORDED})


_RECORDED = [field.name for field in fields(Turn) if field.name in TurnDraft.__slots__]
"""The fields of a turn that are set during the episode; the trainer sets others later."""


class EpisodeRecord:
    """Collects what happens in one episode, and gives the fields of its trajectory."""

    def __init__(self) -> None:
        self.turns: list[TurnDraft] = []
        """Turns in the order in which they ended."""
        self.messages: list[Message] = []
        """The transcript for people."""
        self.unread: Sequence[Message] = ()
        """The environment's latest messages, which the policy has not been shown yet."""
        self.metrics: dict[str, float] = {}
        self.stop_reason: StopReason | None = None
        self.error: EpisodeError | None = None
        self._spans: list[TokenSpan] = []

    @property
    def is_over(self) -> bool:
        """Whether the episode has ended."""
        return self.stop_reason is not None

    def add_step(self, turn: TurnDraft, result: StepResult) -> StepResult:
        """Record the environment's reply to a turn; return it, as truncated if the turn was cut."""
        info = result.info
        turn.reward += result.reward
        for name, part in info.get("reward_parts", {}).items():
            turn.reward_parts[name] = turn.reward_parts.get(name, 0.0) + part
        for role, reward in info.get("role_rewards", {}).items():
            next(t for t in reversed(self.turns) if t.role == role).reward += reward
        if turn.state_key is None:
            turn.state_key = info.get("state_key")
        for name, value in info.get("metrics", {}).items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
        self.unread = info["messages"]
        if turn.finish_reason is FinishReason.LENGTH:
            self.stop_reason = StopReason.MAX_TOKENS
            return result if result.terminated else result._replace(truncated=True)
        if result.terminated:
            self.stop_reason = StopReason.COMPLETED
        elif result.truncated:
            by_turns = info.get("truncated_by") == "max_turns"
            self.stop_reason = StopReason.MAX_TURNS if by_turns else StopReason.TRUNCATED
        return result

    def fail(self, error: EpisodeError) -> None:
        """Record the first failure; later ones follow from it."""
        if self.error is None:
            self.error = error
            self.stop_reason = stop_reason_of(error)

    def outcome(self) -> dict[str, Any]:
        """Return the fields of the trajectory that were decided during the episode.

        Branches are ordered by when they ended, and turns are numbered in that order. So the branch
        that ends the episode is the last one, and its rewards count, discounted, for all turns
        before it. With several roles this holds for each role: its branches stand together, and its
        turns keep their places among those of other roles.
        """
        turns = self.turns
        last_turns = {turn.role: index for index, turn in enumerate(turns)}
        ended = {turn.branch: (last_turns[turn.role], index) for index, turn in enumerate(turns)}
        order = list(range(len(turns)))
        for role in last_turns:
            places = [index for index, turn in enumerate(turns) if turn.role == role]
            by_branch = sorted(places, key=lambda index: ended[turns[index].branch])
            for place, index in zip(places, by_branch, strict=True):
                order[place] = index
        place_of = {index: place for place, index in enumerate(order)}
        kept = sorted(self._spans, key=lambda span: ended[span.branch])
        rank = {b: i for i, b in enumerate(dict.fromkeys(span.branch for span in kept))}
        spans = [replace(span, turn=place_of[span.turn], branch=rank[span.branch]) for span in kept]
        _drop_tracebacks(self.error)
        return {
            "spans": tuple(spans),
            "turns": tuple([turns[i].turn() for i in order]),
            "messages": (*self.messages, *self.unread),
            "stop_reason": self.stop_reason or StopReason.COMPLETED,
            "error": None if self.error is None else str(self.error),
            "is_lost": self.error is not None and self.error.is_outage,
            "metrics": self.metrics,
        }


def _drop_tracebacks(error: BaseException | None) -> None:
    """Drop tracebacks, whose frames hold the episode, which holds the error: a reference cycle."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
