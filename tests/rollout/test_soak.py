"""Trap 33: memory that grows a little each step until the host dies."""

import json
import subprocess
import sys

import pytest

WARM_UP, STEPS = 60, 210
"""Steps until caches, pools and allocators are full, and measured steps after them."""


@pytest.mark.long
def test_long_run_does_not_grow_in_memory(tiny_policy, tmp_path):
    arguments = [str(tiny_policy), str(tmp_path / "run"), str(WARM_UP + STEPS)]
    run = subprocess.run(
        [sys.executable, "-m", "tests._support.soaked_run", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    samples = json.loads(run.stdout)[WARM_UP // 10 :]
    third = len(samples) // 3
    # What is in flight varies: the minimum of each third is compared.
    (bytes_before, before), (bytes_after, after) = (
        (min(size for size, _ in part), min(blocks for _, blocks in part))
        for part in (samples[:third], samples[-third:])
    )
    # One trajectory of this run has about 100 blocks; four are played each step.
    assert after - before < 7 * STEPS
    assert bytes_after - bytes_before < 5_000 * STEPS
