"""Which part of DAPO helps, by steps and by episodes? After the paper's table 1 (2503.14476).

    python benchmarks/reproduce/dapo_ladder.py [--rungs naive,overlong_filter,...] [--steps 40]
               [--seeds 5] [--runs FILE.jsonl] [--picture FILE.svg] [--quick] [--json]

`countdown` with two numbers: plus or minus. The imitated demonstrator is right with small numbers,
often wrong with larger ones and nearly always with the largest; weighing both signs in writing
makes it right more often, but some go on weighing until they are cut off at 32 tokens. So easy
tasks are solved by all siblings and hard ones by none: their groups teach nothing. Each rung keeps
the ones before it.

naive             grpo, the loss averaged per answer (`trainer.aggregation=seq_mean`), no KL
overlong_filter   answers that were cut off are not trained on
clip_higher       `trainer.clip_high=0.28`
soft_punishment   `trainer.reward.overlong_tail=0.2`, in the filter's place as in verl's recipe
token_loss        `trainer.aggregation=token_mean`
dynamic_sampling  `rollout.filters=[success-rate]`; this rung is `trainer.algorithm=dapo`

held-out  sampled accuracy over 512 tasks at the end: mean over the seeds, and the lowest
greedy    the same with the likeliest token each time
played    episodes, those of rejected groups among them
episodes  reward of what is played in the last fifth of the first 2,560 episodes, which the other
          rungs play in 40 steps and the last one in fewer
against   the difference from the rung before, seed by seed: mean, 95% interval
wasted    share of groups that all siblings or none solved, among those trained on
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from protocol import SMALL, KeptRuns, Row, difference, mean, parser, play
from torch import Tensor

from areal_gym.config import RunConfig, load_config
from areal_gym.envs.base import Response
from areal_gym.envs.countdown import CountdownEnv
from areal_gym.plugins import AdvantageSpec, PluginManager, Registry, hookimpl, set_registry
from areal_gym.tasks import Draft, GeneratedTasks
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.types import Message
from areal_gym.warm_start.starter_policy import Recipe, prepare_starter

LIMIT = 32
"""Tokens of an answer."""


class Level(NamedTuple):
    """A level of difficulty: its share of the tasks, its numbers, and its demonstrator."""

    share: float
    numbers: range
    weighs: float
    """Share of the demonstrations that weigh the signs in writing."""
    right: float
    """Share of those that are right; of those that do not weigh, it is `guessed`."""
    guessed: float


LEVELS = (
    Level(0.45, range(1, 70), weighs=0.05, right=1.0, guessed=1.0),
    Level(0.2, range(70, 120), weighs=0.3, right=0.8, guessed=0.3),
    Level(0.35, range(120, 190), weighs=0.3, right=0.2, guessed=0.02),
)
GOES_ON = 0.6
"""Share of those who weigh that do so again."""

_MEAN = "trainer.aggregation=seq_mean"
_HIGHER, _SOFT = "trainer.clip_high=0.28", "trainer.reward.overlong_tail=0.2"
_FILTER = ("trainer.advantage=whole_answers", f"trainer.advantage_kwargs.limit={LIMIT}")
RUNGS = {
    "naive": [_MEAN],
    "overlong_filter": [_MEAN, *_FILTER],
    "clip_higher": [_MEAN, *_FILTER, _HIGHER],
    "soft_punishment": [_MEAN, _HIGHER, _SOFT],
    "token_loss": [_HIGHER, _SOFT],
    "dynamic_sampling": ["trainer.algorithm=dapo"],
}

Case = tuple[str, int, int]
"""Rung, seed, steps."""
PAPER = dict(zip(RUNGS, (30, 36, 38, 41, 42, 50), strict=True))


class WrittenCountdown(CountdownEnv):
    """Countdown with small numbers in order, whose demonstrator tries expressions in writing."""

    def __init__(self) -> None:
        super().__init__(tasks=GeneratedTasks("countdown in writing", _draw_task))

    async def respond(self, message: Message) -> Response:
        """Grade the expression with 1 or 0."""
        graded = await super().respond(message)
        return replace(graded, reward=graded.reward_parts["answer"])

    def gold_action(self) -> str:
        """Return what the demonstrator of the warm start writes."""
        (a, b), target = self.task.data["numbers"], self.task.data["target"]
        level = next(level for level in LEVELS if a in level.numbers)
        rng = random.Random(int(self.np_random.integers(2**31)))
        text = ""
        if is_weighed := rng.random() < level.weighs:
            text += f"{a}+{b} or {a}-{b}? "
            while rng.random() < GOES_ON:
                text += f"{a}+{b} or {a}-{b}? "
        is_right = rng.random() < (level.right if is_weighed else level.guessed)
        return f"{text}\\boxed{{{a}{'+' if is_right == (a + b == target) else '-'}{b}}}"

    def noop_action(self) -> str:
        """Return what the demonstrator writes."""
        return self.gold_action()


def _draw_task(rng: random.Random) -> Draft:
    (level,) = rng.choices(LEVELS, weights=[level.share for level in LEVELS])
    a, b = rng.choices(level.numbers, k=2)
    target = a - b if a > b and rng.random() < 0.5 else a + b
    return Draft(f"{a}, {b} -> {target}", {"numbers": [a, b], "target": target, "solution": None})


def whole_answers(
    rewards_G: Tensor, group_ids_G: Tensor, *, trajectory_ids_T: Tensor, limit: int
) -> Tensor:
    """Compute grpo's advantages [T], 0 for answers that are as long as the limit (DAPO, 3.4)."""
    lengths_G = trajectory_ids_T.bincount(minlength=len(rewards_G))
    return (grpo(rewards_G, group_ids_G) * (lengths_G < limit))[trajectory_ids_T]


