"""The vocabulary as types: what the layers hand to each other. Standard library only.

Records are frozen, because they cross tasks, threads, processes and JSON. One word per thing:

    Task -> Trajectory (Turns, TokenSpans) -> Group

Suffixes of ragged arrays name their axis: `_G` trajectories of a group, `_T` tokens, `_B` rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from types import MappingProxyType, NoneType
from typing import Any, Literal, NotRequired, TypedDict

from areal_gym.utils.markup import block, counted, dialogue, number, pairs, short, table
from areal_gym.utils.records import quickly_made

__all__ = [
    "FinishReason",
    "FunctionCall",
    "Group",
    "Message",
    "Origin",
    "StopReason",
    "Task",
    "TokenSpan",
    "ToolCall",
    "Trajectory",
    "Turn",
    "content_hash",
    "freeze",
    "thaw",
]

Origin = Literal["prompt", "policy", "env"]


class FunctionCall(TypedDict):
    """Which function a tool call names, and its arguments *as an object*.

    Arguments kept as a JSON string would be quoted a second time by most chat templates.
    """

    name: str
    arguments: dict[str, Any]


class ToolCall(TypedDict):
    """One call of a tool, in OpenAI's shape but for `arguments` being an object."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(TypedDict):
    """One chat message, in OpenAI's shape: what chat templates and clients take."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning_content: NotRequired[str]
    """What an assistant thought before it spoke (role "assistant")."""
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    """The name of the tool that answers (role "tool")."""
    parse_error: NotRequired[str]
    """What is malformed in an assistant's attempt at a tool call; environments answer with it."""


# What most values are: to ask whether they are a mapping takes five times as long.
_PLAIN = (str, int, float, NoneType)


def freeze(value: Any) -> Any:
    """A read-only deep copy: mappings become mapping proxies, lists become tuples."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return MappingProxyType({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


def thaw(value: Any) -> Any:
    """The reverse of `freeze`: plain dicts and lists, fit for JSON."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (MappingProxyType, Mapping)):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [thaw(item) for item in value]
    return value


