"""Directories that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""

TESTS = ROOT / "tests"

SHARED = ROOT.parent / "shared"
"""Reference numbers and data beside the repository; tests that need them skip without them."""
