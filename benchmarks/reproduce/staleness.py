"""Is asynchronous training as good as synchronous? After AReaL's table of staleness.

    python benchmarks/reproduce/staleness.py [--arms default,full_rate] [--eta 1,2,4,8]
                   [--updates 1,4] [--rates 1,2] [--optimizer muon|adamw] [--seeds 5]
                   [--runs FILE.jsonl] [--picture FILE.svg] [--quick] [--json]

Whole runs of `areal-gym train --env tir` from one warm start per seed: 8 groups of 8 episodes a
step, the buffer kept full, so that the batches are as old as `rollout.max_staleness` (eta) lets
them be. With `--eta 60` the rollouts run ahead without a bound, because no run has more steps than
that. The synchronous run with the same updates a step and the same learning rate is beside each.
Runs that FILE holds are not repeated, so an interrupted benchmark goes on.

default    the settings as they are
full_rate  the decoupled objective at the full learning rate: `trainer.max_drift=null`
naive      clips around the policy that sampled, full rate: `trainer.correction.proximal=recorded`
m2po       M2PO's mask, full rate: `trainer.correction.second_moment=0.04`
icepop     tokens outside of [0.5, 5] masked, full rate

rate       times the demonstration's (Muon, 3e-3 and 3e-4); with AdamW, times 1e-3
held-out   sampled accuracy over 512 tasks at the end: mean over the seeds, the lowest
greedy     the same with the likeliest token each time
against    the difference from the synchronous run of the same seed: mean, and its 95% interval
           (paired t) from five seeds on
guard      the largest share of its limit that a signal of the guard reached; it warns at 1
"""

from __future__ import annotations

import itertools
import json
import statistics
from functools import partial
from pathlib import Path

from protocol import SMALL, KeptRuns, Row, difference, mean, parser, play, plot_seeds

from areal_gym.config import RunConfig, load_config

_FULL = "trainer.max_drift=null"
ARMS = {
    "default": [],
    "full_rate": [_FULL],
    "naive": [_FULL, "trainer.correction.proximal=recorded"],
    "m2po": [_FULL, "trainer.correction.second_moment=0.04"],
    "icepop": [
        *(_FULL, "trainer.correction.action=mask"),
        *("trainer.correction.lower=0.5", "trainer.correction.upper=5"),
    ],
}
PAPER = "naive 42.0 41.8 40.0 23.3 35.7 35.8 34.0, decoupled - 42.1 41.8 42.2 41.0 38.7 36.9"
_RATES = {"muon": {"lr": 3e-4, "muon_lr": 3e-3}, "adamw": {"lr": 1e-3}}

Case = tuple[str, str, int, int, int, int]
"""Optimizer, arm, eta, updates a step, rate, seed."""


def settings(case: Case, *, is_quick: bool = False) -> RunConfig:
    optimizer, arm, eta, updates, rate, seed = case
    num_steps = 40 if updates > 1 and rate > 1 else 60
    return load_config(
        overrides=[
            *SMALL,
            f"rollout.max_staleness={eta}",
            f"rollout.max_in_flight={64 * (eta + 1)}",
            f"trainer.minibatches={updates}",
            f"trainer.optimizer={optimizer}",
            *(f"trainer.{name}={value * rate}" for name, value in _RATES[optimizer].items()),
            f"eval.num_tasks={32 if is_quick else 512}",
            "eval.at_start=false",  # every run of a seed begins with the same policy
            f"steps={3 if is_quick else num_steps}",
            *(f"seed={seed}", *ARMS[arm]),
        ]
    )


def run(case: Case, *, is_quick: bool) -> Row:
    outcome, rows = play(settings(case, is_quick=is_quick))
    return {
        **outcome,
        "staleness": statistics.mean(row["rollout/staleness_mean"] for row in rows),
        "kl": statistics.median(row["train/approx_kl"] for row in rows),
        "severity": max(row["guard/severity"] for row in rows),
    }


