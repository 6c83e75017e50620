"""Counts what went wrong during a step, for metrics and the line of the step.

A new kind of incident is one more row of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from areal_gym.runs.restarts import RESTARTED
from areal_gym.utils.markup import counted

PREFIX = "incidents/"


class Incident(NamedTuple):
    """One kind of incident; its count in a step is the metric `incidents/<name>`."""

    name: str
    noun: str
    outcome: str
    counter: str
    """The metric that counts it; with a final "/", the sum of all metrics below that name."""
    less: str = ""
    """A metric that is subtracted, because another incident counts it."""
    is_total: bool = True
    """Whether the metrics count since the start of the process, not within the step."""


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
    # `RunContext.record` counts it, because objectives on fixed data can lose their trainer, too.
    Incident("restarted_trainers", "trainer", "restarted", RESTARTED, is_total=False),
)


class IncidentCounter:
    """Turns the counters in each step's row into counts of the step's incidents."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = {}

    def count(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Return `incidents/<name>` for each incident, and remember the totals."""
        counts = {}
        for incident in INCIDENTS:
            total = _matching(row, incident.counter) - _matching(row, incident.less)
            before = self._totals.get(incident.name, 0.0) if incident.is_total else 0.0
            self._totals[incident.name] = total
            counts[PREFIX + incident.name] = max(0.0, total - before)
        return counts


def describe_incidents(metrics: Mapping[str, Any]) -> str:
    """Return the incidents of a step as text; "" if nothing went wrong."""
    counts = {incident: round(metrics.get(PREFIX + incident.name) or 0) for incident in INCIDENTS}
    return ", ".join(
        f"{counted(n, incident.noun)} {incident.outcome}" for incident, n in counts.items() if n > 0
    )


def _matching(row: Mapping[str, Any], counter: str) -> float:
    if not counter.endswith("/"):
        return float(row.get(counter) or 0.0)
    return sum(float(value or 0.0) for name, value in row.items() if name.startswith(counter))
