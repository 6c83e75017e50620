"""The parts of a step's time, and what a run is limited by.

    T_train   the trainer's own time: what a step would take if batches were always there
    T_gen     what a batch would take if nothing ever kept episodes waiting to start:
              episode-seconds played during the step / episodes that may be in flight
    overlap efficiency = max(T_gen, T_train) / the step's wall time

At 1 the slower of the two works all the time, and the other one hides behind it. A synchronous run
adds them up, and waits for its slowest episode besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal_gym.rollout.stats import RolloutStats


@dataclass(slots=True)
class StepTimes:
    """Turns two snapshots of the runner, and the trainer's times, into a step's metrics."""

    max_in_flight: int
    before: RolloutStats

    def measure(self, now: RolloutStats, metrics: Mapping[str, float]) -> dict[str, float | str]:
        """Return the metrics of the step that has ended, from the runner's counters `now`.

        `metrics` has the trainer's `time/step_s`, `time/wait_s`, `time/train_s` and
        `time/publish_s`.
        """
        before, self.before = self.before, now
        wall_s = max(now.elapsed_s - before.elapsed_s, 1e-9)
        engine_s, env_s = now.engine_s - before.engine_s, now.env_s - before.env_s
        played_s = engine_s + env_s + now.agent_s - before.agent_s
        generation_s = played_s / self.max_in_flight
        best_s = max(generation_s, metrics["time/train_s"])
        return {
            "time/generation_s": generation_s,
            "time/overlap_efficiency": min(1.0, best_s / wall_s),
            "time/share_engine": engine_s / max(played_s, 1e-9),
            "time/share_env": env_s / max(played_s, 1e-9),
            "rollout/in_flight_mean": played_s / wall_s,
            "rollout/generated_tokens_per_s": (now.num_tokens - before.num_tokens) / wall_s,
            "limited_by": _limited_by(metrics, engine_s=engine_s, env_s=env_s),
        }


def _limited_by(metrics: Mapping[str, float], *, engine_s: float, env_s: float) -> str:
    wait_s, train_s = metrics["time/wait_s"], metrics["time/train_s"]
    publish_s = metrics["time/publish_s"]
    if wait_s >= max(train_s, publish_s):  # the trainer waited for rollouts for most of the step
        return "environment" if env_s > engine_s else "generation"
    return "training" if train_s >= publish_s else "publication"
