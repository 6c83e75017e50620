"""Does it help to compare what was done in equal states? GiGPO on a house with dead ends.

    python benchmarks/reproduce/dead_ends.py [--arms gigpo,dr_grpo,grpo] [--steps 40] [--seeds 5]
               [--runs FILE.jsonl] [--json]

Eight rooms in a row, each with two doors, of which one leads on. Behind the other are rooms that
look the same and have no way out: there the episode goes on until its eight turns are over. Each
room that is passed earns 1/8. With an advantage per episode (`grpo`, `dr_grpo`), an
episode that failed early is blamed for its right doors, too, and one that came far is praised for
the wrong one and for the doors behind it. GiGPO (2505.10978) adds a comparison of what the siblings
earned from one room on, which the environment names by `state_key`.

before     share of rooms that are passed, over 256 held-out episodes, sampled
held-out   the same at the end: mean over the seeds
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

RIGHT_DOORS = dict(zip("ABCDEFGH", "12212112", strict=True))
"""The door that leads on, for each room: the same in all tasks, without a rule."""
DEPTH = len(RIGHT_DOORS)


class DeadEnds(areal_gym.TextEnv):
    """Rooms in a row, with one way on and one dead end each.

    Task: the order of the rooms.
    Observation: the name of the next room; in a dead end, too, which nothing gives away.
    Action: the number of a door.
    Reward: 1/8 for each room that is passed. Episode end: truncated after eight turns.
    """

    max_turns = DEPTH

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Draw an order of rooms; the first and the second tell the split."""
        split = str(options.get("split", "train"))
        if options.get("index") is not None:
            rng = np.random.default_rng([int(options["index"]), split == "train"])
        rooms = [str(room) for room in rng.permutation(list(RIGHT_DOORS))]
        if (rooms[0] < rooms[1]) != (split == "train"):
            rooms[:2] = rooms[1], rooms[0]
        return Task(id=f"{split}/{''.join(rooms)}", data={"rooms": rooms}, split=split)

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Show the first room."""
        self._is_dead_end = False
        return [self._view(0)]

    async def respond(self, message: Message) -> areal_gym.Response:
        """Go through a door."""
        key = f"{self._room}{' in a dead end' if self._is_dead_end else ''}"
        is_right = str(message["content"]).strip() == RIGHT_DOORS[self._room]
        self._is_dead_end = self._is_dead_end or not is_right
        is_over = self.num_turns == DEPTH
        return areal_gym.Response(
            reward=0.0 if self._is_dead_end else 1 / DEPTH,
            messages=[] if is_over else [self._view(self.num_turns)],
            is_truncated=is_over,
            state_key=key,
        )

    def gold_action(self) -> str:
        """Return what the demonstrator of the warm start says.

        It takes the right door in four of five cases in half of the rooms, and in two of five in
        the others.
        """
        return self.noop_action()

    def noop_action(self) -> str:
        """Return what the demonstrator says."""
        is_right = self.np_random.random() < (0.8 if self._room in "ACEG" else 0.4)
        right = RIGHT_DOORS[self._room]
        return right if is_right else {"1": "2", "2": "1"}[right]

    def _view(self, index: int) -> Message:
        self._room = self.task.data["rooms"][index]
        return {"role": "user", "content": f"room {self._room}"}


def settings(*overrides: str) -> RunConfig:
    return load_config(
        overrides=[
            *SMALL,
            f"env.id={Path(__file__).resolve()}:DeadEnds",
            *("rollout.batch_groups=2", "rollout.max_new_tokens=8", "engine.max_context=256"),
            *("trainer.lr=6e-4", "trainer.muon_lr=6e-3", "trainer.save_every=0"),
            "eval.num_tasks=256",
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
            for k in ("heldout_reward", "reward")
        ]
        names = ("before_reward", "heldout_reward", "reward")
        before, after, reward = (mean(rows, name) for name in names)
        lines.append(
            f"| `{arm}` | {before:.3f} | {after:.3f} | {against[0]} | {reward:.3f} | {against[1]} "
            f"| {mean(rows, 'cpu_s'):.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--arms", default="gigpo,dr_grpo,grpo")
    made.add_argument("--steps", type=int, default=40)
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
