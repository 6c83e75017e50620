"""How much faster is asynchronous training, and where does AReaL's 2.77x lie?

    python benchmarks/reproduce/speedup.py [--eta 0,1,2,4,8,16] [--ratios 1:3,1:1,3:1] [--seeds 5]
                         [--tail 8] [--limit 0] [--picture FILE.svg] [--quick] [--json]

The real `RolloutRunner` (admission, order, staleness) on a clock that jumps from event to event;
only engine and trainer are simulated, so that hours of a cluster pass in seconds.

engine   serves a fixed number of tokens a second, shared equally by the turns in flight; a single
         turn gets at most what it gets when a quarter of a batch is in flight, so that the last
         turns of a synchronous batch leave the engine idle. Turns have log-normal lengths whose
         99th percentile is `--tail` times the median; `--limit` cuts them at so many medians.
trainer  takes a fixed time a step: `--ratios` are train:generate, where generate is the time in
         which a fully used engine serves a batch. Publications are free.

bound       max(T_gen, T_train): no schedule on these machines is faster
of bound    bound / step: 1 is a slower half that never waits
speed-up    the synchronous step (eta 0) / this step: same machines, the halves take turns
colocated   against a synchronous run that gives *all* machines to generation and then all to
            training: the engine 4/3 as fast, the trainer 4 times (AReaL splits its GPUs 3:1). The
            sum of work is the same, so that only idle tails can be won here.
lag         mean staleness of the batches, in versions

The paper (arXiv 2505.24298, figures 4 and 7): up to 2.77x against synchronous systems at the same
number of GPUs. verl reports 2.35x to 2.67x for its asynchronous trainer.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from areal_gym.config import RolloutConfig
from areal_gym.envs.base import Response, TextEnv
from areal_gym.rollout.episode_runners import EpisodeRequest, EpisodeSetup
from areal_gym.rollout.runner import RolloutRunner
from areal_gym.rollout.stats import Occupancy
from areal_gym.types import FinishReason, Group, Message, Task, TokenSpan, Trajectory, Turn
from areal_gym.utils.statistics import mean_interval
from tests._support.virtual_time import VirtualLoop

PAPER = 2.77
MEDIAN_TOKENS = 4000
TOKENS_PER_S = 1000.0
"""Of one turn, when the engine is not full. Only ratios of times matter; the runner looks for new
versions every 20 ms, which the turns of 4 s and more make negligible."""
FULL_AT = 0.25
"""Share of a batch's turns in flight that keeps the engine busy."""
SHARE_GENERATING = 0.75
"""Of the GPUs, in AReaL's runs."""
NORMAL = statistics.NormalDist()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One simulated run."""

    eta: int
    ratio: float
    """T_train / T_gen."""
    seed: int
    tail: float = 8.0
    limit: float = math.inf
    batch_groups: int = 32
    steps: int = 40
    warmup: int = 10
    is_colocated: bool = False

    @property
    def batch_size(self) -> int:
        """Episodes of a batch."""
        return self.batch_groups * 8


class SharedEngine:
    """Serves `budget` tokens a second, the same number to every turn, at most `per_turn` each.

    Every turn in flight has had the same number of tokens since any moment, so one count serves
    all: a turn that starts when the count is c ends when it is c + its tokens.
    """

    def __init__(self, budget: float, per_turn: float) -> None:
        self.policy_version = 0
        self._budget = budget
        self._per_turn = per_turn
        self._count = 0.0
        self._since_s = 0.0
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._ids = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def serve(self, num_tokens: float) -> None:
        """Return when a turn of so many tokens, which starts now, is complete."""
        self._advance()
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._ends, (self._count + num_tokens, next(self._ids), done))
        self._wait()
        await done

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._ends:
            rate = min(self._per_turn, self._budget / len(self._ends))
            self._count += rate * (now - self._since_s)
        self._since_s = now

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._ends:
            rate = min(self._per_turn, self._budget / len(self._ends))
            delay_s = max(0.0, (self._ends[0][0] - self._count) / rate)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._finish)

    def _finish(self) -> None:
        self._timer = None
        self._advance()
        while self._ends and self._ends[0][0] <= self._count + 1e-6:
            done = heapq.heappop(self._ends)[2]
            if not done.done():
                done.set_result(None)
        self._wait()


class NumberedTasks(TextEnv):
    """An environment of which only the tasks are drawn; `SimulatedEpisodes` plays them."""

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        return Task(id=str(rng.integers(2**31)), data={})

    async def respond(self, message: Message) -> Response:
        raise NotImplementedError("simulated episodes have no dialogue")


@dataclass
class SimulatedEpisodes:
    """Plays an episode as one turn of a random length, with one token for each version it saw."""

    case: Case
    engine: SharedEngine
    in_flight: Occupancy = field(default_factory=Occupancy)

    def num_tokens(self, seed: int) -> float:
        """Return the length of the turn with this seed."""
        factor = random.Random(f"{self.case.seed}/{seed}").lognormvariate(0.0, _sigma(self.case))
        return MEDIAN_TOKENS * min(self.case.limit, factor)

    async def play(self, request: EpisodeRequest) -> Trajectory:
        """Play it on the simulated engine."""
        first = self.engine.policy_version
        await self.engine.serve(self.num_tokens(request.seed))
        versions = range(first, self.engine.policy_version + 1)
        spans = [
            TokenSpan(origin="policy", token_ids=(1,), logprobs=(0.0,), policy_version=version)
            for version in versions
        ]
        return Trajectory(
            id=request.trajectory_id,
            group_id=request.group_id,
            task=request.task,
            env_id="simulated",
            spans=(TokenSpan(origin="prompt", token_ids=(0,)), *spans),
            turns=(Turn(finish_reason=FinishReason.STOP),),
            seed=request.seed,
        )


async def simulate(case: Case) -> dict[str, float]:
    """Train `case.steps` steps; return means over those after the warm-up, in virtual seconds."""
    mean_tokens = _mean_tokens(case)
    budget = TOKENS_PER_S * FULL_AT * case.batch_size
    generate_s = case.batch_size * mean_tokens / budget
    train_s = case.ratio * generate_s
    if case.is_colocated:
        budget /= SHARE_GENERATING
        train_s *= 1 - SHARE_GENERATING
    engine = SharedEngine(budget, TOKENS_PER_S)
    episodes = SimulatedEpisodes(case, engine)
    setup = EpisodeSetup(
        env_factory=NumberedTasks,
        agent=cast(Any, None),
        engine=cast(Any, engine),
        renderer=cast(Any, None),
    )
    config = RolloutConfig(
        group_size=8,
        batch_groups=case.batch_groups,
        max_in_flight=case.batch_size * (1 if case.eta == 0 else 2),
        max_staleness=case.eta,
        episode_timeout_s=1e9,
    )
    lags: list[float] = []
    loop = asyncio.get_running_loop()
    begin_s = 0.0
    async with RolloutRunner(setup, config, seed=case.seed, episode_runner=episodes) as runner:
        for step in range(case.steps):
            if step == case.warmup:
                begin_s = loop.time()
            batch = await runner.next_batch()
            if step >= case.warmup:
                lags.append(_lag(batch, engine.policy_version))
            await asyncio.sleep(train_s)
            engine.policy_version += 1
        end_s = loop.time()
        stats = runner.stats()
    return {
        "step_s": (end_s - begin_s) / (case.steps - case.warmup),
        "bound_s": max(generate_s, train_s),
        "lag": statistics.mean(lags),
        "dropped": stats.num_groups_stale / max(1, stats.num_groups_started),
    }


def _sigma(case: Case) -> float:
    return math.log(case.tail) / NORMAL.inv_cdf(0.99)


def _mean_tokens(case: Case) -> float:
    """Return the mean of a log-normal length that is cut at the limit."""
    sigma, mean = _sigma(case), math.exp(_sigma(case) ** 2 / 2)
    if math.isfinite(case.limit):
        over = math.log(case.limit) / sigma
        mean = mean * NORMAL.cdf(over - sigma) + case.limit * (1 - NORMAL.cdf(over))
    return MEDIAN_TOKENS * mean


def _lag(batch: list[Group], version: int) -> float:
    return statistics.mean(
        version - statistics.mean(span.policy_version or 0 for span in each.spans[1:])
        for group in batch
        for each in group
    )


def run(case: Case) -> dict[str, float]:
    """Simulate one run on a loop of its own."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(simulate(case))
    finally:
        loop.close()


