"""Programs are not disturbed by others that run beside them."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from areal_gym.sandbox import ProcessSandbox, SandboxLimits
from tests._support.paths import ROOT

NOBODY = 65534


@pytest.mark.parametrize("without", [[], ["namespaces"]], ids=["isolated", "filtered"])
@pytest.mark.parametrize("uid", [0, NOBODY], ids=["this_user", "ordinary_user"])
def test_eight_programs_run_eight_threads_each(uid, without):
    if uid and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    process = subprocess.run(
        [sys.executable, "-m", "tests._support.thread_crowd", str(uid), *without],
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


MANY_FILES = """
import os
for i in range(40):
    os.mkdir(f"d{i}")
    for j in range(100): open(f"d{i}/{j}", "w").close()
"""


def test_removing_a_large_tree_does_not_block_other_calls(monkeypatch):
    async def go():
        async with ProcessSandbox(num_workers=1, without=["namespaces"]) as sandbox:
            assert (await sandbox.run(MANY_FILES, limits=SandboxLimits(wall_s=120))).is_ok
            results = [await sandbox.run("1", limits=SandboxLimits(wall_s=120)) for _ in range(4)]
            assert [result.value for result in results] == ["1"] * 4
            scratch = Path(sandbox.zygotes()[0].server.scratch)
            deadline = time.monotonic() + 120
            while list(scratch.glob("*/d*")):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            assert (await sandbox.run(MANY_FILES, limits=SandboxLimits(wall_s=120))).is_ok
        assert not scratch.exists()

    with tempfile.TemporaryDirectory(dir="/tmp") as home:
        os.chmod(home, 0o755)  # cells pass through it under a uid of their own
        monkeypatch.setattr(tempfile, "tempdir", home)
        asyncio.run(go())
