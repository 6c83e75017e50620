"""Played episodes as a sequence, with a summary and tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

from areal_gym.errors import ConfigError
from areal_gym.types import Trajectory, readable
from areal_gym.utils.markup import block, escaped, number, short, table
from areal_gym.utils.statistics import mean

if TYPE_CHECKING:
    import datasets
    import pandas

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Rollouts(Sequence[Trajectory]):
    """Trajectories of played episodes, failures included."""

    trajectories: tuple[Trajectory, ...]
    wall_s: float = 0.0

    @property
    def scored(self) -> list[Trajectory]:
        """Trajectories that did not fail; all means are over them."""
        return [t for t in self.trajectories if not t.stop_reason.is_failure]

    @property
    def mean_reward(self) -> float:
        """The mean reward of the scored trajectories; NaN without any."""
        return mean(t.reward for t in self.scored)

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat row per episode: task, reward and its parts, turns, messages, ..."""
        parts = sorted({name for t in self for name in t.reward_parts})
        metrics = sorted({name for t in self for name in t.metrics})
        return [
            {
                "task_id": t.task.id,
                "env": t.env_id,
                "reward": None if t.stop_reason.is_failure else t.reward,
                "num_turns": len(t.turns),
                "num_tokens": t.num_policy_tokens,
                "stop_reason": str(t.stop_reason),
                "error": t.error,
                **{f"reward/{name}": t.reward_parts.get(name) for name in parts},
                **{f"metrics/{name}": t.metrics.get(name) for name in metrics},
                "task": json.dumps(t.task.to_dict()["data"], ensure_ascii=False),
                "messages": [{"role": m["role"], "content": m["content"]} for m in t.messages],
                "seed": t.seed,
            }
            for t in self
        ]

    def to_pandas(self) -> pandas.DataFrame:
        """Return `rows` as a table; raise ConfigError if pandas is not installed."""
        return _imported("pandas").DataFrame(self.rows())

    def to_dataset(self) -> datasets.Dataset:
        """Return `rows` as a Hugging Face data set; raise ConfigError if datasets is missing."""
        return _imported("datasets").Dataset.from_list(self.rows())

    def __len__(self) -> int:
        return len(self.trajectories)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...

    @overload
    def __getitem__(self, index: slice) -> Rollouts: ...

    def __getitem__(self, index: int | slice) -> Trajectory | Rollouts:
        if isinstance(index, slice):
            return Rollouts(self.trajectories[index], self.wall_s)
        return self.trajectories[index]

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def _repr_html_(self) -> str:
        rows = []
        for t in self[:_SHOWN]:
            reward = number(None if t.stop_reason.is_failure else t.reward)
            end = short(t.error or (readable(t.messages[-1]["content"]) if t.messages else ""))
            rows.append((short(t.task.id, 40), reward, len(t.turns), t.stop_reason, end))
        left_out = f"<small>… {len(self) - _SHOWN:,} more</small>" if len(self) > _SHOWN else ""
        head = ("task", "reward", "turns", "stopped by", "last message or error")
        return block("", f"<pre>{escaped(self)}</pre>", table(head, rows), left_out)

    def __repr__(self) -> str:
        scored = self.scored
        lines = [f"{len(self)} episodes in {self.wall_s:.1f} s, mean reward {self.mean_reward:.3f}"]
        parts = sorted({name for t in scored for name in t.reward_parts})
        names = {name: mean(t.reward_parts.get(name, 0.0) for t in scored) for name in parts}
        if names:
            shown = [f"{short(name, 40)} {value:.3f}" for name, value in names.items()]
            lines.append("  " + ", ".join(shown[:_SHOWN]))
        stops = Counter(str(t.stop_reason) for t in self).most_common()
        counts = ", ".join(f"{reason} {count}" for reason, count in stops)
        lines.append(f"  {mean(len(t.turns) for t in scored):.1f} turns; stopped by {counts}")
        errors = Counter(t.error for t in self if t.stop_reason.is_failure).most_common(1)
        lines += [f"  {count} x {short(error, 300)}" for error, count in errors]
        return "\n".join(lines)


def _imported(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise ConfigError(
            f"this table needs the package {package}",
            hints=[f"install it: pip install {package}", "rows() gives plain dictionaries"],
        ) from None
