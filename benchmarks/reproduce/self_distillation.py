"""Does a policy learn from itself? On-policy self-distillation with the answer as a hint.

    python benchmarks/reproduce/self_distillation.py [--steps 20] [--seeds 3] [--runs FILE.jsonl]
               [--quick] [--json]

The small policy cannot use a hint by itself. So it first imitates dialogues in which the question
ends with "The answer is N." (sums of two digits, training tasks only). Then it plays the questions
without a hint, and its teacher is itself, with the weights of the moment and the hint before its
eyes (`teacher.is_policy`; SDFT, OPSD): no reward is learned from, and no other model is there.

before     sampled accuracy without a hint, over some 220 held-out episodes
held-out   the same at the end: mean over the seeds, the lowest
KL         of policy and hinted policy per sampled token, first and last three steps
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import statistics
import tempfile
from functools import partial
from pathlib import Path

from protocol import SMALL, KeptRuns, Row, mean, parser, play

import areal_gym
from areal_gym.config import RunConfig, load_config
from areal_gym.envs.arithmetic import PHRASINGS
from areal_gym.runs.components import Components
from areal_gym.runs.policy_directory import policy_directory
from areal_gym.runs.run_display import Display
from areal_gym.runs.train import train

HINT = "The answer is {answer}."
HOME = Path(tempfile.gettempdir()) / "areal-gym-self-distillation"
SUMS, HINTED = HOME / "sums.jsonl", HOME / "hinted.jsonl"


def write_sums() -> None:
    """Write the tasks: sums of two digits, in all phrasings."""
    HOME.mkdir(exist_ok=True)
    lines = [
        json.dumps({"question": phrasing.format(f"{a} + {b}"), "answer": str(a + b)})
        for phrasing in PHRASINGS
        for a, b in itertools.product(range(1, 10), repeat=2)
    ]
    SUMS.write_text("\n".join(lines) + "\n")


def write_hinted(num: int = 1024) -> None:
    """Write dialogues of training tasks whose questions end with the hint."""
    env = areal_gym.make("math", tasks=str(SUMS))
    rng = random.Random(0)
    lines = []
    for _ in range(num):
        env.reset(seed=rng.getrandbits(31), options={"split": "train"})
        first = [dict(message) for message in env.messages]
        hint = HINT.format(**env.task.data)
        first[-1]["content"] = f"{first[-1]['content']}\n\n{hint}"
        answer = {"role": "assistant", "content": env.gold_action()}
        lines.append(json.dumps({"messages": [*first, answer]}))
    HINTED.write_text("\n".join(lines) + "\n")


def settings(*overrides: str) -> RunConfig:
    # Of two settings with one name the later counts.
    return load_config(
        overrides=[
            *SMALL,
            *("env.id=math", f"env.kwargs.tasks={SUMS}", "rollout.max_new_tokens=64"),
            *("eval.num_tasks=256", "eval.num_samples=4", "trainer.save_every=0"),
            *overrides,
        ]
    )


def hinted_policy(steps: int) -> Path:
    """Return a policy that can use the hint: the starter after some imitation."""
    config = settings("steps=0")
    starter = policy_directory(config, Components.of(config), Display())[0]
    write_hinted()
    sft = settings(
        *("objective=sft", f"engine.model={starter}", f"data.file={HINTED}", f"steps={steps}"),
        *("trainer.optimizer=adamw", "trainer.lr=3e-4"),
    )
    directory = HOME / f"sft-{steps}"
    if not (directory / "summary.json").exists():
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            train(sft, run_dir=directory)
    return directory / sorted((directory / "checkpoints").iterdir())[-1].relative_to(directory)


def run(seed: int, steps: int, policy: Path) -> Row:
    outcome, rows = play(
        settings(
            *("objective=distill", "teacher.is_policy=true", f"teacher.hint={HINT}"),
            *(f"engine.model={policy}", f"seed={seed}", f"steps={steps}"),
            *("trainer.lr=3e-4", "trainer.muon_lr=3e-3"),
        )
    )
    kl = [row["train/kl_teacher"] for row in rows]
    return {**outcome, "kl_first": statistics.fmean(kl[:3]), "kl_last": statistics.fmean(kl[-3:])}


def table(rows: list[Row]) -> str:
    """One row, as Markdown."""
    lowest = min(row["heldout"] for row in rows)
    return "\n".join(
        [
            "| seeds | before | held-out | lowest | KL first | KL last | CPU-s |",
            "|---|---|---|---|---|---|---|",
            f"| {len(rows)} | {mean(rows, 'before'):.2f} | {mean(rows, 'heldout'):.2f} "
            f"| {lowest:.2f} | {mean(rows, 'kl_first'):.3f} | {mean(rows, 'kl_last'):.3f} "
            f"| {mean(rows, 'cpu_s'):.0f} |",
        ]
    )


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--steps", type=int, default=20)
    made.set_defaults(seeds=3)
    options = made.parse_args()
    seeds, steps, imitated = (1, 2, 5) if options.quick else (options.seeds, options.steps, 60)
    write_sums()
    policy, kept = hinted_policy(imitated), KeptRuns(options.runs)
    rows = [
        kept.get(("self", seed, steps), partial(run, seed, steps, policy)) for seed in range(seeds)
    ]
    print(json.dumps(rows) if options.json else table(rows))


if __name__ == "__main__":
    main()