def content_hash(value: Any) -> str:
    """16 hex digits that depend on the content only, not on key order, process or machine."""
    text = json.dumps(thaw(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One problem to solve.

    Example: `Task(id="gen/17", data={"question": "2+2?", "answer": "4"})`.
    """

    id: str
    """Stable across processes and machines; unique inside one environment."""
    data: Mapping[str, Any]
    """The row. Frozen on construction: no sibling of a group can change it for the others."""
    split: str = "train"
    """"train", "test", or what the environment's docstring names."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", freeze(self.data))

    def __repr__(self) -> str:
        return f"<Task {short(self.id)} ({short(self.split, 20)}): {short(thaw(self.data), 160)}>"

    def _repr_html_(self) -> str:
        rows = {name: short(thaw(value), 400) for name, value in list(self.data.items())[:20]}
        return block(f"Task {short(self.id)} ({short(self.split, 20)})", pairs(rows))

    def __reduce__(self) -> tuple[object, ...]:
        # Mapping proxies do not pickle; tasks do cross process borders.
        return (_task, (self.id, thaw(self.data), self.split))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready form; `reset(options={"task": task.to_dict()})` accepts it."""
        return {"id": self.id, "split": self.split, "data": thaw(self.data)}


def _task(id: str, data: dict[str, Any], split: str) -> Task:
    return Task(id=id, data=data, split=split)


class FinishReason(StrEnum):
    """Why an engine stopped sampling one turn."""

    STOP = "stop"
    """The policy sampled an end-of-turn token, which is the last sampled id."""
    LENGTH = "length"
    """The limit of new tokens or the context was reached."""
    ABORT = "abort"
    """Generation was interrupted and not continued."""


class StopReason(StrEnum):
    """Why an episode ended."""

    COMPLETED = "completed"
    """The environment terminated it: the task's own end."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    """The policy ran into its limit of new tokens, or the context is full."""
    TRUNCATED = "truncated"
    """Another limit of the environment's own."""
    ENV_ERROR = "env_error"
    REWARD_ERROR = "reward_error"
    """A reward was no finite number; not played again, for that would select by reward."""
    AGENT_ERROR = "agent_error"
    ENGINE_ERROR = "engine_error"
    SANDBOX_ERROR = "sandbox_error"
    WORKER_ERROR = "worker_error"
    """The process that played the episode died."""
    TIMEOUT = "timeout"
    """The episode's wall-clock limit: an infrastructure failure, for it depends on the machine."""
    CANCELLED = "cancelled"
    """The run ended first."""

    @property
    def is_truncation(self) -> bool:
        """A limit, not the task's own end; the trajectory is kept and trained on."""
        return self in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.TRUNCATED)

    @property
    def is_failure(self) -> bool:
        """Infrastructure failed: excluded from the group, counted, never a reward."""
        return not (self is StopReason.COMPLETED or self.is_truncation)


@quickly_made
@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSpan:
    """A run of consecutive tokens with one origin (and, for the policy's, one version).

    Example: `TokenSpan(origin="policy", token_ids=(9, 12), logprobs=(-0.1, -0.7),
    policy_version=3, turn=0)`
    """

    origin: Origin
    """Who wrote these tokens; only "policy" tokens are trained on."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    """Of the sampling distribution, one per token; None unless origin is "policy"."""
    policy_version: int | None = None
    """The version of the weights that sampled these tokens; None unless origin is "policy"."""
    turn: int = 0
    """Index of the engine call: a prompt or env span carries the turn that it precedes."""
    branch: int = 0
    """Which of the trajectory's token sequences this belongs to: +1 whenever history changed."""
    teacher_logprobs: tuple[float, ...] | None = None
    """What a teacher gives these tokens, where there is one and origin is "policy"."""

    def __post_init__(self) -> None:
        if self.origin == "policy":
            if self.logprobs is None or self.policy_version is None:
                raise ValueError("a policy span needs logprobs and policy_version")
            if len(self.logprobs) != len(self.token_ids):
                raise ValueError(
                    f"{len(self.token_ids)} token ids but {len(self.logprobs)} log-probabilities"
                )
        elif self.logprobs is not None or self.policy_version is not None:
            raise ValueError(f"a span of origin {self.origin!r} was not sampled")

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        version = "" if self.policy_version is None else f", version {self.policy_version}"
        return f"<TokenSpan {self.origin}, turn {self.turn}: {len(self):,} tokens{version}>"


@quickly_made
@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One engine call and the environment's reply to it."""

    finish_reason: FinishReason
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of `reward`."""
    engine_s: float = 0.0
    """Wall seconds that the engine took, queueing included."""
    env_s: float = 0.0
    """Wall seconds of the environment's reply, tools included."""
    tool_s: float = 0.0
    """Of these, in tools."""


@quickly_made
@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """All turns of one agent in one episode: token-exact, append-only."""

    id: str
    group_id: str
    task: Task
    env_id: str
    agent_id: str = "chat"
    spans: tuple[TokenSpan, ...] = ()
    """What the engine saw and sampled, in order; `branches` are the exact token sequences."""
    turns: tuple[Turn, ...] = ()
    messages: tuple[Message, ...] = ()
    """The same dialogue for reading; never re-encoded."""
    stop_reason: StopReason = StopReason.COMPLETED
    error: str | None = None
    """What failed, when `stop_reason.is_failure`."""
    is_lost: bool = False
    """An outage ended it: a server, worker or sandbox that it needs is gone. It is played again."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The environment's own measurements (tool calls, tool errors, ...)."""
    seed: int = 0
    """The seed that the episode was reset with."""

    def __repr__(self) -> str:
        return f"<Trajectory {short(self.id)}: {self._outcome()}>"

    def _repr_html_(self) -> str:
        facts = {
            "task": short(self.task.id),
            **{f"reward, {short(n, 40)}": number(x) for n, x in self.reward_parts.items()},
            **{short(n, 40): number(x) for n, x in self.metrics.items()},
        }
        if self.error is not None:
            facts["error"] = short(self.error, 400)
        title = f"Trajectory {short(self.id)}: {self._outcome()}"
        return block(title, pairs(dict(list(facts.items())[:20])), dialogue(self.messages))

    def _outcome(self) -> str:
        reward = "failed" if self.stop_reason.is_failure else f"reward {number(self.reward)}"
        tokens = f", {self.num_policy_tokens:,} tokens" if self.spans else ""
        return (
            f"{short(self.env_id, 40)}, {reward}, {counted(len(self.turns), 'turn')}{tokens}, "
            f"{self.stop_reason}"
        )

    @property
    def reward(self) -> float:
        """Sum of the turns' rewards."""
        return sum(turn.reward for turn in self.turns)

    @property
    def reward_parts(self) -> dict[str, float]:
        """Named parts, summed over the turns."""
        parts: dict[str, float] = {}
        for turn in self.turns:
            for name, value in turn.reward_parts.items():
                parts[name] = parts.get(name, 0.0) + value
        return parts

    @property
    def branches(self) -> list[tuple[TokenSpan, ...]]:
        """One sequence of spans per branch: the concatenated ids are what the engine was given.

        A dialogue that only grows has one. Where the agent or the chat template rewrites what was
        sent before, a fork begins a new one with a prompt of its own.
        """
        return [tuple(spans) for _, spans in itertools.groupby(self.spans, attrgetter("branch"))]

    @property
    def num_forks(self) -> int:
        """How often what was sent before was rewritten."""
        return self.spans[-1].branch if self.spans else 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids in order, branch after branch."""
        return tuple(token_id for span in self.spans for token_id in span.token_ids)

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Distinct versions that sampled tokens here, ascending."""
        return tuple(sorted({s.policy_version for s in self.spans if s.policy_version is not None}))

    @property
    def num_policy_tokens(self) -> int:
        """How many tokens the policy sampled."""
        return sum(len(span) for span in self.spans if span.origin == "policy")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form, the line format of `trajectories/*.jsonl`.

        The spans come last: whoever lists trajectories reads a line up to them.
        """
        return {
            "id": self.id,
            "group_id": self.group_id,
            "task": self.task.to_dict(),
            "env_id": self.env_id,
            "agent_id": self.agent_id,
            "reward": self.reward,
            "stop_reason": str(self.stop_reason),
            "error": self.error,
            **({"is_lost": True} if self.is_lost else {}),
            "num_forks": self.num_forks,
            "num_tokens": sum(map(len, self.spans)),
            "num_policy_tokens": self.num_policy_tokens,
            "policy_versions": self.policy_versions,
            "metrics": dict(self.metrics),
            "seed": self.seed,
            "turns": [
                {**dataclasses.asdict(turn), "finish_reason": str(turn.finish_reason)}
                for turn in self.turns
            ],
            "messages": list(self.messages),
            "spans": [dataclasses.asdict(span) for span in self.spans],
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Trajectory:
        """The reverse of `to_dict`."""
        return cls(
            id=row["id"],
            group_id=row["group_id"],
            task=Task(**row["task"]),
            env_id=row["env_id"],
            agent_id=row["agent_id"],
            stop_reason=StopReason(row["stop_reason"]),
            error=row["error"],
            is_lost=row.get("is_lost", False),
            metrics=row["metrics"],
            seed=row["seed"],
            turns=tuple(
                Turn(**{**turn, "finish_reason": FinishReason(turn["finish_reason"])})
                for turn in row["turns"]
            ),
            messages=tuple(row["messages"]),
            spans=tuple(
                TokenSpan(
                    origin=span["origin"],
                    token_ids=tuple(span["token_ids"]),
                    logprobs=_floats(span["logprobs"]),
                    policy_version=span["policy_version"],
                    turn=span["turn"],
                    branch=span.get("branch", 0),
                    teacher_logprobs=_floats(span.get("teacher_logprobs")),
                )
                for span in row["spans"]
            ),
        )


def _floats(values: Sequence[float | None] | None) -> tuple[float, ...] | None:
    # JSON has no NaN: records hold null in its place.
    return None if values is None else tuple(math.nan if v is None else v for v in values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The sibling trajectories of one task: what GRPO normalises in and staleness counts in."""

    id: str
    task: Task
    trajectories: tuple[Trajectory, ...]
    """The scored members. Failed siblings are not in here; they are counted in `num_failed`."""
    num_failed: int = 0

    def __len__(self) -> int:
        return len(self.trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __repr__(self) -> str:
        return f"<Group {short(self.id)}: {self._outcome()}>"

    def _repr_html_(self) -> str:
        shown = self.trajectories[:20]
        rows = (
            (t.id, number(t.reward), len(t.turns), f"{t.num_policy_tokens:,}", t.stop_reason)
            for t in shown
        )
        return block(
            f"Group {short(self.id)}: {self._outcome()}",
            table(("trajectory", "reward", "turns", "tokens", "stopped by"), rows),
        )

    def _outcome(self) -> str:
        rewards = " ".join(map(number, self.rewards_G[:16]))
        more = " ..." if len(self) > 16 else ""
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return f"task {short(self.task.id)}, rewards {rewards}{more}{failed}"

    @property
    def rewards_G(self) -> Sequence[float]:
        """One reward per member."""
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled a token of the group; None without tokens."""
        versions = [v for t in self.trajectories for v in t.policy_versions[:1]]
        return min(versions, default=None)
