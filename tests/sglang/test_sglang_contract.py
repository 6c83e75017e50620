"""The contract of engines, kept by SGLang's: over the stand-in, and over the real server."""

from dataclasses import replace

import pytest

from areal_gym.engines.sglang import SGLangEngine
from areal_gym.testing.engine_contract import ENGINE_RULES, EnginePolicies, check_engine
from tests._support.engines_under_test import (
    RULES_OF_PICTURES,
    RULES_OF_UPDATES,
    SERVED_SGLANG,
    policies_of,
    served,
)
from tests._support.served_top_tokens import check_served_teacher
from tests._support.server_processes import require_torchvision
from tests._support.sglang_processes import (
    NEEDS_REAL,
    VENV,
    require_retract,
    running_server,
    version_of,
)

CASES = [(rule, "abort") for rule in ENGINE_RULES]
CASES += [(rule, "retract") for rule in RULES_OF_UPDATES]


@pytest.mark.parametrize(("rule", "interrupt"), CASES)
def test_sglang_keeps_the_contract(kind, server, policies, rule, interrupt):
    if interrupt == "retract":
        require_retract(kind)
    opened = served(SGLangEngine, server, interrupt)
    pair = EnginePolicies(first=policies[0], second=policies[1])
    check_engine(rule, opened, pair, SERVED_SGLANG[kind])


def test_served_teacher_gives_the_divergence_of_a_local_one(server, policies):
    check_served_teacher(served(SGLangEngine, server), policies)


@NEEDS_REAL
@pytest.mark.long
def test_real_sglang_with_pictures_keeps_the_contract(tmp_path):
    require_torchvision(VENV)
    pair = policies_of("qwen3_vl", tmp_path)
    abilities = replace(SERVED_SGLANG["real"], takes_images=True)
    with running_server("real", pair.first, tmp_path / "log") as (url, _):
        for rule in RULES_OF_PICTURES:
            check_engine(rule, served(SGLangEngine, url), pair, abilities)
        if version_of("real") >= (0, 5, 21):
            check_engine("picture-updates", served(SGLangEngine, url, "retract"), pair, abilities)
