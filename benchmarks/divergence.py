"""Does the guard stop runs that diverge, and no others? Whole runs of `tir`, judged step by step.

    python benchmarks/divergence.py [--only lost,default] [--seeds 2] [--json]

lost       8 versions behind, 4 updates a step, twice the demonstration's rate, which old batches do
           not lower (`trainer.max_drift=null`): held-out 0.00
stale      the same at the demonstration's rate
fast       synchronous, 4 updates a step, twice the rate
default    the demonstration: synchronous, one update a step

warns      the step of the warning
stops      the step at which the run was stopped
good       the checkpoint that the error names
severity   the largest share of its limit that a signal has reached
reward     of the batch and of the newest version, in the last step
CPU-s      of the run, without its warm start
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from areal_gym.config import RunConfig, load_config
from areal_gym.errors import DivergedError
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.train import train

_BATCH = ["rollout.batch_groups=8", "rollout.group_size=8", "engine.num_slots=64"]
_BEHIND = [*_BATCH, "rollout.max_staleness=8", "rollout.max_in_flight=576"]
_BEHIND += ["trainer.minibatches=4", "trainer.max_drift=null"]
_TWICE = ["trainer.lr=6e-4", "trainer.muon_lr=6e-3"]
_ONCE = ["trainer.lr=3e-4", "trainer.muon_lr=3e-3"]
ARMS = {
    "lost": [*_BEHIND, *_TWICE, "steps=40"],
    "stale": [*_BEHIND, *_ONCE, "steps=60"],
    "fast": [*_BATCH, *_TWICE, "trainer.minibatches=4", "steps=40"],
    "default": [*_ONCE, "steps=60"],
}


def settings(arm: str, seed: int) -> RunConfig:
    common = ["env.id=tir", "engine.max_context=256", "trainer.optimizer=muon", "eval.num_tasks=64"]
    return load_config(overrides=[*common, *ARMS[arm], f"seed={seed}"])


def run(arm: str, seed: int) -> dict[str, Any]:
    start_s = time.process_time()
    with tempfile.TemporaryDirectory() as home:
        directory = Path(home) / "run"
        error = ""
        try:
            train(settings(arm, seed), run_dir=directory)
        except DivergedError as diverged:
            error = diverged.message
        rows = RunDir(directory).read_metrics()
    severities = {row["step"]: row["guard/severity"] for row in rows}
    last = rows[-1]
    return {
        "arm": arm,
        "seed": seed,
        "warns": next((step for step, severity in severities.items() if severity >= 1), None),
        "stops": last["step"] if error else None,
        "good": error.rpartition("step-")[2] if "step-" in error else None,
        "severity": round(max(severities.values()), 2),
        "reward": f"{last['reward/mean']:.2f} {last.get('reward/newest', float('nan')):.2f}",
        "kl": round(statistics.median(row["train/approx_kl"] for row in rows[-5:]), 4),
        "cpu_s": round(time.process_time() - start_s, 1),
        "error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(ARMS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = []
    for arm in options.only.split(","):
        for seed in range(options.seeds):
            results.append(run(arm, seed))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(results))
        return
    columns = ["arm", "seed", "warns", "stops", "good", "severity", "kl", "reward", "cpu_s"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for result in results:
        print("| " + " | ".join(str(result[column]) for column in columns) + " |")


if __name__ == "__main__":
    main()
