"""The records that the layers hand to each other. Standard library only, numbers packed.

Records are frozen, because they cross tasks, threads, processes and JSON. One word per thing:

    Task -> Trajectory (Turns, TokenSpans) -> Group

Suffixes of ragged arrays name their axis: `_G` trajectories of a group, `_T` tokens, `_B` rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any, Literal

from areal_gym.message_types import Content as Content
from areal_gym.message_types import FunctionCall as FunctionCall
from areal_gym.message_types import ImagePart as ImagePart
from areal_gym.message_types import ImageRef as ImageRef
from areal_gym.message_types import Message as Message
from areal_gym.message_types import TextPart as TextPart
from areal_gym.message_types import ToolCall as ToolCall
from areal_gym.message_types import check_image_spans
from areal_gym.message_types import images_of as images_of
from areal_gym.message_types import readable as readable
from areal_gym.message_types import text_of as text_of
from areal_gym.token_arrays import RoutedExperts as RoutedExperts
from areal_gym.token_arrays import TopTokens as TopTokens
from areal_gym.utils.frozen_data import content_hash as content_hash
from areal_gym.utils.frozen_data import freeze as freeze
from areal_gym.utils.frozen_data import thaw as thaw
from areal_gym.utils.packed_numbers import Floats, Ints, PackedNumbers, from_packed, json_floats

Origin = Literal["prompt", "policy", "env"]


def notebook_html(record: Any) -> str:
    """Return the HTML of a record in a notebook."""
    # Reports are made of records: only when one is shown may a record ask for them.
    return str(import_module("areal_gym.report.notebook").html_of(record))


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One problem to solve: `Task(id="gen/17", data={"question": "2+2?", "answer": "4"})`."""

    id: str
    """Stable across processes and machines; unique within one environment."""
    data: Mapping[str, Any]
    """The row. Frozen on construction: one sibling of a group cannot change it for the others."""
    split: str = "train"
    """"train", "test", or what the environment's docstring names."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", freeze(self.data))

    @property
    def headline(self) -> str:
        """Id and split, on one line."""
        return f"Task {_short(self.id)} ({_short(self.split, 20)})"

    def __repr__(self) -> str:
        return f"<{self.headline}: {_short(thaw(self.data), 160)}>"

    _repr_html_ = notebook_html

    def __reduce__(self) -> tuple[object, ...]:
        # Mapping proxies do not pickle; tasks do cross process borders.
        return partial(Task, **self.to_dict()), ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-ready form; `reset(options={"task": task.to_dict()})` accepts it."""
        return {"id": self.id, "split": self.split, "data": thaw(self.data)}


class FinishReason(StrEnum):
    """The reason why an engine stopped sampling one turn."""

    STOP = "stop"  # by an end-of-turn token, which is the last sampled id
    LENGTH = "length"  # by the limit of new tokens or the context
    ABORT = "abort"  # generation was interrupted and not continued


