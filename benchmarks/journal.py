"""What the journal of groups costs: CPU-milliseconds per group, bytes per trajectory.

    python benchmarks/journal.py [--json]

Groups of eight siblings with random ids and log-probabilities, as a real policy samples them: a
trajectory is issued, scored and taken, and every 20 batches of 16 groups there is a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from areal_gym.rollout.journal import Journal
from areal_gym.types import (
    FinishReason,
    Group,
    Message,
    StopReason,
    Task,
    TokenSpan,
    Trajectory,
    Turn,
)

GROUP_SIZE = 8
BATCH_GROUPS = 16
NUM_BATCHES = 20
SHAPES = [
    ("3 turns, 150 sampled of 500 tokens", 3, 50, 116),
    ("10 turns, 2,000 sampled of 5,000 tokens", 10, 200, 300),
    ("1 turn, 4,000 sampled of 4,500 tokens", 1, 4000, 500),
]


def make_group(rng: random.Random, num_turns: int, num_sampled: int, num_read: int) -> Group:
    task = Task(id=str(rng.random()), data={"question": "What is 37*48+12?", "answer": "1788"})
    return Group(
        id="g",
        task=task,
        trajectories=tuple(
            make_trajectory(rng, task, num_turns, num_sampled, num_read) for _ in range(GROUP_SIZE)
        ),
    )


def make_trajectory(
    rng: random.Random, task: Task, num_turns: int, num_sampled: int, num_read: int
) -> Trajectory:
    spans: list[TokenSpan] = []
    messages: list[Message] = []
    for turn in range(num_turns):
        read = tuple(rng.randrange(150_000) for _ in range(num_read))
        spans.append(TokenSpan(origin="env" if turn else "prompt", token_ids=read, turn=turn))
        spans.append(
            TokenSpan(
                origin="policy",
                token_ids=tuple(rng.randrange(150_000) for _ in range(num_sampled)),
                logprobs=tuple(-rng.expovariate(1.0) for _ in range(num_sampled)),
                policy_version=3,
                turn=turn,
            )
        )
        messages += [
            {"role": "tool", "content": "word " * num_read},
            {"role": "assistant", "content": "word " * num_sampled},
        ]
    return Trajectory(
        id="t",
        group_id="g",
        task=task,
        env_id="e",
        spans=tuple(spans),
        turns=tuple(Turn(finish_reason=FinishReason.STOP, reward=0.5) for _ in range(num_turns)),
        messages=tuple(messages),
        stop_reason=StopReason.COMPLETED,
    )


def measure(num_turns: int, num_sampled: int, num_read: int) -> dict[str, float]:
    rng = random.Random(0)
    groups = [make_group(rng, num_turns, num_sampled, num_read) for _ in range(BATCH_GROUPS)]
    with tempfile.TemporaryDirectory() as home:
        file = Path(home, "journal.jsonl")
        with Journal(file) as journal:
            start_s = time.process_time()
            for batch in range(NUM_BATCHES):
                indices = range(batch * BATCH_GROUPS, (batch + 1) * BATCH_GROUPS)
                for index, group in zip(indices, groups, strict=True):
                    journal.issued(index, {})
                    journal.scored(index, group)
                journal.taken(indices, batch + 1)
            num_bytes = file.stat().st_size
            journal.checkpoint({"next_group": NUM_BATCHES * BATCH_GROUPS, "unfinished": []})
            cpu_s = time.process_time() - start_s
    num_groups = NUM_BATCHES * BATCH_GROUPS
    return {
        "cpu_ms_per_group": cpu_s / num_groups * 1e3,
        "bytes_per_trajectory": num_bytes / num_groups / GROUP_SIZE,
        "bytes_per_token": num_bytes
        / num_groups
        / GROUP_SIZE
        / (num_turns * (num_sampled + num_read)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    rows = {name: measure(*shape) for name, *shape in SHAPES}
    if options.json:
        print(json.dumps({"benchmark": "journal", "rows": rows}))
        return
    print(f"{'':42}{'CPU ms / group':>16}{'bytes / trajectory':>20}{'bytes / token':>15}")
    for name, row in rows.items():
        print(
            f"{name:42}{row['cpu_ms_per_group']:16.2f}{row['bytes_per_trajectory']:20,.0f}"
            f"{row['bytes_per_token']:15.1f}"
        )


if __name__ == "__main__":
    main()
