"""Means, confidence intervals, pass@k and resource use, with the standard library only."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    """An estimate with its confidence bounds."""

    mean: float
    low: float
    high: float


def mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean; NaN if there are no values."""
    items = list(values)
    return math.fsum(items) / len(items) if items else math.nan


def merge_means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each key over the rows that have it."""
    keys = sorted({key for row in rows for key in row})
    return {key: mean(row[key] for row in rows if key in row) for key in keys}


def wilson_interval(num_successes: float, num_trials: float, *, z: float = 1.96) -> Interval:
    """Return the 95% score interval of a proportion (Wilson 1927).

    It is valid for proportions of 0 and 1, and for small samples.
    """
    if num_trials == 0:
        return Interval(math.nan, 0.0, 1.0)
    p = num_successes / num_trials
    denominator = 1 + z * z / num_trials
    centre = (p + z * z / (2 * num_trials)) / denominator
    spread = z * math.sqrt(p * (1 - p) / num_trials + z * z / (4 * num_trials**2)) / denominator
    return Interval(p, max(0.0, centre - spread), min(1.0, centre + spread))


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the mean with its 95% interval (Student's t); no bounds for fewer than five values.

    For paired measurements, pass the differences.
    """
    num = len(values)
    if num < _FEWEST:
        return Interval(mean(values), -math.inf, math.inf)
    spread = _t_95(num - 1) * math.sqrt(_variance(values) / num)
    centre = mean(values)
    return Interval(centre, centre - spread, centre + spread)


def difference_interval(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Return mean(a) - mean(b) of independent samples with its 95% interval (Welch 1947)."""
    centre = mean(a) - mean(b)
    if min(len(a), len(b)) < _FEWEST:
        return Interval(centre, -math.inf, math.inf)
    parts = [_variance(values) / len(values) for values in (a, b)]
    total = math.fsum(parts)
    if total == 0:
        return Interval(centre, centre, centre)
    freedom = total**2 / math.fsum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (a, b), strict=True)
    )
    spread = _t_95(freedom) * math.sqrt(total)
    return Interval(centre, centre - spread, centre + spread)


_FEWEST = 5


def _variance(values: Sequence[float]) -> float:
    centre = mean(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)


def _t_95(freedom: float) -> float:
    """Return the 97.5% quantile of Student's t (Cornish-Fisher, to 0.01 if `freedom` >= 4)."""
    z, n = 1.959964, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate without bias P(at least one of k samples is right) (Chen et al. 2021, eq. 1).

    Raises:
        ValueError: `k` exceeds the number of samples.
    """
    if k > num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples per task, got {num_samples}")
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_at_k_interval(counts: Sequence[tuple[int, int]], k: int, *, num_samples: int) -> Interval:
    """Return pass@k with a 95% interval over tasks; tasks with fewer than k episodes are left out.

    Samples of one task are not independent, so the score interval uses the number of independent
    trials that would have the variance seen between tasks. `counts` has (scored episodes,
    successes) of each task, of which `num_samples` episodes were asked for.
    """
    estimates = [pass_at_k(n, c, k) for n, c in counts if n >= k]
    if not estimates:
        return Interval(math.nan, 0.0, 1.0)
    p = mean(estimates)
    variance = mean((estimate - p) ** 2 for estimate in estimates)
    num_trials = float(len(estimates))
    if 0 < p < 1:  # at the ends the variance says nothing: one trial per task
        num_independent = num_trials * p * (1 - p) / variance if variance > 0 else math.inf
        num_trials = min(num_trials * num_samples, num_independent)
    return wilson_interval(p * num_trials, num_trials)


def pass_hat_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate without bias pass^k, P(all of k samples are right) (Yao et al. 2024, section 3).

    Raises:
        ValueError: `k` exceeds the number of samples.
    """
    if k > num_samples:
        raise ValueError(f"pass^{k} needs at least {k} samples per task, got {num_samples}")
    return math.comb(num_correct, k) / math.comb(num_samples, k)


def cpu_s() -> float:
    """Return the CPU seconds of this process so far, and of its children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def rss_mb(pid: int | None = None) -> float | None:
    """Return the resident memory of a process (by default this one) in 1e6 bytes.

    Without Linux's /proc, it is this process's peak, and None for other processes.
    """
    try:
        with open(f"/proc/{pid or 'self'}/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize() / 1e6
    except OSError:
        if pid is not None:
            return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3
