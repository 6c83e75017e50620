"""The types of the whole package and of the benchmarks agree, as mypy sees them."""

import subprocess
import sys

from tests._support.paths import ROOT


def test_mypy_has_nothing_to_say():
    done = subprocess.run(
        [sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