class StopReason(StrEnum):
    """The reason why an episode ended."""

    COMPLETED = "completed"  # the environment terminated the episode
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # the policy's limit of new tokens, or the context is full
    TRUNCATED = "truncated"  # another limit of the environment
    ENV_ERROR = "env_error"
    REWARD_ERROR = "reward_error"  # not finite; not repeated, which would select by reward
    TASK_ERROR = "task_error"  # its verifier gave no reward; a task that repeats it is dropped
    AGENT_ERROR = "agent_error"
    ENGINE_ERROR = "engine_error"
    SANDBOX_ERROR = "sandbox_error"
    WORKER_ERROR = "worker_error"  # the process that ran the episode died
    TIMEOUT = "timeout"  # a failure of infrastructure, because it depends on the machine
    CANCELLED = "cancelled"  # the run ended before the episode

    @property
    def is_truncation(self) -> bool:
        """Whether a limit ended the episode; the trajectory is kept and trained on."""
        return self in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.TRUNCATED)

    @property
    def is_failure(self) -> bool:
        """Whether infrastructure failed: excluded from the group, counted, never a reward."""
        return not (self is StopReason.COMPLETED or self.is_truncation)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSpan:
    """Consecutive tokens with one origin and, for sampled ones, one policy version.

    `TokenSpan(origin="policy", token_ids=(9, 12), logprobs=(-0.1, -0.7), policy_version=3)`

    Numbers may be given as tuples, lists or arrays. They are kept packed (`Ints`, `Floats`), which
    read, compare and slice as tuples do.
    """

    origin: Origin
    """The author of these tokens; only "policy" tokens are trained on, and have `logprobs`."""
    token_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    """Log-probabilities under the sampling distribution, one per token."""
    policy_version: int | None = None
    """The version of the weights that sampled these tokens."""
    turn: int = 0
    """Index of the engine call; a prompt or env span has the index of the turn after it."""
    branch: int = 0
    """Index of the token sequence that it belongs to: +1 whenever history was rewritten."""
    teacher_logprobs: Sequence[float] | None = None
    """A teacher's log-probabilities of these tokens, if there is one."""
    teacher_top: TopTokens | None = None
    """The tokens that a teacher held likeliest at each of these, where its top k are learned."""
    routed_experts: RoutedExperts | None = None
    """The experts by which a mixture sampled each of these tokens, where the engine tells."""
    images: tuple[ImageRef, ...] = ()
    """The pictures among these tokens, in order; a policy samples none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", Ints.of(self.token_ids))
        for name in ("logprobs", "teacher_logprobs"):
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, Floats.of(values))
        num_ids, logprobs = len(self.token_ids), self.logprobs
        if self.origin != "policy":
            if logprobs is not None or self.policy_version is not None:
                raise ValueError(f"a span of origin {self.origin!r} was not sampled")
        elif logprobs is None or self.policy_version is None:
            raise ValueError("a policy span needs logprobs and policy_version")
        elif len(logprobs) != num_ids:
            raise ValueError(f"{num_ids} token ids but {len(logprobs)} log-probabilities")
        for name, record in (("experts", self.routed_experts), ("top tokens", self.teacher_top)):
            if record is not None and len(record) != num_ids:
                raise ValueError(f"{num_ids} token ids but {name} of {len(record)}")
        if self.images:
            if self.origin == "policy":
                raise ValueError("a policy samples no pictures")
            check_image_spans(self.images, num_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        version = "" if self.policy_version is None else f", version {self.policy_version}"
        return f"<TokenSpan {self.origin}, turn {self.turn}: {len(self):,} tokens{version}>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One engine call and the environment's reply to it."""

    finish_reason: FinishReason
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    engine_s: float = 0.0  # wall time, queueing included
    env_s: float = 0.0  # wall time of the reply, tools included
    tool_s: float = 0.0  # the part of `env_s` that tools took
    state_key: str | None = None  # the environment's name of the state that the policy acted in
    role: str | None = None  # who wrote it, in episodes that several roles play
    is_fixed: bool = False  # whether a policy wrote it that is not trained
    answer_prob: float | None = None  # of the known answer, before this turn (`igpo`)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """All turns of one agent in one episode: token-exact, append-only."""

    id: str
    group_id: str
    task: Task
    env_id: str
    agent_id: str = "chat"
    spans: tuple[TokenSpan, ...] = ()
    """Tokens that the engine saw and sampled, in order; `branches` are the exact sequences."""
    turns: tuple[Turn, ...] = ()
    messages: tuple[Message, ...] = ()  # the same dialogue for reading; never re-encoded
    stop_reason: StopReason = StopReason.COMPLETED
    error: str | None = None  # what failed, when `stop_reason.is_failure`
    is_lost: bool = False
    """Whether an outage ended it: a server, worker or sandbox is gone. The episode is repeated."""
    metrics: Mapping[str, float] = field(default_factory=dict)  # by the environment
    seed: int = 0  # which the episode was reset with

    def __repr__(self) -> str:
        return f"<{self.headline}>"

    _repr_html_ = notebook_html

    @property
    def headline(self) -> str:
        """Id and outcome, on one line."""
        reward = "failed" if self.stop_reason.is_failure else f"reward {self.reward:,.4g}"
        turns = f"{len(self.turns)} turn{'' if len(self.turns) == 1 else 's'}"
        tokens = f", {self.num_policy_tokens:,} tokens" if self.spans else ""
        return (
            f"Trajectory {_short(self.id)}: {_short(self.env_id, 40)}, {reward}, {turns}{tokens}, "
            f"{self.stop_reason}"
        )

    @property
    def reward(self) -> float:
        """Sum of the turns' rewards, but for those of fixed roles."""
        return sum(turn.reward for turn in self.turns if not turn.is_fixed)

    @property
    def reward_parts(self) -> dict[str, float]:
        """Named parts of the reward, summed over the turns."""
        parts: dict[str, float] = {}
        for turn in self.turns:
            for name, value in turn.reward_parts.items():
                parts[name] = parts.get(name, 0.0) + value
        return parts

    @property
    def branches(self) -> list[tuple[TokenSpan, ...]]:
        """One sequence of spans per branch; its concatenated ids are what the engine was given.

        A dialogue that only grows has one branch. Where the agent or the chat template rewrites
        earlier messages, a fork begins a new branch with its own prompt.
        """
        return [tuple(spans) for _, spans in itertools.groupby(self.spans, attrgetter("branch"))]

    @property
    def num_forks(self) -> int:
        """The number of times that earlier messages were rewritten; roles have one branch each."""
        roles = {self.turns[span.turn].role for span in self.spans if span.turn < len(self.turns)}
        return self.spans[-1].branch + 1 - max(1, len(roles)) if self.spans else 0

    @property
    def token_ids(self) -> Sequence[int]:
        """All ids in order, branch after branch."""
        return Ints.joined(span.token_ids for span in self.spans)

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Distinct versions that sampled tokens here, ascending."""
        return tuple(sorted({s.policy_version for s in self.spans if s.policy_version is not None}))

    @property
    def num_policy_tokens(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(len(span) for span in self.spans if span.origin == "policy")

    def to_dict(self, *, packs_numbers: bool = False) -> dict[str, Any]:
        """Return the JSON-ready form.

        With `packs_numbers`, the line format of `trajectories/*.jsonl`: token ids and
        log-probabilities are base64 of little-endian arrays, {"int32": "..."}, and not lists.
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
            "turns": list(map(_turn_row, self.turns)),
            "messages": list(self.messages),
            # The spans come last, so that a list of trajectories can be read without them.
            "spans": [_span_row(span, packs_numbers) for span in self.spans],
        }

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Trajectory:
        """Make a trajectory from the form that `to_dict` returns."""
        as_they_are = ("id", "group_id", "env_id", "agent_id", "error", "metrics", "seed")
        return cls(
            **{name: row[name] for name in as_they_are},
            task=Task(**row["task"]),
            stop_reason=StopReason(row["stop_reason"]),
            is_lost=row.get("is_lost", False),
            turns=tuple(
                Turn(**turn | {"finish_reason": FinishReason(turn["finish_reason"])})
                for turn in row["turns"]
            ),
            messages=tuple(row["messages"]),
            spans=tuple(map(_span, row["spans"])),
        )


