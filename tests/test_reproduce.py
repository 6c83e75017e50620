"""`benchmarks/reproduce`: the scripts run at toy size, and the simulated cluster is exact."""

import asyncio
import json
import subprocess
import sys

import pytest

from benchmarks.reproduce.speedup import TOKENS_PER_S, Case, SharedEngine, run
from tests._support.paths import ROOT
from tests._support.virtual_time import VirtualLoop

# The script as it is, but from a policy that is warm-started in a second instead of half a minute.
START = """
import functools, os, runpy, sys
from areal_gym.warm_start import starter_policy
short = {"num_tokenizer_texts": 300, "min_hold_steps": 2, "max_hold_steps": 4, "decay_steps": 2}
starter_policy.Recipe = functools.partial(starter_policy.Recipe, **short, num_probes=4)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("staleness", "dapo_ladder", "router_noise", "distillation"),
        pytest.param("dead_ends", marks=pytest.mark.long),
        pytest.param("self_distillation", marks=pytest.mark.long),
    ],
)
def test_a_table_is_made_at_toy_size(name, tmp_path):
    kept, picture = tmp_path / "runs.jsonl", tmp_path / "picture.svg"
    script = str(ROOT / "benchmarks" / "reproduce" / f"{name}.py")
    command = [sys.executable, "-c", START, script, "--quick"]
    command += ["--runs", str(kept), "--picture", str(picture)]
    is_drawn = name not in ("dead_ends", "self_distillation")
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert not is_drawn or "<svg" in picture.read_text()
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    cases = [row for row in rows if row["case"][0] != "start"]  # the first policy of a seed
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(cases) == len(lines) - 1  # the head
    assert all(0 <= row["heldout"] <= 1 for row in rows)


def test_an_interrupted_table_goes_on(tmp_path):
    code = """
import sys
from pathlib import Path
from protocol import KeptRuns
kept = KeptRuns(Path(sys.argv[1]))
print(kept.get(("arm", 0), lambda: {"heldout": 0.5}), kept.get(("arm", 1), lambda: 1 / 0))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "runs.jsonl")]
    folder = ROOT / "benchmarks" / "reproduce"
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        assert "ZeroDivisionError" in done.stderr
    assert (tmp_path / "runs.jsonl").read_text().count("heldout") == 1  # the first was kept


def served(turns, budget, per_turn):
    """When turns end that start after so many seconds and have so many tokens."""
    loop = VirtualLoop()

    async def play():
        engine = SharedEngine(budget, per_turn)

        async def turn(start_s, num_tokens):
            await asyncio.sleep(start_s)
            await engine.serve(num_tokens)
            return loop.time()

        return await asyncio.gather(*(turn(*each) for each in turns))

    try:
        return loop.run_until_complete(play())
    finally:
        loop.close()


def test_turns_share_the_engine_equally():
    # Alone at 10 a second; the two share 15 from 2 s on: 20 + 7.5 t = 50 at 6 s. The second has 30
    # of 40 then, and the rest at 10 a second.
    assert served([(0, 50), (2, 40)], budget=15, per_turn=10) == pytest.approx([6, 7])


@pytest.mark.parametrize("ratio", [1 / 3, 3])
def test_synchronous_steps_are_the_longest_turn_and_the_training(ratio):
    """With a budget for all, a step is as long as its longest turn, and then trains."""
    case = Case(eta=0, ratio=ratio, seed=0, batch_groups=1, steps=4, warmup=0, tail=1.0001)
    row = run(case)
    generate_s = 8 * 4000 / (TOKENS_PER_S * 8 * 0.25)
    assert row["step_s"] == pytest.approx(generate_s * (1 + ratio), rel=1e-2)
    assert (row["lag"], row["dropped"]) == (0, 0)


def test_ahead_of_the_trainer_the_slower_half_never_waits():
    sizes = {"seed": 1, "batch_groups": 4, "steps": 24, "warmup": 8, "tail": 3}
    slow, fast = run(Case(eta=0, ratio=1.0, **sizes)), run(Case(eta=8, ratio=1.0, **sizes))
    assert fast["step_s"] == pytest.approx(fast["bound_s"], rel=0.1)
    assert slow["step_s"] > 1.5 * fast["step_s"]
    assert 0 < fast["lag"] <= 8
