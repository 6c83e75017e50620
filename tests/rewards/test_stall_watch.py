"""A call that keeps every thread from running, or ends the process, is named on stderr."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, os, re, sys, time
from areal_gym.rewards import RewardInput, load_rewards, stall_watch

stall_watch.watch_for_stalls(limit_s=0.3)

def explodes(completion):
    return float(bool(re.match("(a+)+$", completion)))  # holds the interpreter's lock

def waits(completion):
    time.sleep(1)
    return 1.0

def aborts(completion):
    time.sleep(0.1)  # the watch has begun
    os.abort()

asyncio.run(load_rewards(globals()[sys.argv[1]]).score(RewardInput(completion="a" * 25 + "b")))
"""


def ran(tmp_path, reward):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    command = [sys.executable, file, reward]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize(("reward", "is_named"), [("explodes", True), ("waits", False)])
def test_a_call_that_lets_no_thread_run_is_named(tmp_path, reward, is_named):
    done = ran(tmp_path, reward)
    assert done.returncode == 0, done.stderr
    assert ('program.py", line 8 in explodes' in done.stderr) is is_named


def test_a_call_that_ends_the_process_is_named(tmp_path):
    done = ran(tmp_path, "aborts")
    assert done.returncode == -signal.SIGABRT
    assert 'program.py", line 16 in aborts' in done.stderr
