"""Which loss survives an engine whose log-probabilities are not the trainer's?

    python benchmarks/reproduce/router_noise.py [--arms grpo,gspo,tis,icepop,kpop]
               [--noise 0,0.02,0.1,0.5,flips] [--seeds 5] [--steps 40] [--runs FILE.jsonl]
               [--picture FILE.svg] [--quick] [--json]

Mixtures of experts choose other experts in the engine than in the trainer now and then, and small
differences of kernels are everywhere. Here the embedded engine says log-probabilities that are off
by Gaussian noise of a standard deviation (`--noise`); "flips" is 0.02 everywhere and 2 on one token
in ten, as reported for mixtures in Megatron-LM (issue 4168). What is sampled stays as it was, so
that the noise alone is measured. Whole runs of `areal-gym train --env tir`, synchronous, 4 updates
a step, from one warm start per seed.

grpo     ratios against the log-probabilities of the engine (`trainer.correction.proximal=recorded`)
gspo     one ratio per sequence, against them (Zheng et al. 2025)
tis      ratios against the trainer's own, weights truncated at 2 (Yao et al. 2025)
icepop   the same, tokens outside of [0.5, 5] masked (Ring-1T 2025)
kpop     the same, tokens whose binary KL is above 0.1 masked

held-out   sampled accuracy over 512 tasks at the end: mean over the seeds, the lowest
against    the difference from the same arm without noise, seed by seed: mean, 95% interval
norm       median and largest gradient norm of a step, before it is clipped
collapsed  seeds that ended below their warm start
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from protocol import SMALL, KeptRuns, Row, difference, mean, parser, play, plot_seeds

from areal_gym.config import load_config
from areal_gym.engines.base import Generation, Piece, SamplingParams
from areal_gym.engines.embedded import EmbeddedEngine
from areal_gym.message_types import ImageRef
from areal_gym.plugins import EngineSpec, PluginManager, Registry, hookimpl, set_registry

_MASK = "trainer.correction.action=mask"
_OWN = "trainer.correction.proximal=recomputed"
ARMS = {
    "grpo": ["trainer.correction.proximal=recorded"],
    "gspo": ["trainer.algorithm=gspo", "trainer.correction.proximal=recorded"],
    "tis": [_OWN, "trainer.correction.upper=2"],
    "icepop": [_OWN, _MASK, "trainer.correction.lower=0.5", "trainer.correction.upper=5"],
    "kpop": [
        *(_OWN, _MASK),
        *("trainer.correction.measure=binary_kl", "trainer.correction.upper=0.1"),
    ],
}
FLIPS = "flips"

Case = tuple[str, str, int]
"""Arm, noise, seed."""


class NoisyEngine(EmbeddedEngine):
    """The embedded engine, whose log-probabilities are off."""

    noise = "0"
    rng = random.Random(0)

    def _off(self, logprobs: Sequence[float]) -> list[float]:
        return [min(0.0, value + self.rng.gauss(0.0, self._deviation())) for value in logprobs]

    def _deviation(self) -> float:
        if self.noise != FLIPS:
            return float(self.noise)
        return 2.0 if self.rng.random() < 0.1 else 0.02

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        images: Sequence[ImageRef] = (),
    ) -> Generation:
        """Sample a continuation; its log-probabilities are off."""
        whole = await super().generate(prompt_ids, params, session=session, images=images)
        return replace(whole, logprobs=self._off(whole.logprobs))

    async def stream(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        images: Sequence[ImageRef] = (),
    ) -> AsyncGenerator[Piece, None]:
        """Stream a continuation; its log-probabilities are off."""
        async for piece in super().stream(prompt_ids, params, session=session, images=images):
            yield replace(piece, logprobs=self._off(piece.logprobs))


@hookimpl
def register_engines() -> Iterable[EngineSpec]:
    """Yield the noisy engine."""
    yield EngineSpec(
        id="noisy",
        entry_point=f"{__name__}:NoisyEngine",
        summary="the embedded engine, whose log-probabilities are off",
    )


def run(case: Case, *, steps: int, num_tasks: int, starts: bool = False) -> Row:
    """Train once; `starts` measures the first policy, which all cases of a seed share."""
    arm, NoisyEngine.noise, seed = case
    NoisyEngine.rng = random.Random(seed)
    more = ["engine.id=noisy", "trainer.minibatches=4", f"steps={steps}", f"seed={seed}"]
    more += ["trainer.lr=3e-4", "trainer.muon_lr=3e-3", f"eval.num_tasks={num_tasks}"]
    # Runs with such a gap are refused otherwise.
    more += ["engine.max_logprob_gap=10", f"eval.at_start={str(starts).lower()}"]
    outcome, rows = play(load_config(overrides=[*SMALL, *more, *ARMS[arm]]))
    norms = [row["train/grad_norm"] for row in rows]
    gap = statistics.median(row["train/engine_gap"] for row in rows)
    return {**outcome, "norm": statistics.median(norms), "max_norm": max(norms), "gap": gap}


def draw(cells: dict[tuple[str, str], list[Row]], file: Path) -> None:
    """Draw held-out accuracy and the largest gradient norm over the noise, a line for each arm.

    Lines are means, and points the seeds.
    """
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    noises = list(dict.fromkeys(noise for _, noise in cells))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for panel, name in ((left, "heldout"), (right, "max_norm")):
        for arm in dict.fromkeys(arm for arm, _ in cells):
            plot_seeds(panel, [cells[arm, noise] for noise in noises], name, arm)
        panel.set_xticks(range(len(noises)), noises)
        panel.set_xlabel("noise of the log-probabilities")
    lowest = min(row["heldout"] for rows in cells.values() for row in rows)
    left.set(ylabel="held-out accuracy", ylim=(0.8 if lowest > 0.8 else 0, 1))
    right.set(ylabel="largest gradient norm of a run", yscale="log")
    left.legend()
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    options_of = parser(__doc__ or "")
    options_of.add_argument("--arms", default=",".join(ARMS))
    options_of.add_argument("--noise", default="0,0.02,0.1,0.5,flips")
    options_of.add_argument("--steps", type=int, default=40)
    options = options_of.parse_args()
    arms, noises = options.arms.split(","), options.noise.split(",")
    seeds, steps, num_tasks = options.seeds, options.steps, 512
    if options.quick:
        arms, noises, seeds, steps, num_tasks = ["grpo", "icepop"], ["0", FLIPS], 1, 2, 16
    set_registry(Registry(PluginManager.installed(modules=[__name__])))
    kept = KeptRuns(options.runs)
    cells: dict[tuple[str, str], list[Row]] = {}
    for seed in range(seeds):
        start = partial(run, ("grpo", "0", seed), steps=1, num_tasks=num_tasks, starts=True)
        before = kept.get(("start", "0", seed), start)["before"]
        for arm, noise in itertools.product(arms, noises):
            case = (arm, noise, seed)
            row = kept.get(case, partial(run, case, steps=steps, num_tasks=num_tasks))
            cells.setdefault((arm, noise), []).append(row | {"before": before})
    if options.picture:
        draw(cells, options.picture)
    if options.json:
        print(json.dumps([row for rows in cells.values() for row in rows]))
        return
    print("| arm | noise | held-out | lowest | against no noise | norm | largest | collapsed |")
    print("|---|---|---|---|---|---|---|---|")
    for (arm, noise), rows in cells.items():
        print(f"| {arm} | {noise} | " + " | ".join(_cells(rows, cells.get((arm, "0")))) + " |")


def _cells(rows: list[Row], quiet: list[Row] | None) -> list[str]:
    heldout = [row["heldout"] for row in rows]
    against = ""
    if quiet is not None and quiet is not rows:
        against = difference(heldout, [row["heldout"] for row in quiet])
    num_collapsed = sum(row["heldout"] < row["before"] for row in rows)
    shown: list[Any] = [f"{statistics.fmean(heldout):.3f}", f"{min(heldout):.3f}", against]
    shown += [f"{mean(rows, 'norm'):.2f}", f"{max(row['max_norm'] for row in rows):.1f}"]
    return [*shown, f"{num_collapsed} of {len(rows)}"]


if __name__ == "__main__":
    main()
