"""Paths of the tau2-bench data and of recorded verdicts, beside the project."""

import pytest

from tests._support.paths import SHARED

DATA = SHARED / "data" / "tau2"
FIXTURES = SHARED / "golden" / "tau2"

needs_data = pytest.mark.skipif(
    not (DATA / "tau2" / "domains").is_dir(), reason="the data of tau2-bench is not in ../shared"
)
needs_fixtures = pytest.mark.skipif(
    not (DATA / "tau2" / "domains").is_dir() or not FIXTURES.is_dir(),
    reason="recorded verdicts of tau2-bench are not in ../shared",
)
