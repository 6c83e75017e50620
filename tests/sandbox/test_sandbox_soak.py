"""A short run of benchmarks/sandbox_soak.py: nothing is left behind and nothing grows."""

import json
import os
import subprocess
import sys

import pytest

from tests._support.paths import ROOT


def soak(*arguments):
    command = [sys.executable, str(ROOT / "benchmarks/sandbox_soak.py"), "--json", *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert process.returncode in (0, 1), process.stderr
    report = json.loads(process.stdout)
    assert report["wrong"] == 0
    assert report["grown"] == []
    return report


@pytest.mark.slow
def test_process_sandbox_soak():
    report = soak("--num-calls", "500")
    assert report["calls"] == 500
    assert report["hostile"] > 5


@pytest.mark.slow
def test_docker_sandbox_soak(docker_image):
    report = soak("--num-calls", "300", "--backend", "docker", "--image", docker_image)
    assert report["calls"] == 300
