"""Every engine keeps one contract; they differ by the abilities that they declare only."""

from __future__ import annotations

import pytest

from areal_gym.testing.engine_contract import ENGINE_RULES, check_engine
from tests._support.engines_under_test import ENGINES, REAL_ENGINES, policies_of


@pytest.fixture(scope="session")
def policies(tmp_path_factory):
    """The two checkpoints of an architecture, made once."""
    made = {}

    def policies(architecture):
        if architecture not in made:
            directory = tmp_path_factory.mktemp(architecture)
            made[architecture] = policies_of(architecture, directory)
        return made[architecture]

    return policies


@pytest.mark.parametrize("rule", ENGINE_RULES)
@pytest.mark.parametrize("engine", ENGINES)
def test_engine_keeps_the_contract(engine, rule, policies):
    kind = ENGINES[engine]
    check_engine(rule, kind.opened, policies(kind.architecture), kind.abilities)


@pytest.fixture(scope="session", params=REAL_ENGINES.values(), ids=list(REAL_ENGINES))
def served(request, policies, tmp_path_factory):
    """A real server, started once for all rules: its kind, and how an engine over it is opened."""
    if request.param.venv is None:
        pytest.skip(request.param.reason)
    first = policies("qwen3").first
    with request.param.running(first, tmp_path_factory.mktemp("served") / "log") as url:
        yield request.param, url


@pytest.mark.long  # not yet seen to pass: what the real servers are declared to do was read in code
@pytest.mark.parametrize("rule", ENGINE_RULES)
def test_served_engine_keeps_the_contract(served, rule, policies):
    kind, url = served
    check_engine(rule, kind.over(url), policies("qwen3"), kind.abilities)
