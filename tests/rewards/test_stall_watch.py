"""A call that keeps every thread from running is named on stderr."""

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, re, sys, time
from areal_gym.rewards import RewardInput, load_rewards, stall_watch

stall_watch.watch_for_stalls(limit_s=0.3)

def explodes(completion):
    return float(bool(re.match("(a+)+$", completion)))  # holds the interpreter's lock

def waits(completion):
    time.sleep(1)
    return 1.0

asyncio.run(load_rewards(globals()[sys.argv[1]]).score(RewardInput(completion="a" * 25 + "b")))
"""


@pytest.mark.parametrize(("reward", "is_named"), [("explodes", True), ("waits", False)])
def test_a_call_that_lets_no_thread_run_is_named(tmp_path, reward, is_named):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    command = [sys.executable, file, reward]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert (f'"{file}", line 8 in explodes' in ran.stderr) is is_named
