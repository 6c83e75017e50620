"""Kill a run at random moments, resume it each time: are the final weights the same, bit for bit?

    python benchmarks/kill_and_resume.py [--kills 20] [--steps 12] [--json]

`areal-gym train --env tir deterministic=true`, on the warm start from the cache. The run is killed
with SIGKILL after a random part of the time that a run takes, anywhere: while it starts, plays,
trains, saves.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from areal_gym.modeling.checkpoint import load_checkpoint
from areal_gym.trainer.checkpoint import latest_checkpoint


def command(run_dir: Path, steps: int, *, is_resumed: bool) -> list[str]:
    settings = [f"steps={steps}", "deterministic=true", "trainer.save_every=1", "eval.num_tasks=8"]
    settings += ["rollout.batch_groups=8", "rollout.group_size=4"]
    whole = [sys.executable, "-m", "areal_gym", "train", "--env", "tir", "--out", str(run_dir)]
    return [*whole, "--resume"] if is_resumed else [*whole, *settings]


def run(arguments: list[str], after_s: float | None = None) -> bool:
    """Whether it came to its end; it is killed after `after_s` seconds."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _, talk = process.communicate(timeout=after_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return False
    if process.returncode != 0:
        raise SystemExit(talk.decode()[-2000:])
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    kills: list[int] = []
    with tempfile.TemporaryDirectory() as home:
        whole, cut = Path(home) / "whole", Path(home) / "cut"
        run(command(whole, options.steps, is_resumed=False))  # may have to make the warm start
        again = Path(home) / "again"
        start_s = time.monotonic()
        run(command(again, options.steps, is_resumed=False))
        whole_s = time.monotonic() - start_s
        is_done = False
        while not is_done:
            checkpoints = cut / "checkpoints"
            step = (latest_checkpoint(checkpoints) or (0,))[0]
            arguments = command(cut, options.steps, is_resumed=step > 0)
            may_die = len(kills) < options.kills
            is_done = run(arguments, rng.uniform(0.2, 0.9) * whole_s if may_die else None)
            if not is_done:
                step = (latest_checkpoint(checkpoints) or (0,))[0]
                kills.append(step)
                print(f"killed; the last checkpoint is of step {step}", file=sys.stderr)
                if step == 0 and cut.exists():
                    subprocess.run(["rm", "-r", str(cut)], check=True)
                if step == options.steps:
                    is_done = True
        names = [whole, again, cut]
        weights = []
        for name in names:
            found = latest_checkpoint(name / "checkpoints")
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


if __name__ == "__main__":
    main()
