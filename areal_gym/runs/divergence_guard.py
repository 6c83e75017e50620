"""Stops a run whose policy diverges, and keeps the last good checkpoint.

    row of metrics -> severity of each signal -> far from its limit: a checkpoint now and then
                                                 at half its limit: a checkpoint
                                                 at its limit: a warning
                                                 at its limit `patience` steps later: DivergedError

Signals are taken over `guard.window` steps, because single steps are noisy. docs/trainer.md gives
the reasons for the limits, with figures of runs that diverged and of runs that did not.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from areal_gym.config import RunConfig
from areal_gym.config.online_settings import ONLINE
from areal_gym.errors import DivergedError
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.run_dir.trajectory_files import step_of
from areal_gym.runs.run_display import Display
from areal_gym.types import Trajectory
from areal_gym.utils.command_words import quoted

_CALM = 0.25
"""A policy is certainly good while all signals are below this share of their limits."""
_CAUTION = 0.5
"""A checkpoint is written at this share of a limit, while the policy is still good."""
_ENTROPY_FLOOR = 1.0
"""Nats. A smaller rise is never too much, because confident policies may begin to explore."""
_STANDARD_ERRORS = 5.0
"""A reward has fallen only if it fell by this many standard errors of the difference. A run has
hundreds of windows, and each is compared with the best of all."""
_CHANCE = 2.0
"""A reward has risen only if it rose by this many standard errors of the difference."""
_KEPT_GAIN = 0.5
"""While entropy may rise, the reward must keep this share of its largest rise."""
_MIN_GROUPS = 32
"""A mean reward covers at least this many groups, and more than `guard.window` steps if needed,
because tasks differ more than siblings do."""
_MOST_ROWS = 128
"""The number of past steps that are kept."""
_METRICS = ("train/approx_kl", "train/ratio", "train/stale_ratio", "train/entropy")
_REWARDS = ("reward/newest", "reward/newest_std", "reward/newest_min", "reward/newest_episodes")


class NewestRewards:
    """Collects the rewards of episodes that ended since the last step, whether trained on or not.

    They come from the newest policy versions, while a batch may be `rollout.max_staleness` versions
    older.
    """

    def __init__(self) -> None:
        self._rewards: list[float] = []

    def add(self, trajectory: Trajectory) -> None:
        """Count an ended episode, unless it failed."""
        if not trajectory.stop_reason.is_failure and math.isfinite(trajectory.reward):
            self._rewards.append(trajectory.reward)

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call; {} if no episode has ended."""
        rewards, self._rewards = self._rewards, []
        if not rewards:
            return {}
        values = statistics.fmean(rewards), statistics.pstdev(rewards), min(rewards), len(rewards)
        return {name: float(value) for name, value in zip(_REWARDS, values, strict=True)}


