"""Counts what went wrong during a step: metrics, and a few words on the step line.

One table says which incidents there are. A new one is one more row: its metric, its words, and
the metrics of the step's row that count it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "incidents/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """One kind of incident.

    The words may hold `{n}`; `one` is used where there was exactly one.
    """

    name: str
    """The step's count is the metric `incidents/<name>`."""
    one: str
    many: str
    counters: tuple[str, ...]
    """Metrics of the step's row that add up to it; a name that ends with "/" takes all below it."""
    less: tuple[str, ...] = ()
    """Metrics that are subtracted, for another incident has them."""
    is_total: bool = True
    """The counters count since the start of the process, and not within the step."""


INCIDENTS = (
    Incident(
        name="failed_episodes",
        one="1 episode failed",
        many="{n} episodes failed",
        counters=("rollout/failures/",),
        less=("rollout/lost_episodes",),
    ),
    Incident(
        name="retried_episodes",
        one="1 episode retried",
        many="{n} episodes retried",
        counters=("rollout/retries",),
    ),
    Incident(
        name="bad_rewards",
        one="1 reward was not finite",
        many="{n} rewards were not finite",
        counters=("rollout/failures/reward_error",),
    ),
    Incident(
        name="lost_episodes",
        one="1 episode lost",
        many="{n} episodes lost",
        counters=("rollout/lost_episodes",),
    ),
    Incident(
        name="replayed_groups",
        one="1 group played again",
        many="{n} groups played again",
        counters=("rollout/replayed_groups",),
    ),
    Incident(
        name="lost_groups",
        one="1 group dropped",
        many="{n} groups dropped",
        counters=("rollout/failed_groups",),
    ),
    Incident(
        name="shrunken_groups",
        one="1 group shrunken",
        many="{n} groups shrunken",
        counters=("rollout/shrunken_groups",),
        is_total=False,
    ),
    Incident(
        name="lost_servers",
        one="1 server lost",
        many="{n} servers lost",
        counters=("engine/num_servers_lost",),
    ),
)


class IncidentCounter:
    """Turns the counters of each step's row into the step's own incidents."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def count(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Returns `incidents/<name>` for each row of the table; remembers the totals."""
        counts = {}
        for incident in INCIDENTS:
            total = sum(_matching(row, counter) for counter in incident.counters)
            total -= sum(_matching(row, counter) for counter in incident.less)
            before = self._before.get(incident.name, 0.0) if incident.is_total else 0.0
            self._before[incident.name] = total
            counts[PREFIX + incident.name] = max(0.0, total - before)
        return counts


def describe_incidents(metrics: Mapping[str, Any]) -> str:
    """Returns the incidents of a step for people, and "" where nothing went wrong."""
    parts = []
    for incident in INCIDENTS:
        count = round(metrics.get(PREFIX + incident.name) or 0)
        if count > 0:
            parts.append(incident.one if count == 1 else incident.many.format(n=count))
    return ", ".join(parts)


def _matching(row: Mapping[str, Any], counter: str) -> float:
    if not counter.endswith("/"):
        return float(row.get(counter) or 0.0)
    return sum(float(value or 0.0) for name, value in row.items() if name.startswith(counter))
