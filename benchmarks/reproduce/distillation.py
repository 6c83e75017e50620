"""Is a teacher worth more than rewards? After "On-Policy Distillation" (Thinking Machines, 2025).

    python benchmarks/reproduce/distillation.py [--arms distill,grpo,sft] [--steps 5,10,20,40]
               [--seeds 5] [--runs FILE.jsonl] [--picture FILE.svg] [--quick] [--json]

Three ways from the same warm start to a good policy of `tir`, on the same number of episodes:

distill   the student plays; the teacher's log-probability of each sampled token less the student's
          is the token's advantage (no reward is learned from)
grpo      the student plays and learns from rewards
sft       the teacher plays as many episodes; the student learns from those with reward 1, in four
          passes

The teacher is a run of GRPO from another warm start (seed 100), 60 steps of 4 updates. Every row is
a run of its own with so many steps of 64 episodes. CPU seconds are of the whole run, the evaluation
at its end included; sft's have the teacher's playing in them.

held-out   sampled accuracy over 512 tasks at the end: mean over the seeds, the lowest
against    the difference from grpo with as many episodes, seed by seed: mean, 95% interval

The paper: on AIME24, distillation reaches with 1,800 GPU hours what RL needs 17,920 for (Qwen3
technical report, table 21: 74.4 against 67.6), a factor of 9 to 30 in compute.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path

from protocol import SMALL, KeptRuns, Row, cpu_s, difference, mean, parser, play

import areal_gym
from areal_gym.config import RunConfig, load_config
from areal_gym.run_dir.run_dir import RunDir

BATCH = 64
"""Episodes of a step."""
PASSES = 4
"""Of sft over the teacher's episodes."""
RATE = ("trainer.lr=3e-4", "trainer.muon_lr=3e-3")

Case = tuple[str, int, int]
"""Arm, steps, seed."""


def settings(*overrides: str, num_tasks: int) -> RunConfig:
    evaluation = ("eval.at_start=false", f"eval.num_tasks={num_tasks}")
    return load_config(overrides=[*SMALL, *RATE, *evaluation, *overrides])


def run(case: Case, *, teacher: Path, num_tasks: int) -> Row:
    """Train once."""
    arm, steps, seed = case
    start_s = cpu_s()
    more = [f"seed={seed}", f"steps={steps}"]
    if arm == "distill":
        more += ["objective=distill", f"teacher.model={teacher}"]
    if arm != "sft":
        outcome, _ = play(settings(*more, num_tasks=num_tasks))
        return {**outcome, "cpu_s": round(cpu_s() - start_s, 1)}
    with tempfile.TemporaryDirectory() as home:
        file, student = Path(home) / "episodes.jsonl", Path(home) / "student"
        num_kept = write_episodes(teacher, file, steps * BATCH, seed)
        # A tenth of the file is measured on.
        num_steps = max(1, round(PASSES * 0.9 * num_kept / 32))
        more = [f"seed={seed}", f"steps={num_steps}", "objective=sft"]
        more += [f"data.file={file}", "data.batch_size=32"]
        play(settings(*more, num_tasks=num_tasks), keep=student)
        report = areal_gym.evaluate(
            str(RunDir(student).checkpoint(num_steps)), "tir", n=num_tasks, seed=seed,
            max_new_tokens=96, max_context=256, progress=False,
        )  # fmt: skip
    return {"heldout": report.pass_at_1[0], "cpu_s": round(cpu_s() - start_s, 1)}


def write_episodes(teacher: Path, file: Path, num_episodes: int, seed: int) -> int:
    """Write the teacher's episodes that earned reward 1; return how many there are.

    Those of a teacher that is never right, as with `--quick`, are written all.
    """
    env = areal_gym.make("tir")
    tools = [tool.schema() for tool in env.tools]
    played = areal_gym.rollout(
        str(teacher), "tir", n=num_episodes, split="train", seed=seed, max_new_tokens=96,
        max_context=256, progress=False,
    )  # fmt: skip
    right = [each for each in played.trajectories if each.reward == 1] or played.trajectories
    with file.open("w") as stream:
        for each in right:
            stream.write(json.dumps({"messages": list(each.messages), "tools": tools}) + "\n")
    return len(right)


def draw(cells: dict[tuple[str, int], list[Row]], file: Path) -> None:
    """Draw held-out accuracy over episodes and over CPU seconds, a line for each arm."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for arm in dict.fromkeys(arm for arm, _ in cells):
        theirs = {steps: rows for (name, steps), rows in cells.items() if name == arm}
        heights = [mean(rows, "heldout") for rows in theirs.values()]
        left.plot([steps * BATCH for steps in theirs], heights, marker="o", label=arm)
        right.plot([mean(rows, "cpu_s") for rows in theirs.values()], heights, marker="o")
    left.set(xlabel="episodes", ylabel="held-out accuracy", ylim=(0, 1))
    right.set(xlabel="CPU seconds")
    left.legend()
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    options_of = parser(__doc__ or "")
    options_of.add_argument("--arms", default="distill,grpo,sft")
    options_of.add_argument("--steps", default="5,10,20,40", help="of 64 episodes each")
    options_of.add_argument("--teacher", type=Path, help="a run directory; made where it is not")
    options = options_of.parse_args()
    arms, sizes = options.arms.split(","), [int(size) for size in options.steps.split(",")]
    seeds, num_tasks = options.seeds, 512
    if options.quick:
        sizes, seeds, num_tasks = [2], 1, 16
    kept = KeptRuns(options.runs)
    cells: dict[tuple[str, int], list[Row]] = {}
    with tempfile.TemporaryDirectory() as home:
        teacher = options.teacher or Path(home) / "teacher"
        steps_taught = 2 if options.quick else 60
        if not (teacher / "summary.json").exists():
            more = ["seed=100", f"steps={steps_taught}", "trainer.minibatches=4"]
            play(settings(*more, num_tasks=num_tasks), keep=teacher)
        taught = json.loads((teacher / "summary.json").read_text())
        for seed, steps, arm in itertools.product(range(seeds), sizes, arms):
            case = (arm, steps, seed)
            policy = RunDir(teacher).checkpoint(steps_taught)
            row = kept.get(case, partial(run, case, teacher=policy, num_tasks=num_tasks))
            cells.setdefault((arm, steps), []).append(row)
    if options.picture:
        draw(cells, options.picture)
    if options.json:
        print(json.dumps([row for rows in cells.values() for row in rows]))
        return
    print(f"The teacher: {taught['heldout_after']:.3f}\n")
    print("| episodes | arm | held-out | lowest | against grpo | CPU-s |")
    print("|---|---|---|---|---|---|")
    for steps, arm in itertools.product(sizes, arms):
        rows, peers = cells[arm, steps], cells.get(("grpo", steps))
        heldout, against = [row["heldout"] for row in rows], ""
        if peers and arm != "grpo":
            against = difference(heldout, [row["heldout"] for row in peers])
        print(
            f"| {steps * BATCH} | {arm} | {statistics.fmean(heldout):.3f} | {min(heldout):.3f} | "
            f"{against} | {mean(rows, 'cpu_s'):.0f} |"
        )


if __name__ == "__main__":
    main()
