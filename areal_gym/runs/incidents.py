"""Counts what went wrong during a step: metrics, and a few words on the step line.

A new kind of incident is one more row of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from areal_gym.runs.restarts import RESTARTED
from areal_gym.utils.markup import counted

PREFIX = "incidents/"


class Incident(NamedTuple):
    """One kind of incident; the step's count of it is the metric `incidents/<name>`."""

    name: str
    noun: str
    outcome: str
    counter: str
    """The metric of the step's row that counts it; one that ends with "/" is all metrics below."""
    less: str = ""
    """A metric that is subtracted, because another incident has it."""
    is_total: bool = True
    """Whether the metrics count since the start of the process, and not within the step."""


_FAILED, _LOST = "rollout/failures/", "rollout/lost_episodes"

INCIDENTS = (
    Incident("failed_episodes", "episode", "failed", _FAILED, less=_LOST),
    Incident("retried_episodes", "episode", "retried", "rollout/retries"),
    Incident("bad_rewards", "reward", "not finite", "rollout/failures/reward_error"),
    Incident("lost_episodes", "episode", "lost", _LOST),
    Incident("replayed_groups", "group", "played again", "rollout/replayed_groups"),
    Incident("lost_groups", "group", "dropped", "rollout/failed_groups"),
    Incident("dropped_tasks", "task", "dropped", "rollout/dropped_tasks"),
    Incident("shrunken_groups", "group", "shrunken", "rollout/shrunken_groups", is_total=False),
    Incident("lost_servers", "server", "lost", "engine/num_servers_lost"),
    # `RunContext.record` has counted it: objectives on fixed data can lose their trainer, too.
    Incident("restarted_trainers", "trainer", "restarted", RESTARTED, is_total=False),
)


class IncidentCounter:
    """Turns the counters of each step's row into the step's own incidents."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}

    def count(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Return `incidents/<name>` for each row of the table, and remember the totals."""
        counts = {}
        for incident in INCIDENTS:
            total = _matching(row, incident.counter) - _matching(row, incident.less)
            before = self._totals.get(incident.name, 0.0) if incident.is_total else 0.0
            self._totals[incident.name] = total
            counts[PREFIX + incident.name] = max(0.0, total - before)
        return counts


def describe_incidents(metrics: Mapping[str, Any]) -> str:
    """Return the incidents of a step for people, and "" where nothing went wrong."""
    counts = {each: round(metrics.get(PREFIX + each.name) or 0) for each in INCIDENTS}
    return ", ".join(
        f"{counted(n, each.noun)} {each.outcome}" for each, n in counts.items() if n > 0
    )


def _matching(row: Mapping[str, Any], counter: str) -> float:
    if not counter.endswith("/"):
        return float(row.get(counter) or 0.0)
    return sum(float(value or 0.0) for name, value in row.items() if name.startswith(counter))
