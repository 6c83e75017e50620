"""The contract of engines, kept by vLLM's: over the stand-in, and over the real server."""

import asyncio
from dataclasses import replace

import pytest

from areal_gym.engines.vllm import VLLMEngine
from areal_gym.testing.engine_contract import ENGINE_RULES, EnginePolicies, check_engine
from tests._support.engines_under_test import (
    RULES_OF_PICTURES,
    RULES_OF_UPDATES,
    RULES_OF_WORKERS,
    SERVED_VLLM,
    policies_of,
    served,
)
from tests._support.served_top_tokens import check_served_teacher
from tests._support.server_processes import require_torchvision
from tests._support.vllm_processes import NEEDS_REAL, VENV, running_server

CASES = [(rule, "abort") for rule in ENGINE_RULES]
CASES += [(rule, "keep") for rule in RULES_OF_UPDATES]


@pytest.mark.parametrize(("rule", "interrupt"), CASES)
def test_vllm_keeps_the_contract(kind, server, policies, rule, interrupt):
    opened = served(VLLMEngine, server, interrupt)
    pair = EnginePolicies(first=policies[0], second=policies[1])
    check_engine(rule, opened, pair, SERVED_VLLM[kind])


def test_served_teacher_gives_the_divergence_of_a_local_one(server, policies):
    check_served_teacher(served(VLLMEngine, server), policies)


@NEEDS_REAL
@pytest.mark.long
def test_real_vllm_with_pictures_keeps_the_contract(tmp_path):
    require_torchvision(VENV)
    pair = policies_of("qwen3_vl", tmp_path)
    abilities = replace(SERVED_VLLM["real"], takes_images=True)
    with running_server("real", pair.first, tmp_path / "log") as (url, _):
        for rule in RULES_OF_PICTURES:
            check_engine(rule, served(VLLMEngine, url), pair, abilities)
        check_engine("picture-updates", served(VLLMEngine, url, "keep"), pair, abilities)


@NEEDS_REAL
@pytest.mark.parametrize(
    ("rules", "weight_syncs"),
    [
        (("logprobs", "publication"), ("distributed",)),
        pytest.param(RULES_OF_WORKERS, ("disk", "distributed"), marks=pytest.mark.long),
    ],
    ids=["short", "all"],
)
def test_two_workers_keep_the_contract(rules, weight_syncs, policies, tmp_path):
    """Each worker of a server with tensor parallelism takes its part of each tensor."""
    pair = EnginePolicies(first=policies[0], second=policies[1])
    abilities = replace(SERVED_VLLM["real"], weight_syncs=weight_syncs)
    flags = ("--tensor-parallel-size", "2")
    with running_server("real", policies[0], tmp_path / "log", *flags) as (url, _):
        assert asyncio.run(num_workers(policies[0], url)) == 2
        for rule in rules:
            check_engine(rule, served(VLLMEngine, url), pair, abilities)


async def num_workers(policy, url):
    async with served(VLLMEngine, url)(policy) as engine:
        return engine.servers[0].client.num_ranks
