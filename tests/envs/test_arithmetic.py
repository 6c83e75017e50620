from __future__ import annotations

import contextlib
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_gym.envs.arithmetic import (
    LEVELS,
    PHRASINGS,
    canonical,
    evaluate,
    level_named,
    sample_expression,
    sample_question,
)
from areal_gym.errors import UsageError


@pytest.mark.parametrize("level", LEVELS)
def test_sampled_expressions_fit_their_level(level):
    rng = random.Random(level)
    settings = LEVELS[level]
    for _ in range(300):
        expression = sample_expression(rng, settings)
        assert evaluate(expression) == eval(expression)
        assert evaluate(expression).denominator == 1
        assert ("/" in expression) <= settings.has_division
        assert ("(" in expression) <= settings.has_parentheses


def test_questions_use_at_least_five_phrasings():
    assert len(set(PHRASINGS)) >= 5
    rng = random.Random(0)
    questions = {sample_question(rng, "37*48+12") for _ in range(200)}
    assert questions == {phrasing.format("37*48+12") for phrasing in PHRASINGS}


def test_canonical_form_ignores_order_and_grouping_only():
    assert canonical("37*48+12") == canonical("12+48*37") == canonical("(12)+(37*48)")
    assert canonical("1-(2-3)") == canonical("3+1-2")
    assert canonical("5*84/7") == canonical("84/7*5")
    assert canonical("3-5") != canonical("5-3")
    assert canonical("3*(5+1)") != canonical("3*5+1")
    assert canonical("12+3") != canonical("1+23")


@given(st.integers(0, 2**32), st.sampled_from(sorted(LEVELS)))
def test_equal_canonical_forms_have_equal_values(seed, level):
    expression = sample_expression(random.Random(seed), LEVELS[level])
    # The canonical form is an expression apart from the operator before each first term.
    assert evaluate(expression) == eval(
        canonical(expression).replace("(*", "(1*").replace("(/", "(1/")
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "2**9",
        "7//2",
        "1(2)",
        "012",
        "-1",
        "1/0",
        "2 3",
        "(" * 400,
        "1" * 501,
        "1\n+",
        "٣+1",
    ],
)
def test_evaluate_refuses_other_than_plain_arithmetic(text):
    with pytest.raises(ValueError, match=r"arithmetic|more than|division by zero"):
        evaluate(text)


@given(st.text(alphabet="0123456789+-*/() ", max_size=60))
def test_evaluate_returns_a_fraction_or_raises_value_error(text):
    with contextlib.suppress(ValueError):
        assert isinstance(evaluate(text), Fraction)


@pytest.mark.parametrize("level", [0, 6, True, "2"])
def test_unknown_level_is_named(level):
    with pytest.raises(UsageError, match="no level") as caught:
        level_named(level)
    assert caught.value.hints == ("levels are 1 to 5",)
