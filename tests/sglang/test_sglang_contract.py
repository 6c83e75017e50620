"""The contract of engines, kept by SGLang's: over the stand-in, and over the real server."""

import pytest
from conftest import require_retract

from areal_gym.engines.sglang import SGLangEngine
from areal_gym.testing.engine_contract import ENGINE_RULES, EnginePolicies, check_engine
from tests._support.engines_under_test import RULES_OF_UPDATES, SERVED_SGLANG, served

CASES = [(rule, "abort") for rule in ENGINE_RULES]
CASES += [(rule, "retract") for rule in RULES_OF_UPDATES]


@pytest.mark.parametrize(("rule", "interrupt"), CASES)
def test_sglang_keeps_the_contract(kind, server, policies, rule, interrupt):
    if interrupt == "retract":
        require_retract(kind)
    opened = served(SGLangEngine, server, interrupt)
    pair = EnginePolicies(first=policies[0], second=policies[1])
    check_engine(rule, opened, pair, SERVED_SGLANG[kind])
