"""Correct programs do not depend on what runs beside them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOBODY = 65534


@pytest.mark.parametrize("without", [[], ["namespaces"]], ids=["isolated", "filtered"])
@pytest.mark.parametrize("uid", [0, NOBODY], ids=["this_user", "ordinary_user"])
def test_eight_programs_have_eight_threads_each_at_once(uid, without):
    if uid and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    process = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("crowd.py")), str(uid), *without],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["results"] == [["ok", "eight\n", ""]] * 8
    status, stderr = report["bomb"]
    assert (status, stderr.splitlines()[-1]) in [
        ("error", "RuntimeError: can't start new thread"),
        ("killed", "Killed: more than 16 threads and processes"),
    ]
