"""Rules on side effects: on other episodes, other instances and the process."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
import subprocess
import time
from typing import Any

import numpy as np

from areal_gym.envs.base import StepResult, run_on_kept_loop
from areal_gym.envs.checker.env_under_test import (
    EnvUnderTest,
    RuleViolation,
    Skipped,
    best,
    digest,
    noop,
    play,
    play_async,
)
from areal_gym.utils.child_python import import_path, python_argv
from areal_gym.utils.code_references import load_reference
from areal_gym.utils.statistics import rss_mb

_MOST_S = 300.0
_MOST_MB = 2_000.0
"""Limit for the concurrent episodes together; a thousand of ours take a few seconds and less than
100 MB."""


def check_deterministic(subject: EnvUnderTest) -> None:
    """The same seed and actions give the same episode."""
    seeds = range(min(subject.num_tasks, 8))
    if digest(subject.make, seeds) != digest(subject.make, seeds):
        raise RuleViolation("two instances differ; draw from self.np_random and nowhere else")


def check_processes(subject: EnvUnderTest) -> None:
    """Other processes, with other hash seeds, play the same episodes."""
    if subject.entry_point is None:
        raise Skipped("no other process can import it")
    seeds = range(min(subject.num_tasks, 4))
    argument = json.dumps([subject.entry_point, dict(subject.kwargs), len(seeds)])
    code = f"import sys; from {__name__} import print_digest; print_digest(sys.argv[1])"
    here = digest(subject.make, seeds)
    for hash_seed in ("1", "2"):
        process = subprocess.run(
            python_argv("-c", code, argument),
            env={
                **os.environ,
                **subject.make().process_variables,
                "PYTHONHASHSEED": hash_seed,
                **import_path(),
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if process.returncode != 0:
            raise RuleViolation(f"another process fails: {process.stderr.strip()[-300:]}")
        if process.stdout.strip().splitlines()[-1:] != [here]:
            raise RuleViolation("another process plays differently; is a set or hash() involved?")


def print_digest(argument: str) -> None:
    """Print the digest of episodes: the program that `check_processes` runs."""
    entry_point, kwargs, num_seeds = json.loads(argument)
    env_class = load_reference(entry_point, "environment")
    print(digest(lambda: env_class(**kwargs), range(num_seeds)))


def check_reset(subject: EnvUnderTest) -> None:
    """An instance that was used, left in the middle or closed plays as a new one."""
    used = subject.make()
    for seed in range(min(subject.num_tasks, 4)):
        expected = play(subject.make(), best, seed=seed)
        play(used, noop, seed=seed + 1)
        _require_same(play(used, best, seed=seed), expected, "was used")
        used.reset(seed=seed + 1)
        used.step(best(used))
        _require_same(play(used, best, seed=seed), expected, "was left in the middle")
        used.close()
        used.close()
        _require_same(play(used, best, seed=seed), expected, "was closed")
    used.close()


def _require_same(steps: list[StepResult], expected: list[StepResult], what: str) -> None:
    if steps != expected:
        raise RuleViolation(f"an instance that {what} plays differently from a new one")


def check_globals(subject: EnvUnderTest) -> None:
    """Playing changes no global generator, environment variable or working directory."""
    env = subject.make()
    # What is imported on first use may seed itself; that is done once.
    play(env, best, seed=0)
    # Moved on, so that whoever seeds them with a constant is seen.
    random.random(), np.random.random()
    before = _globals()
    for seed in range(2):
        play(env, best, seed=seed)
        play(env, noop, seed=seed)
    env.close()
    changed = [what for what, value in _globals().items() if value != before[what]]
    if changed:
        raise RuleViolation(f"it changes {', '.join(changed)}")


def _globals() -> dict[str, Any]:
    return {
        "random's global generator": random.getstate(),
        "numpy's global generator": pickle.dumps(np.random.get_state()),
        "os.environ": dict(os.environ),
        "the working directory": os.getcwd(),
    }


def check_concurrent(subject: EnvUnderTest) -> str:
    """Many episodes at once play as each of them alone, and within 300 s and 2 GB."""
    seeds = range(subject.num_concurrent)
    memory_mb, cpu_s, start_s = rss_mb() or 0.0, time.process_time(), time.perf_counter()

    async def play_all() -> list[list[StepResult]]:
        return await asyncio.gather(*(play_async(subject.make(), best, s) for s in seeds))

    together = run_on_kept_loop(play_all())
    elapsed_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
    grown_mb = (rss_mb() or 0.0) - memory_mb
    env = subject.make()
    for seed in range(min(subject.num_tasks, 8, len(seeds))):
        if play(env, best, seed=seed) != together[seed]:
            raise RuleViolation(f"seed {seed} plays differently; do instances share state?")
    env.close()
    num_steps = sum(map(len, together))
    measured = (
        f"{len(seeds):,} episodes in {elapsed_s:.1f} s, {1e3 * cpu_s / num_steps:.2g} CPU-ms a "
        f"step, {max(0.0, grown_mb):.0f} MB"
    )
    if elapsed_s > _MOST_S or grown_mb > _MOST_MB:
        raise RuleViolation(measured)
    return measured
