"""Trap 33: memory that grows a little each step until the host dies."""

import json
import subprocess
import sys
from pathlib import Path

WARM_UP, STEPS = 60, 210
"""Until caches, pools and allocators have what they need; and how many steps are measured."""


def test_a_long_run_holds_its_memory(tiny_policy, tmp_path):
    script = Path(__file__).with_name("soaked_run.py")
    arguments = [str(tiny_policy), str(tmp_path / "run"), str(WARM_UP + STEPS)]
    run = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    weighed = json.loads(run.stdout)[WARM_UP // 10 :]
    third = len(weighed) // 3
    # Somewhat more or less is in flight each time; the least of ten times is compared.
    (bytes_before, before), (bytes_after, after) = (
        (min(size for size, _ in part), min(blocks for _, blocks in part))
        for part in (weighed[:third], weighed[-third:])
    )
    # One trajectory of this run has about 100 blocks; four are played each step.
    assert after - before < 7 * STEPS
    assert bytes_after - bytes_before < 5_000 * STEPS