@hookimpl
def register_advantage_estimators() -> Iterable[AdvantageSpec]:
    """Yield the overlong filter."""
    yield AdvantageSpec(
        id="whole_answers",
        entry_point=f"{__name__}:whole_answers",
        summary="grpo without the answers that were cut off",
    )


def settings(*overrides: str) -> RunConfig:
    return load_config(
        overrides=[
            *(*SMALL, f"env.id={Path(__file__).resolve()}:WrittenCountdown"),
            *(f"rollout.max_new_tokens={LIMIT}", "trainer.minibatches=4", "trainer.save_every=0"),
            *("trainer.lr=3e-4", "trainer.muon_lr=3e-3", *overrides),
        ]
    )


def run(case: Case, *, num_tasks: int, policy: Path) -> Row:
    """Train once."""
    rung, seed, steps = case
    size = [f"seed={seed}", f"steps={steps}", f"eval.num_tasks={num_tasks}"]
    outcome, rows = play(settings(f"engine.model={policy}", *size, *RUNGS[rung]))
    played = list(itertools.accumulate(row["reward/newest_episodes"] for row in rows))
    wasted = [row["reward/solve_all"] + row["reward/solve_none"] for row in rows]
    return {
        **outcome,
        **{"curve": [played, [row["reward/newest"] for row in rows]], "played": played[-1]},
        **{"wasted": statistics.fmean(wasted), "first_wasted": statistics.fmean(wasted[:5])},
        "truncated": statistics.fmean(row["rollout/truncated"] for row in rows),
        "entropy": statistics.fmean(row["train/entropy"] for row in rows[-5:]),
        "tokens": statistics.fmean(row["rollout/policy_tokens_mean"] for row in rows[-5:]),
    }


def reward_at(row: Row, num_episodes: int) -> float:
    """Return the mean reward in the last fifth of the first `num_episodes` episodes played."""
    played, rewards = row["curve"]
    late = [i for i, n in enumerate(played) if 0.8 * num_episodes < n <= num_episodes]
    return statistics.fmean([rewards[i] for i in late] or rewards[-1:])


def draw(cells: dict[str, list[Row]], file: Path) -> None:
    """Draw the reward of what is played over steps and over episodes, a line for each rung."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for rung, rows in cells.items():
        curves = [row["curve"] for row in rows]
        # To the shortest run: one ends before its last step if its filter finds its tasks mastered.
        played = [statistics.fmean(each) for each in zip(*(c[0] for c in curves), strict=False)]
        rewards = [statistics.fmean(each) for each in zip(*(c[1] for c in curves), strict=False)]
        smooth = [statistics.fmean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
        left.plot(range(1, len(smooth) + 1), smooth, label=rung)
        right.plot(played, smooth)
    left.set(xlabel="steps", ylabel="reward of what is played")
    right.set(xlabel="episodes played")
    left.legend()
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--rungs", default=",".join(RUNGS))
    made.add_argument("--steps", type=int, default=40)
    options = made.parse_args()
    rungs, seeds, steps, num_tasks = options.rungs.split(","), options.seeds, options.steps, 512
    if options.quick:
        rungs, seeds, steps, num_tasks = ["naive", "overlong_filter", "dynamic_sampling"], 1, 3, 16
    set_registry(Registry(PluginManager.installed(modules=[__name__])))
    # The policy of --quick has imitated for a moment only.
    recipe = Recipe(min_hold_steps=25, max_hold_steps=50, decay_steps=25, num_probes=8)
    start = prepare_starter(
        WrittenCountdown(), env_key="dapo_ladder", seed=0, recipe=recipe if options.quick else None
    )
    kept, cells = KeptRuns(options.runs), dict[str, list[Row]]()
    for seed, rung in itertools.product(range(seeds), rungs):
        case = (rung, seed, steps)
        row = kept.get(case, partial(run, case, num_tasks=num_tasks, policy=start.directory))
        # The rungs without a filter play so many in their steps.
        row = {**row, "episodes": reward_at(row, 64 * steps)}
        cells.setdefault(rung, []).append(row)
    if options.picture:
        draw(cells, options.picture)
    if options.json:
        print(json.dumps([row for rows in cells.values() for row in rows]))
        return
    print(table(cells))


def table(cells: dict[str, list[Row]]) -> str:
    """One row per rung, as Markdown."""
    names = ["paper", "held-out", "lowest", "against", "greedy", "against", "played"]
    names += ["episodes", "against", "wasted", "cut off", "tokens", "entropy"]
    lines = [f"| rung | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    before: list[Row] | None = None
    for rung, rows in cells.items():
        shown = [rung, PAPER[rung]]
        for name in ("heldout", "greedy", "episodes"):
            values = [row[name] for row in rows]
            shown += [f"{mean(rows, 'played'):.0f}"] if name == "episodes" else []
            shown.append(f"{statistics.fmean(values):.3f}")
            shown += [f"{min(values):.3f}"] if name == "heldout" else []
            shown.append(difference(values, [row[name] for row in before]) if before else "")
        shown += [f"{mean(rows, 'wasted'):.2f}", f"{mean(rows, 'truncated'):.3f}"]
        shown += [f"{mean(rows, 'tokens'):.0f}", f"{mean(rows, 'entropy'):.3f}"]
        lines.append(f"| {' | '.join(map(str, shown))} |")
        before = rows
    rows = next(iter(cells.values()))
    start = f"Before: {mean(rows, 'before'):.3f}; the first five steps' groups that teach nothing: "
    return "\n".join([*lines, "", f"{start}{mean(rows, 'first_wasted'):.2f}."])


if __name__ == "__main__":
    main()