def _turn_row(turn: Turn) -> dict[str, Any]:
    row = asdict(turn) | {"finish_reason": str(turn.finish_reason)}
    if not turn.is_fixed:
        del row["is_fixed"]
    # An empty text is a name, of a state or a role: only what is None is left out.
    optional = ("state_key", "role", "answer_prob")
    return {k: v for k, v in row.items() if v is not None or k not in optional}


def _span_row(span: TokenSpan, packs_numbers: bool) -> dict[str, Any]:
    row: dict[str, Any] = {field.name: getattr(span, field.name) for field in fields(TokenSpan)}
    for name, values in row.items():
        if isinstance(values, PackedNumbers):
            row[name] = values.to_packed() if packs_numbers else values.tolist()
    for name in ("routed_experts", "teacher_top"):  # most spans have neither
        if (record := row.pop(name)) is not None:
            row[name] = record.to_dict()
    images = row.pop("images")
    if images:
        row["images"] = [image.to_dict() for image in images]
    return row


def _span(row: Mapping[str, Any]) -> TokenSpan:
    read: dict[str, Any] = {n: json_floats(row.get(n)) for n in ("logprobs", "teacher_logprobs")}
    if row.get("routed_experts") is not None:
        read["routed_experts"] = RoutedExperts.from_dict(row["routed_experts"])
    if row.get("teacher_top") is not None:
        read["teacher_top"] = TopTokens.from_dict(row["teacher_top"])
    if "images" in row:
        read["images"] = tuple(map(ImageRef.from_dict, row["images"]))
    return TokenSpan(**{**row, **read, "token_ids": from_packed(row["token_ids"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The sibling trajectories of one task: the unit of GRPO's normalisation and of staleness."""

    id: str
    task: Task
    trajectories: tuple[Trajectory, ...]
    """The scored members. Failed siblings are left out, and counted in `num_failed`."""
    num_failed: int = 0

    def __len__(self) -> int:
        return len(self.trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __repr__(self) -> str:
        return f"<{self.headline}>"

    _repr_html_ = notebook_html

    @property
    def headline(self) -> str:
        """Id, task and rewards, on one line."""
        rewards = " ".join(f"{reward:,.4g}" for reward in self.rewards_G[:16])
        rewards += " ..." if len(self) > 16 else ""
        failed = f", {self.num_failed} failed" if self.num_failed else ""
        return f"Group {_short(self.id)}: task {_short(self.task.id)}, rewards {rewards}{failed}"

    @property
    def rewards_G(self) -> Sequence[float]:
        """One reward per member."""
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled a token of the group; None without tokens."""
        return min((v for t in self.trajectories for v in t.policy_versions[:1]), default=None)


def _short(value: object, limit: int = 80) -> str:
    text = " ".join(str(value)[: 4 * limit].split())
    text = "".join(c if c.isprintable() else f"[U+{ord(c):04X}]" for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
