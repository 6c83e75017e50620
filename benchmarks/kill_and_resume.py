"""Kill a run at random moments, resume it each time: are the final weights the same, bit for bit?

    python benchmarks/kill_and_resume.py [--kills 20] [--steps 50] [--json]

`areal-gym train --env tir deterministic=true`, on the warm start from the cache. The run is killed
with SIGKILL at random moments, anywhere: while it starts, plays, trains, saves.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from areal_gym.models.tiny.checkpoint_files import load_checkpoint
from areal_gym.trainer.checkpoint import latest_checkpoint


def command(run_dir: Path, steps: int, *, is_resumed: bool) -> list[str]:
    settings = [f"steps={steps}", "deterministic=true", "trainer.save_every=1", "eval.num_tasks=8"]
    settings += ["rollout.batch_groups=8", "rollout.group_size=4"]
    whole = [sys.executable, "-m", "areal_gym", "train", "--env", "tir", "--out", str(run_dir)]
    return [*whole, "--resume"] if is_resumed else [*whole, *settings]


def run(arguments: list[str], metrics: Path, dies: Callable[[], float | None]) -> bool:
    """Whether it came to its end.

    `dies` says how many seconds after the first sign of progress (a row of metrics, or its start
    for a negative number) it is killed; None lets it live.
    """
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    after_s = dies()
    if after_s is not None:
        size = metrics.stat().st_size if metrics.exists() else 0
        while after_s >= 0 and process.poll() is None:
            if metrics.exists() and metrics.stat().st_size > size:
                break
            time.sleep(0.005)
        time.sleep(abs(after_s))
        process.send_signal(signal.SIGKILL)
    _, talk = process.communicate()
    if process.returncode > 0:
        raise SystemExit(talk.decode()[-2000:])
    return process.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    kills: list[int] = []
    with tempfile.TemporaryDirectory() as home:
        whole, again, cut = (Path(home) / name for name in ("whole", "again", "cut"))
        run(command(whole, options.steps, is_resumed=False), whole, lambda: None)
        run(command(again, options.steps, is_resumed=False), again, lambda: None)
        rows = [json.loads(line) for line in (again / "metrics.jsonl").read_text().splitlines()]
        step_s = sum(row["time/step_s"] for row in rows) / len(rows)

        def dies() -> float | None:
            if len(kills) == options.kills:
                return None
            # One in five while it still starts.
            return -rng.uniform(0, 4) if rng.random() < 0.2 else rng.uniform(0, 2.5 * step_s)

        is_done = False
        while not is_done:
            step = (latest_checkpoint(cut / "checkpoints") or (0,))[0]
            arguments = command(cut, options.steps, is_resumed=step > 0)
            is_done = run(arguments, cut / "metrics.jsonl", dies)
            if not is_done:
                step = (latest_checkpoint(cut / "checkpoints") or (0,))[0]
                kills.append(step)
                print(f"killed; the last checkpoint is of step {step}", file=sys.stderr)
                if step == 0:  # nothing to resume from
                    shutil.rmtree(cut, ignore_errors=True)
        weights = []
        for run_dir in (whole, again, cut):
            found = latest_checkpoint(run_dir / "checkpoints")
            assert found is not None
            weights.append(load_checkpoint(found[1]).state_dict())
        is_same = [
            all(torch.equal(weights[0][name], other[name]) for name in other)
            for other in weights[1:]
        ]
    report = {
        "kills": len(kills),
        "killed_after_steps": kills,
        "second_run_is_the_same": is_same[0],
        "killed_run_is_the_same": is_same[1],
    }
    if options.json:
        print(json.dumps({"benchmark": "kill_and_resume", **report}))
    else:
        for name, value in report.items():
            print(f"{name:26}{value}")
    if not all(is_same):
        raise SystemExit("the weights differ")
    if len(kills) < options.kills:
        raise SystemExit(f"{options.steps} steps, but {len(kills)} kills: try more --steps")


if __name__ == "__main__":
    main()
