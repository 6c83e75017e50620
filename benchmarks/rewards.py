"""What a reward function costs besides its own work: CPU microseconds per completion.

    python benchmarks/rewards.py [--json]

Completions are scored one after the other, which is the worst case of the worker threads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from areal_gym.rewards import RewardInput, load_rewards

NUM_CALLS = 3_000
NUM_ROUNDS = 5
ROW = {"prompt": "2 + 2?", "answer": "4", "level": 1}


def equal(completion: str, answer: str) -> float:
    """Return whether the completion is the answer."""
    return float(completion == answer)


async def equal_later(completion: str, answer: str) -> float:
    """Return the same from a coroutine."""
    return float(completion == answer)


def equal_each(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """Return the same in TRL's form."""
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


CASES: dict[str, Any] = {
    "a function": equal,
    "a function of lists (TRL)": equal_each,
    "a built-in (exact)": "exact",
    "a coroutine": equal_later,
    "a function and a built-in": [equal, "exact"],
}


async def overhead_us(reward: Any) -> float:
    """Return the CPU time of a score less that of the function itself; the best round."""
    rewards = load_rewards(reward)
    sample = RewardInput(completion="4", prompt="2 + 2?", row=ROW)
    rounds = []
    for _ in range(NUM_ROUNDS):
        begin_s = time.process_time()
        for _ in range(NUM_CALLS):
            await rewards.score(sample)
        rounds.append(time.process_time() - begin_s)
    return (min(rounds) - direct_s(lambda: equal("4", "4"))) / NUM_CALLS * 1e6


def direct_s(call: Callable[[], object]) -> float:
    """Return the CPU time of as many calls."""
    begin_s = time.process_time()
    for _ in range(NUM_CALLS):
        call()
    return time.process_time() - begin_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    results = {name: asyncio.run(overhead_us(reward)) for name, reward in CASES.items()}
    if as_json:
        print(json.dumps({"overhead_us": results}))
        return
    for name, microseconds in results.items():
        print(f"{name:<28}{microseconds:8.1f} us of CPU a completion")


if __name__ == "__main__":
    main()
