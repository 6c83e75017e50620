"""Every engine keeps one contract; they differ by the abilities that they declare only.

`tests/sglang` and `tests/vllm` have the same test for servers in processes of their own, the real
ones too.
"""

from __future__ import annotations

import pytest

from areal_gym.testing.engine_contract import ENGINE_RULES, check_engine
from tests._support.engines_under_test import (
    ENGINES,
    RULES_OF_PICTURES,
    SEEING_ENGINES,
    policies_of,
)


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


@pytest.mark.parametrize("rule", RULES_OF_PICTURES)
@pytest.mark.parametrize("engine", SEEING_ENGINES)
def test_engine_of_a_policy_that_sees_keeps_the_contract(engine, rule, policies):
    kind = SEEING_ENGINES[engine]
    check_engine(rule, kind.opened, policies(kind.architecture), kind.abilities)
