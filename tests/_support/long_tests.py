"""Tests that take most of a minute and have a shorter sibling run where they are asked for."""

import os

import pytest

VARIABLE = "AREAL_GYM_LONG_TESTS"


def skip_long():
    """Skip the running test unless long ones are asked for."""
    if not os.environ.get(VARIABLE):
        pytest.skip(f"long, and a shorter sibling runs: {VARIABLE}=1")


def short(cases, *long):
    """Return the cases without those named, which run where long tests are asked for."""
    assert set(long) <= set(cases)
    return [each for each in cases if os.environ.get(VARIABLE) or each not in long]


def skip_long_if_real(kind):
    """Skip what starts real servers of its own; its sibling is the same test on the fake."""
    if kind == "real":
        skip_long()
