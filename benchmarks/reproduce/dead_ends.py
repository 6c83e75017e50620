"""Does it help to compare what was done in equal states? GiGPO on rooms with dead ends.

    python benchmarks/reproduce/dead_ends.py [--arms gigpo,dr_grpo,grpo] [--steps 12] [--seeds 3]
               [--runs FILE.jsonl] [--json]

Rooms in a row, each with three numbered doors, of which the one with the largest number leads on
and the others to a dead end; from there the only way is back, which costs a turn. There is time for
two mistakes. The reward, 1 at the exit, says nothing about single doors: with an advantage per
episode (`grpo`, `dr_grpo`) the right doors of an episode that failed are blamed for the wrong one.
GiGPO (2505.10978) compares the ways out of each room, which the environment names by `state_key`.

held-out   sampled share of episodes that reach the exit, over 128 tasks at the end: mean over seeds
reward     of the steps, mean over the run: how soon it was learned
against    the difference from the first arm, seed by seed: mean, 95% interval
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from protocol import SMALL, KeptRuns, Row, difference, mean, parser, play

import areal_gym
from areal_gym.config import RunConfig, load_config
from areal_gym.runs.components import Components
from areal_gym.runs.policy_directory import policy_directory
from areal_gym.runs.run_display import Display
from areal_gym.types import Message, Task

DEPTH = 8
DOORS = 3
SLACK = 2
"""Mistakes for which there is time."""


class DeadEnds(areal_gym.TextEnv):
    """Rooms in a row, with one way on and two dead ends each.

    Task: for each room the numbers on its doors.
    Observation: the room and its doors, or a dead end.
    Action: the number of a door, or "back" in a dead end.
    Reward: 1 at the exit. Episode end: at the exit; truncated after four turns more than needed.
    """

    max_turns = DEPTH + 2 * SLACK

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Draw the doors' numbers; those of a split are odd or even in sum."""
        split = str(options.get("split", "train"))
        if options.get("index") is not None:
            rng = np.random.default_rng([int(options["index"]), split == "train"])
        while True:
            rooms = [rng.choice(9, DOORS, replace=False) + 1 for _ in range(DEPTH)]
            if sum(map(sum, rooms)) % 2 == (split == "train"):
                break
        doors = [[int(number) for number in room] for room in rooms]
        return Task(id=f"{split}/{doors}", data={"doors": doors}, split=split)

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Show the first room."""
        self._room, self._is_dead_end = 0, False
        return [{"role": "user", "content": self._view()}]

    async def respond(self, message: Message) -> areal_gym.Response:
        """Go through a door, or back."""
        key = f"{self._room}{' dead end' if self._is_dead_end else ''}"
        said = str(message["content"]).strip()
        if self._is_dead_end:
            self._is_dead_end = said != "back"
        elif said == str(max(self._doors)):
            self._room += 1
        else:
            self._is_dead_end = said in map(str, self._doors)
        if self._room == DEPTH:
            return areal_gym.Response(reward=1.0, is_terminated=True, state_key=key)
        view: Message = {"role": "user", "content": self._view()}
        return areal_gym.Response(messages=[view], state_key=key)

    def gold_action(self) -> str:
        """Return the largest number at half of the doors, else any; in a dead end the way back.

        This is the demonstrator of the warm start, so that what is left to learn is each door.
        """
        return self.noop_action()

    def noop_action(self) -> str:
        """Return what the demonstrator says."""
        if self._is_dead_end or self.np_random.random() < 0.5:
            return self._right_action()
        return str(self.np_random.choice(self._doors))

    def _right_action(self) -> str:
        return "back" if self._is_dead_end else str(max(self._doors))

    @property
    def _doors(self) -> list[int]:
        doors: list[int] = self.task.data["doors"][self._room]
        return doors

    def _view(self) -> str:
        if self._is_dead_end:
            return "dead end"
        return f"doors {' '.join(map(str, self._doors))}"


def settings(*overrides: str) -> RunConfig:
    return load_config(
        overrides=[
            *SMALL,
            f"env.id={Path(__file__).resolve()}:DeadEnds",
            "rollout.max_new_tokens=16",
            "engine.max_context=512",
            *("trainer.lr=3e-4", "trainer.muon_lr=3e-3", "trainer.save_every=0"),
            "eval.num_tasks=128",
            *overrides,
        ]
    )


def warm_start() -> Path:
    """Return the policy that all runs begin with."""
    config = settings("steps=0")
    return policy_directory(config, Components.of(config), Display())[0]


def run(arm: str, seed: int, steps: int, policy: Path) -> Row:
    outcome, rows = play(
        settings(
            f"engine.model={policy}",
            f"trainer.algorithm={arm}",
            f"seed={seed}",
            f"steps={steps}",
        )
    )
    rewards = [row["reward/mean"] for row in rows]
    return {**outcome, "arm": arm, "reward": statistics.fmean(rewards), "rewards": rewards}


def table(results: dict[str, list[Row]]) -> str:
    """One row per arm, as Markdown."""
    arms = list(results)
    lines = [
        f"| arm | before | held-out | against {arms[0]} | reward | against {arms[0]} | CPU-s |",
        "|---|---|---|---|---|---|---|",
    ]
    first = results[arms[0]]
    for arm, rows in results.items():
        against = [
            "" if arm == arms[0] else difference([r[k] for r in rows], [r[k] for r in first])
            for k in ("heldout", "reward")
        ]
        lines.append(
            f"| `{arm}` | {mean(rows, 'before'):.3f} | {mean(rows, 'heldout'):.3f} | {against[0]} "
            f"| {mean(rows, 'reward'):.3f} | {against[1]} | {mean(rows, 'cpu_s'):.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--arms", default="gigpo,dr_grpo,grpo")
    made.add_argument("--steps", type=int, default=12)
    made.set_defaults(seeds=3)
    options = made.parse_args()
    seeds, steps = (1, 2) if options.quick else (options.seeds, options.steps)
    policy, kept = warm_start(), KeptRuns(options.runs)
    arms = options.arms.split(",")
    results: dict[str, list[Row]] = {arm: [] for arm in arms}
    for seed in range(seeds):
        for arm in arms:
            play_one = partial(run, arm, seed, steps, policy)
            results[arm].append(kept.get((arm, seed, steps), play_one))
    print(json.dumps(results) if options.json else table(results))


if __name__ == "__main__":
    main()