def ratio(text: str) -> float:
    train, _, generate = text.partition(":")
    return float(train) / float(generate)


def table(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the grid: one row per ratio and eta, means over the seeds."""
    rows = []
    size: dict[str, Any] = {"batch_groups": 4, "steps": 6, "warmup": 2} if options.quick else {}
    for words in options.ratios:
        base = Case(eta=0, ratio=ratio(words), seed=0, tail=options.tail, limit=options.limit)
        base = replace(base, **size)
        cases = [replace(base, seed=seed) for seed in range(options.seeds)]
        together = [run(replace(case, is_colocated=True))["step_s"] for case in cases]
        runs = {eta: [run(replace(case, eta=eta)) for case in cases] for eta in options.eta}
        synchronous = [one["step_s"] for one in runs[0]]
        for eta, ours in runs.items():
            times = [one["step_s"] for one in ours]
            gains = [slow / one for slow, one in zip(synchronous, times, strict=True)]
            mean = {name: statistics.mean(one[name] for one in ours) for name in ours[0]}
            rows.append(
                {
                    "ratio": words,
                    "eta": eta,
                    **mean,
                    "of_bound": mean["bound_s"] / mean["step_s"],
                    "speedup": statistics.mean(gains),
                    "interval": mean_interval(gains)[1:],
                    "colocated": statistics.mean(
                        slow / one for slow, one in zip(together, times, strict=True)
                    ),
                }
            )
    return rows


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw the speed-up over eta, a line for each ratio."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for words in dict.fromkeys(row["ratio"] for row in rows):
        theirs = [row for row in rows if row["ratio"] == words]
        places = range(len(theirs))
        axes.plot(places, [row["speedup"] for row in theirs], marker="o", label=words)
        axes.set_xticks(places, [str(row["eta"]) for row in theirs])
    axes.axhline(PAPER, color="grey", linestyle="--")
    axes.annotate("AReaL 2.77x", (0, PAPER), va="bottom", color="grey")
    axes.set(
        xlabel="rollout.max_staleness", ylabel="speed-up against synchronous", ylim=(0.9, None)
    )
    axes.legend(title="train:generate")
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eta", default="0,1,2,4,8,16")
    parser.add_argument("--ratios", default="1:3,1:1,3:1", help="train:generate")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tail", type=float, default=8.0, help="p99 / p50 of a turn's length")
    parser.add_argument("--limit", type=float, default=0, help="longest turn, in medians; 0: none")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--quick", action="store_true", help="one seed, toy size: does it run?")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.eta = sorted({0, *(int(eta) for eta in options.eta.split(","))})
    options.ratios = options.ratios.split(",")
    options.limit = options.limit or math.inf
    options.seeds = 1 if options.quick else options.seeds
    rows = table(options)
    if options.picture:
        draw(rows, options.picture)
    if options.json:
        print(json.dumps(rows))
        return
    print("| train:generate | eta | step | of bound | speed-up | 95% | colocated | lag | dropped |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        low, high = row["interval"]
        interval = f"{low:.2f} to {high:.2f}" if math.isfinite(low) else ""
        print(
            f"| {row['ratio']} | {row['eta']} | {row['step_s']:.1f} s | {row['of_bound']:.2f} | "
            f"{row['speedup']:.2f}x | {interval} | {row['colocated']:.2f}x | {row['lag']:.1f} | "
            f"{row['dropped']:.1%} |"
        )
    for words in options.ratios:
        theirs = [row for row in rows if row["ratio"] == words]
        reached = next((row["eta"] for row in theirs if row["speedup"] >= PAPER), None)
        most = theirs[0]["step_s"] / theirs[0]["bound_s"]
        where = f"from eta {reached} on" if reached else "not reached"
        print(f"{words}: {PAPER}x {where}; the bound is {most:.2f}x")


if __name__ == "__main__":
    main()