class DivergenceGuard:
    """Judges a run by the metrics of its steps; `rows` are those of the steps so far."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDir,
        display: Display,
        rows: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self._config, self._directory, self._display = config, directory, display
        # Rewards may fall for other reasons if tasks change, or if the reward is not the objective.
        has_same_tasks = config.rollout.curriculum is None and config.env.id != ONLINE
        self._judges_reward = config.objective == "rl" and has_same_tasks
        # A student takes over its teacher's entropy, whatever that is.
        self._judges_entropy = config.objective != "distill"
        # Bounded, because runs have millions of steps and old ones tell nothing about today.
        self._rows: deque[dict[str, float]] = deque(maxlen=max(_MOST_ROWS, config.guard.window))
        self._severities: dict[int, float] = {}
        """The severity at steps that were not calm; it is 0 at all others."""
        self._newest_step, self._newest_severity = 0, 0.0
        self._best_reward, self._lowest_reward = -math.inf, math.inf
        self._usual_entropy: float | None = None
        self._usual_reward: float | None = None
        self._last_wanted = self._num_beyond = self._first_beyond = 0
        self._reason = ""
        self.wants_checkpoint = False
        """Whether to save the policy now: it is good and was not saved for long, or the first sign
        of trouble has appeared."""
        self.protected: frozenset[int] = frozenset()
        """Steps whose checkpoints must not be deleted."""
        for row in rows:
            self._judge(row)
        self._num_beyond = 0  # a resumed run gets the full patience

    def observe(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Judge a step by its metrics; return the guard's own metrics."""
        settings = self._config.guard
        if settings.action == "ignore":
            return {}
        was_calm = self._newest_severity < _CAUTION
        severity = self._judge(row)
        step = int(row["step"])
        self.wants_checkpoint = (was_calm and _CAUTION <= severity < 1) or (
            severity < _CALM and self._is_time_to_save(step)
        )
        if self.wants_checkpoint:
            self._last_wanted = step
        good = self.good_checkpoint()
        self.protected = frozenset() if good is None else frozenset({good})
        if self._num_beyond == 1:
            self._first_beyond = step
            end = f"; after {settings.patience} more such steps the run stops"
            end = "" if settings.action == "warn" else end
            self._display.say(f"warning: the policy may be diverging: {self._reason}{end}")
        return {"guard/severity": severity}

    def raise_if_diverged(self) -> None:
        """Raise DivergedError if a signal has stayed beyond its limit for too long."""
        guard = self._config.guard
        if guard.action != "stop" or self._num_beyond <= guard.patience:
            return
        good, where = self.good_checkpoint(), "no checkpoint was written before"
        if good is not None:
            where = f"the last good checkpoint is {self._directory.checkpoint(good)}"
        raise DivergedError(
            f"the policy has been diverging since step {self._first_beyond}: {self._reason}; "
            f"{where}",
            hints=self._hints(good),
        )

    def good_checkpoint(self) -> int | None:
        """Return the step of the newest checkpoint after which nothing was wrong.

        This is known some steps later only, because a policy is judged by the episodes of the
        policies that follow. If there is none, the step of the least suspect checkpoint from before
        a limit was passed is returned, and None without one.
        """
        steps = self._saved_steps()
        window = self._config.guard.window
        beyond = {step for step, severity in self._severities.items() if severity >= 1}
        calm = [step for step in steps if beyond.isdisjoint(range(step, step + window + 1))]
        if calm:
            confirmed = [step for step in calm if step + window <= self._newest_step]
            return (confirmed or calm)[-1]
        before = [step for step in steps if step not in beyond]
        return min(before, key=lambda step: (self._severities.get(step, 0.0), -step), default=None)

    def _saved_steps(self) -> list[int]:
        steps = map(step_of, self._directory.checkpoints_dir.glob("step-*"))
        return sorted(step for step in steps if step is not None)

    def _is_time_to_save(self, step: int) -> bool:
        every, regular = self._config.guard.save_every, self._config.trainer.save_every
        if not every or len(self._rows) < self._config.guard.window:
            return False
        # The newest checkpoint may not be on disk yet.
        newest = max([0, self._last_wanted, *self._saved_steps()])
        if regular:
            newest = max(newest, step // regular * regular)
        return step - newest >= every

    def _judge(self, row: Mapping[str, Any]) -> float:
        numbers = {name: row.get(name) for name in (*_METRICS, *_REWARDS)}
        self._rows.append({name: x for name, x in numbers.items() if x is not None})
        lowest = self._rows[-1].get("reward/newest_min", math.inf)
        self._lowest_reward = min(self._lowest_reward, lowest)
        window = list(self._rows)[-self._config.guard.window :]
        severity, reason = 0.0, ""
        if len(window) == self._config.guard.window:
            reward = self._mean_reward() if self._judges_reward else None
            signals = [self._kl(window), self._ratio(window), self._entropy(window, reward)]
            if reward is not None:
                signals.append(self._reward(*reward))
            severity, reason = max(signals)
        self._newest_step, self._newest_severity = int(row["step"]), severity
        if severity >= _CALM:
            self._severities[self._newest_step] = severity
        self._num_beyond = self._num_beyond + 1 if severity >= 1 else 0
        self._reason = reason
        return severity

    def _kl(self, window: list[dict[str, float]]) -> tuple[float, str]:
        limit, kl = self._config.guard.kl, _median(window, "train/approx_kl")
        if limit is None or kl is None:
            return 0.0, ""
        return kl / limit, (
            f"its KL divergence from the policies that sampled is {kl:.2g} nats a token "
            f"(guard.kl = {limit:g})"
        )

    def _ratio(self, window: list[dict[str, float]]) -> tuple[float, str]:
        limit = self._config.guard.ratio
        medians = [_median(window, name) for name in ("train/ratio", "train/stale_ratio")]
        ratios = [ratio for ratio in medians if ratio is not None and ratio > 0]
        if limit is None or not ratios:
            return 0.0, ""
        ratio = max(ratios, key=lambda ratio: abs(math.log(ratio)))
        return abs(math.log(ratio)) / math.log(limit), (
            f"the mean ratio to the policy that sampled is {ratio:.2g}, and 1 where policies are "
            f"near (guard.ratio = {limit:g})"
        )

    def _entropy(
        self, window: list[dict[str, float]], reward: tuple[float, float] | None
    ) -> tuple[float, str]:
        limit, entropy = self._config.guard.entropy, _median(window, "train/entropy")
        if limit is None or entropy is None or not self._judges_entropy:
            return 0.0, ""
        if self._usual_entropy is None:
            self._usual_entropy = entropy
        if reward is not None and self._has_risen(*reward):
            return 0.0, ""
        usual = self._usual_entropy
        highest = max(limit * usual, usual + _ENTROPY_FLOOR)
        return (entropy - usual) / (highest - usual), (
            f"its entropy has risen from {usual:.2g} to {entropy:.2g} nats a token "
            f"(guard.entropy = {limit:g} times)"
        )

    def _has_risen(self, reward: float, noise: float) -> bool:
        # If the reward rises together with the entropy, the policy explores and does not diverge.
        if self._usual_reward is None:
            return False
        best_gain = self._best_reward - self._usual_reward
        return reward - self._usual_reward > max(_CHANCE * noise, _KEPT_GAIN * best_gain)

    def _reward(self, reward: float, noise: float) -> tuple[float, str]:
        limit, best = self._config.guard.reward, self._best_reward
        if limit is None:
            return 0.0, ""
        tolerated = max(limit * (best - self._lowest_reward), _STANDARD_ERRORS * noise)
        if tolerated <= 0:
            return 0.0, ""
        return (best - reward) / tolerated, (
            f"the reward of its newest versions has fallen from {best:.3g} to {reward:.3g} "
            f"(guard.reward = {limit:g})"
        )

    def _mean_reward(self) -> tuple[float, float] | None:
        # With the standard error of a difference of two such means; None while there are too few.
        rows = self._reward_window()
        if not rows:
            return None
        reward = statistics.fmean(row["reward/newest"] for row in rows)
        if self._usual_reward is None:
            self._usual_reward = reward
        self._best_reward = max(self._best_reward, reward)
        variance = statistics.pvariance([row["reward/newest"] for row in rows])
        variance += statistics.fmean(row["reward/newest_std"] ** 2 for row in rows)
        return reward, math.sqrt(2 * variance / sum(map(self._num_groups, rows)))

    def _reward_window(self) -> list[dict[str, float]]:
        # Return the newest steps with enough groups, or [] if there are too few.
        rows: list[dict[str, float]] = []
        num_groups = 0.0
        for row in reversed(self._rows):
            if any(name not in row for name in _REWARDS):
                continue
            rows.append(row)
            num_groups += self._num_groups(row)
            if len(rows) >= self._config.guard.window and num_groups >= _MIN_GROUPS:
                return rows
        return []

    def _num_groups(self, row: Mapping[str, float]) -> float:
        # Siblings play the same task, so a group counts as one sample.
        return row["reward/newest_episodes"] / self._config.rollout.group_size

    def _hints(self, good: int | None) -> list[str]:
        config, path = self._config, self._directory.path
        trainer = config.trainer
        slower = f"trainer.lr={trainer.lr / 2:g}"
        if trainer.optimizer == "muon":
            slower += f" trainer.muon_lr={trainer.muon_lr / 2:g}"
        hints = [
            f"begin again more slowly: {slower}; trainer.save_every=10 keeps checkpoints on the way"
            if good is None
            else f"continue from it more slowly: areal-gym train --resume --from-step {good} "
            f"--out {quoted(path)} {slower}"
        ]
        if config.rollout.max_staleness:
            nearer = ["trainer.correction.second_moment=0.04"]
            if trainer.minibatches > 1:
                nearer.append("trainer.minibatches=1")
            nearer.append(f"rollout.max_staleness={config.rollout.max_staleness // 2}")
            hints.append(f"or stay nearer to the policies that sample: {', or '.join(nearer)}")
        hints.append(f"look at it: areal-gym view {quoted(path)}")
        hints.append("if this is intended: guard.action=warn continues (docs/trainer.md)")
        return hints


def _median(rows: list[dict[str, float]], name: str) -> float | None:
    # None if less than half of the steps have the number.
    values = [row[name] for row in rows if name in row and math.isfinite(row[name])]
    return statistics.median(values) if 2 * len(values) > len(rows) else None