def draw(runs: dict[Case, Row], seeds: int, file: Path) -> None:
    """Draw held-out accuracy over eta: a panel for updates and rate, a line for each arm.

    Lines are means, and points the seeds.
    """
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    (optimizer,) = {case[0] for case in runs}
    grid = sorted({(case[3], case[4]) for case in runs})
    etas = sorted({case[2] for case in runs})
    arms = dict.fromkeys(case[1] for case in runs)
    lowest = 1.0
    figure, panels = pyplot.subplots(1, len(grid), figsize=(3.2 * len(grid), 3.4), sharey=True)
    for panel, (updates, rate) in zip([panels] if len(grid) == 1 else panels, grid, strict=True):
        for arm in arms:
            # The synchronous run is the same for all arms.
            cells = [(arm if eta else "default", eta, updates, rate) for eta in etas]
            rows = [[runs[optimizer, *cell, seed] for seed in range(seeds)] for cell in cells]
            plot_seeds(panel, rows, "heldout", arm)
            lowest = min(lowest, *(row["heldout"] for each in rows for row in each))
        panel.set_xticks(range(len(etas)), map(str, etas))
        panel.set(title=f"{updates} update{'s' * (updates > 1)}, rate x{rate}", xlabel="eta")
    figure.axes[0].set_ylim(0.8 if lowest > 0.8 else 0, 1)
    figure.axes[0].set_ylabel("held-out accuracy")
    figure.axes[0].legend()
    figure.tight_layout()
    figure.savefig(file)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    options_of = parser(__doc__ or "")
    options_of.add_argument("--arms", default="default,full_rate")
    options_of.add_argument("--eta", type=numbers, default=[1, 2, 4, 8])
    options_of.add_argument("--updates", type=numbers, default=[1, 4])
    options_of.add_argument("--rates", type=numbers, default=[1, 2])
    options_of.add_argument("--optimizer", choices=_RATES, default="muon")
    options = options_of.parse_args()
    if options.quick:
        options.arms, options.eta, options.updates, options.rates = "default", [2], [2], [1]
        options.seeds = 1
    arms = options.arms.split(",")
    kept = KeptRuns(options.runs)
    runs: dict[Case, Row] = {}
    grid, optimizer = list(itertools.product(options.updates, options.rates)), options.optimizer
    for seed in range(options.seeds):
        wanted: list[Case] = [(optimizer, "default", 0, *cell, seed) for cell in grid]
        wanted += [
            (optimizer, arm, eta, updates, rate, seed)
            for (updates, rate), eta, arm in itertools.product(grid, options.eta, arms)
        ]
        for case in wanted:
            runs[case] = kept.get(case, partial(run, case, is_quick=options.quick))
    if options.picture:
        draw(runs, options.seeds, options.picture)
    if options.json:
        print(json.dumps(list(runs.values())))
        return
    print(f"The paper (AIME24 at eta 0, 1, 2, 4, 8, 16, inf): {PAPER}\n")
    print(
        "| updates | rate | eta | arm | held-out | lowest | against synchronous | "
        "greedy | against synchronous | KL | lag | guard |"
    )
    print("|---" * 12 + "|")
    for (updates, rate), eta in itertools.product(grid, [0, *options.eta]):
        for arm in ["default"] if eta == 0 else arms:
            seeds, cell = range(options.seeds), (updates, rate)
            rows = [runs[optimizer, arm, eta, *cell, seed] for seed in seeds]
            synchronous = [runs[optimizer, "default", 0, *cell, seed] for seed in seeds]
            against = {
                name: difference([row[name] for row in rows], [row[name] for row in synchronous])
                for name in ("heldout", "greedy")
            }
            print(
                f"| {updates} | {rate} | {eta} | {arm} | {mean(rows, 'heldout'):.3f} | "
                f"{min(row['heldout'] for row in rows):.3f} | "
                f"{against['heldout'] if eta else ''} | {mean(rows, 'greedy'):.3f} | "
                f"{against['greedy'] if eta else ''} | "
                f"{statistics.median(row['kl'] for row in rows):.4f} | "
                f"{statistics.mean(row['staleness'] for row in rows):.1f} | "
                f"{max(row['severity'] for row in rows):.2f} |"
            )


if __name__ == "__main__":
    main()
