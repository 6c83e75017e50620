"""Does every algorithm learn? Each preset from the same warm start, on `tir` and `math`.

    python benchmarks/presets.py [--only ppo,gspo] [--envs tir] [--seeds 3] [--steps 12]
                                 [--staleness 1] [--json]

Whole runs of `areal-gym train` with the small policy: 8 groups of 8 episodes per step, trained on
in two updates, one policy version behind. Without staleness and with one update, all clips, gates
and masks would see ratios of 1, and many presets would be one.

after    sampled accuracy over some 240 held-out episodes: mean over the seeds
spread   of those accuracies
reward   of the last three steps
up       seeds that ended above the warm start
CPU-s    of one run, its evaluations and its worker process included
step     CPU seconds of the trainer's step on one batch, grpo's being 1 (`preset_costs.py`)
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preset_costs import step_costs

from areal_gym.config import RunConfig, load_config
from areal_gym.config.algorithm_settings import PRESETS
from areal_gym.envs.arithmetic import PHRASINGS
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.components import Components
from areal_gym.runs.policy_directory import policy_directory
from areal_gym.runs.run_display import Display
from areal_gym.runs.train import train

ENVS = ("tir", "math")
SUMS = Path(tempfile.gettempdir()) / "areal-gym-sums.jsonl"
"""Sums of two digits. Those of `math`'s own first level have carries, which the small policy does
not learn in so few steps, whatever the algorithm."""


FURTHER = {"igpo": [r"trainer.advantage_kwargs.answer=\boxed{{{answer}}}"]}
"""Settings that a preset takes from the task: how the answer is said in both environments."""


def write_sums() -> None:
    with SUMS.open("w") as file:
        for phrasing in PHRASINGS:
            for a, b in itertools.product(range(1, 10), repeat=2):
                question = phrasing.format(f"{a} + {b}")
                file.write(json.dumps({"question": question, "answer": str(a + b)}) + "\n")


def settings(env: str, steps: int, staleness: int, *further: str) -> RunConfig:
    return load_config(
        overrides=[
            f"env.id={env}",
            # There are 55 held-out sums: several episodes of each.
            *([f"env.kwargs.tasks={SUMS}", "eval.num_samples=4"] if env == "math" else []),
            "engine.max_context=256",
            "engine.num_slots=64",
            "rollout.batch_groups=8",
            "rollout.group_size=8",
            "rollout.max_in_flight=64",
            f"rollout.max_new_tokens={96 if env == 'tir' else 64}",
            f"rollout.max_staleness={staleness}",
            "trainer.optimizer=muon",
            "trainer.lr=3e-4",
            "trainer.muon_lr=3e-3",
            "trainer.minibatches=2",
            "trainer.save_every=0",
            "eval.num_tasks=256",
            f"steps={steps}",
            *further,
        ]
    )


def warm_start(env: str) -> Path:
    config = settings(env, 0, 0)
    return policy_directory(config, Components.of(config), Display())[0]


def run(env: str, name: str, seed: int, steps: int, staleness: int, policy: Path) -> dict[str, Any]:
    config = settings(
        env,
        steps,
        staleness,
        f"engine.model={policy}",
        f"trainer.algorithm={name}",
        f"seed={seed}",
        *FURTHER.get(name, []),
    )
    start_s = _cpu_s()
    with tempfile.TemporaryDirectory() as home:
        summary = train(config, run_dir=Path(home) / "run")
        rows = RunDir(Path(home) / "run").read_metrics()
    rewards = [row["reward/mean"] for row in rows]
    return {
        "env": env,
        "preset": name,
        "seed": seed,
        "before": summary["heldout_before"],
        "after": summary["heldout_after"],
        "first_reward": statistics.fmean(rewards[:3]),
        "last_reward": statistics.fmean(rewards[-3:]),
        "cpu_s": _cpu_s() - start_s,
    }


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def table(results: list[dict[str, Any]], costs: Mapping[str, float]) -> str:
    """One row per preset, as Markdown."""
    envs = list(dict.fromkeys(r["env"] for r in results))
    columns = ["reward", "after", "spread", "up", "CPU-s"]
    lines = [
        "| preset | " + " | ".join(f"{env}: {c}" for env in envs for c in columns) + " | step |"
    ]
    lines.append("|---" * (2 + len(envs) * len(columns)) + "|")
    for name in dict.fromkeys(r["preset"] for r in results):
        cells = [f"`{name}`"]
        for env in envs:
            rows = [r for r in results if (r["env"], r["preset"]) == (env, name)]
            after = [r["after"] for r in rows]
            cells += [
                f"{statistics.fmean(r['last_reward'] for r in rows):.2f}",
                f"{statistics.fmean(after):.2f}",
                f"{max(after) - min(after):.2f}",
                f"{sum(r['after'] > r['before'] for r in rows)}/{len(rows)}",
                f"{statistics.fmean(r['cpu_s'] for r in rows):.0f}",
            ]
        lines.append("| " + " | ".join([*cells, f"{costs[name]:.2f}"]) + " |")
    before = (statistics.fmean(r["before"] for r in results if r["env"] == env) for env in envs)
    shown = ", ".join(f"{env} {value:.2f}" for env, value in zip(envs, before, strict=True))
    return "\n".join([*lines, "", f"Held-out accuracy before training: {shown}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(PRESETS))
    parser.add_argument("--envs", default=",".join(ENVS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for name in options.only.split(","):
        if name not in PRESETS:
            parser.error(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    if min(options.seeds, options.steps) < 1 or options.staleness < 0:
        parser.error("--seeds and --steps are at least 1, and --staleness at least 0")
    results = []
    write_sums()
    for env in options.envs.split(","):
        policy = warm_start(env)
        for name in options.only.split(","):
            for seed in range(1, options.seeds + 1):
                found = run(env, name, seed, options.steps, options.staleness, policy)
                results.append(found)
                print(json.dumps(found), file=sys.stderr, flush=True)
    costs = step_costs(options.only.split(","))
    if options.json:
        print(json.dumps({"runs": results, "step": costs}))
    else:
        print(table(results, costs))


if __name__ == "__main__":
    main()
