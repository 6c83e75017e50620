"""Is asynchronous training as good as synchronous? After AReaL's table of staleness.

    python benchmarks/reproduce/staleness.py [--arms default,full_rate] [--eta 1,2,4,8]
                   [--updates 1,4] [--rates 1,2] [--seeds 5] [--runs FILE.jsonl] [--quick] [--json]

Whole runs of `areal-gym train --env tir` from one warm start per seed: 8 groups of 8 episodes a
step, the buffer kept full, so that the batches are as old as `rollout.max_staleness` (eta) lets
them be. The synchronous run with the same updates a step and the same learning rate is beside each.
Runs that FILE holds are not repeated, so an interrupted benchmark goes on.

default    the settings as they are
full_rate  the decoupled objective at the full learning rate: `trainer.staleness_damping=0`
naive      clips around the policy that sampled, full rate: `trainer.correction.proximal=recorded`
m2po       M2PO's mask, full rate

rate       times the demonstration's (Muon, 3e-3 and 3e-4)
held-out   sampled accuracy over 512 tasks at the end: mean over the seeds, the lowest
against    the difference from the synchronous run of the same seed: mean, and its 95% interval
           (paired t) from five seeds on
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from areal_gym.config import RunConfig, load_config
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.train import train
from areal_gym.utils.statistics import mean_interval

_FULL = "trainer.staleness_damping=0"
ARMS = {
    "default": [],
    "full_rate": [_FULL],
    "naive": [_FULL, "trainer.correction.proximal=recorded"],
    "m2po": [_FULL, "trainer.correction.second_moment=0.04"],
}
PAPER = "naive 42.0 41.8 40.0 23.3 35.7, decoupled - 42.1 41.8 42.2 41.0"
_STEPS = {1: 60, 2: 40}

Case = tuple[str, int, int, int, int]
"""Arm, eta, updates a step, rate, seed."""


def settings(case: Case, *, is_quick: bool = False) -> RunConfig:
    arm, eta, updates, rate, seed = case
    return load_config(
        overrides=[
            *("env.id=tir", "engine.max_context=256", "engine.num_slots=64"),
            *("rollout.batch_groups=8", "rollout.group_size=8"),
            f"rollout.max_staleness={eta}",
            f"rollout.max_in_flight={64 * (eta + 1)}",
            *("trainer.optimizer=muon", f"trainer.minibatches={updates}"),
            *(f"trainer.lr={3e-4 * rate}", f"trainer.muon_lr={3e-3 * rate}"),
            f"eval.num_tasks={32 if is_quick else 512}",
            f"steps={3 if is_quick else _STEPS[rate]}",
            # A run that is lost goes on to its end: that is what is measured.
            *("guard.action=ignore", f"seed={seed}", *ARMS[arm]),
        ]
    )


def played(case: Case, *, is_quick: bool) -> dict[str, Any]:
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        run = RunDir(Path(home) / "run")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            train(settings(case, is_quick=is_quick), run_dir=run.path)
        rows = run.read_metrics()
        summary = json.loads((run.path / "summary.json").read_text())
    return {
        "case": list(case),
        "heldout": summary["heldout_after"],
        "greedy": summary["heldout_greedy_after"],
        "staleness": statistics.mean(row["rollout/staleness_mean"] for row in rows),
        "kl": statistics.median(row["train/approx_kl"] for row in rows),
        "severity": max(row.get("guard/severity", 0.0) for row in rows),
        "s": round(time.monotonic() - start_s, 1),
    }


def against(differences: list[float]) -> str:
    mean, low, high = mean_interval(differences)
    return f"{mean:+.3f}" + (f" ({low:+.3f} to {high:+.3f})" if math.isfinite(low) else "")


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", default="default,full_rate")
    parser.add_argument("--eta", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--updates", type=numbers, default=[1, 4])
    parser.add_argument("--rates", type=numbers, default=[1, 2])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=Path, help="keeps what was played, one line a run")
    parser.add_argument("--quick", action="store_true", help="one seed, three steps: does it run?")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.arms, options.eta, options.updates, options.rates = "default", [2], [2], [1]
        options.seeds = 1
    arms = options.arms.split(",")
    runs: dict[Case, dict[str, Any]] = {}
    if options.runs and options.runs.exists():
        for line in options.runs.read_text().splitlines():
            row = json.loads(line)
            runs[tuple(row["case"])] = row
    grid = list(itertools.product(options.updates, options.rates))
    for seed in range(options.seeds):
        wanted: list[Case] = [("default", 0, updates, rate, seed) for updates, rate in grid]
        wanted += [
            (arm, eta, updates, rate, seed)
            for (updates, rate), eta, arm in itertools.product(grid, options.eta, arms)
        ]
        for case in wanted:
            if case in runs:
                continue
            runs[case] = played(case, is_quick=options.quick)
            print(json.dumps(runs[case]), file=sys.stderr, flush=True)
            if options.runs:
                with options.runs.open("a") as file:
                    file.write(json.dumps(runs[case]) + "\n")
    if options.json:
        print(json.dumps(list(runs.values())))
        return
    print(f"The paper (AIME24 at eta 0, 1, 2, 4, 8): {PAPER}\n")
    print("| updates | rate | eta | arm | held-out | lowest | against synchronous | KL | lag |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (updates, rate), eta in itertools.product(grid, [0, *options.eta]):
        for arm in ["default"] if eta == 0 else arms:
            rows = [runs[arm, eta, updates, rate, seed] for seed in range(options.seeds)]
            synchronous = [runs["default", 0, updates, rate, s] for s in range(options.seeds)]
            heldout = [row["heldout"] for row in rows]
            pairs = zip(rows, synchronous, strict=True)
            differences = [row["heldout"] - beside["heldout"] for row, beside in pairs]
            print(
                f"| {updates} | {rate} | {eta} | {arm} | {statistics.mean(heldout):.3f} | "
                f"{min(heldout):.3f} | {against(differences) if eta else ''} | "
                f"{statistics.median(row['kl'] for row in rows):.4f} | "
                f"{statistics.mean(row['staleness'] for row in rows):.1f} |"
            )


if __name__ == "__main__":
    main()
