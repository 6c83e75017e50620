"""How full micro-batches of ragged rows are, how many prompts are forwarded twice, what is padding.

    python benchmarks/packing.py [--json]

512 rows, alone or in groups of 8 that share a prompt. `fill` is the share of the micro-batches'
budget that holds tokens; `least` the fewest micro-batches that could hold them; `repeated` the
tokens of prompts that are forwarded more than once, as a share of all; `padding` what the
rectangles of attention have of it where they are needed (for soft caps, and without a C compiler),
for the rows that are short enough to be trained on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterable

from areal_gym.trainer.batch.bins import Row, split_by_tokens
from areal_gym.trainer.batch.packing import pack

DISTRIBUTIONS: dict[str, Callable[[random.Random], float]] = {
    # a response, as a share of the longest that there can be
    "lognormal": lambda rng: min(1.0, math.exp(rng.gauss(-2.5, 0.9))),
    "uniform": lambda rng: rng.uniform(0.01, 0.5),
    "bimodal": lambda rng: rng.uniform(0.01, 0.05) if rng.random() < 0.7 else rng.uniform(0.4, 0.7),
    "geometric": lambda rng: min(1.0, rng.expovariate(12)),
}
SIZES = {
    # longest response, prompts, tokens of a micro-batch
    "long": (8192, (50, 400), 16_384),
    "short": (1024, (20, 120), 4_096),
}
NUM_ROWS = 512


def batch(name: str, size: str, group: int, rng: random.Random) -> list[Row]:
    longest, prompt, _ = SIZES[size]
    rows = []
    for g in range(NUM_ROWS // group):
        shared = tuple(range(1000 * g, 1000 * g + rng.randint(*prompt)))
        for _ in range(group):
            length = max(1, round(longest * DISTRIBUTIONS[name](rng)))
            rows.append(Row(token_ids=shared + (0,) * length, num_shared=len(shared)))
    return rows


def flat_tokens(rows: list[Row], part: Iterable[int]) -> int:
    chosen = [rows[i] for i in part]
    prompts = {tuple(row.token_ids[: row.num_shared]) for row in chosen}
    return sum(len(r.token_ids) - r.num_shared for r in chosen) + sum(map(len, prompts))


def measure(name: str, size: str, group: int) -> dict[str, object]:
    rows = batch(name, size, group, random.Random(0))
    budget = SIZES[size][2]
    begin_s = time.process_time()
    parts = split_by_tokens(rows, budget)
    spent_s = time.process_time() - begin_s
    used = sum(flat_tokens(rows, part) for part in parts)
    needed = flat_tokens(rows, range(len(rows)))
    padding = None
    if size == "short":
        slots = 0
        for part in parts:
            packed = pack([rows[i] for i in part])
            slots += sum(block.query_index_BQ.numel() for block in packed.rectangles[0])
        padding = round(1 - used / slots, 4)
    return {
        "responses": name,
        "longest": SIZES[size][0],
        "budget": budget,
        "siblings": group,
        "micro_batches": len(parts),
        "least": math.ceil(needed / budget),
        "fill": round(used / (budget * len(parts)), 4),
        "repeated": round(used / needed - 1, 4),
        "padding": padding,
        "cpu_ms": round(1000 * spent_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    rows = [
        measure(name, size, group) for size in SIZES for group in (1, 8) for name in DISTRIBUTIONS
    ]
    if arguments.json:
        print(json.dumps({"benchmark": "packing", "rows": rows}))
        return
    print("".join(f"{name:>14}" for name in rows[0]))
    for row in rows:
        print("".join(f"{'' if value is None else value!s:>14}" for value in row.values()))


if __name__ == "__main__":
    main()
