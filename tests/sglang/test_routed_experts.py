"""Servers tell the experts of tokens; what they tell is what the trainer's routers choose."""

import asyncio
import json
import shutil
import sys

import pytest
import torch

from areal_gym.config import load_config
from areal_gym.engines.base import SamplingParams
from areal_gym.errors import ConfigError
from areal_gym.models.hf.hf_loading import build_policy
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.replay import replay
from areal_gym.runs.train import train
from areal_gym.trainer.batch.bins import Row
from areal_gym.trainer.batch.packing import pack
from areal_gym.types import RoutedExperts
from tests._support.long_tests import skip_long_if_real
from tests._support.routed import own_experts
from tests._support.sglang_processes import running_server
from tests._support.sglang_suite import PROMPT, TOLERANCE, ask, engine_over, logprob_gap
from tests._support.tiny_architectures import tiny_config

FLAG = "--enable-return-routed-experts"
SMALL = (
    *("env.id=math", "engine.id=sglang", "engine.max_context=256", "steps=2"),
    *("eval.num_tasks=2", "eval.every=0", "rollout.batch_groups=2", "rollout.group_size=4"),
    *("rollout.max_new_tokens=12", "rollout.filters=[]", "trainer.advantage=reinforce"),
    *("trainer.lr=0.003", "trainer.weight_sync=disk", "trainer.entropy_bonus=1"),
)


@pytest.fixture(scope="module")
def mixture(policies, tmp_path_factory):
    """A Qwen3-MoE with the tokenizer of the other policies."""
    directory = tmp_path_factory.mktemp("mixture")
    vocab_size = json.loads((policies[0] / "config.json").read_text())["vocab_size"]
    policy = build_policy(tiny_config("qwen3_moe", vocab_size=vocab_size), seed=0)
    policy.network.save_pretrained(directory)
    for file in (*policies[0].glob("tokenizer*"), *policies[0].glob("*.jinja")):
        shutil.copy(file, directory)
    return policy, directory


@pytest.fixture(scope="module")
def telling(kind, mixture, tmp_path_factory):
    """The URL of a server that tells experts."""
    skip_long_if_real(kind)
    log = tmp_path_factory.mktemp("telling") / "server.log"
    with running_server(kind, mixture[1], log, FLAG) as (url, _):
        yield url


def chosen(policy, prompt, generation):
    """What the policy's routers choose for the sampled tokens."""
    rows = [Row(token_ids=[*prompt, *generation.token_ids])]
    return own_experts(policy, pack(rows))[len(prompt) - 1 : -1]


def told(generation):
    """The experts of each token and layer, [T, L, K], smallest first: their order is free."""
    experts = generation.routed_experts
    values = torch.frombuffer(bytearray(experts.data), dtype=torch.int16)
    return values.view(len(experts), experts.num_layers, experts.top_k).sort(-1).values


def test_servers_tell_the_experts_that_the_trainer_would_choose(telling, mixture):
    policy, directory = mixture

    async def play():
        async with engine_over(directory, telling) as engine:
            first = await ask(engine)
            assert logprob_gap(policy, first) < TOLERANCE
            assert len(first.routed_experts) == len(first.token_ids) == 32
            assert torch.equal(told(first), chosen(policy, PROMPT, first).sort(-1).values)
            # The next turn finds its beginning in the server's cache.
            prompt = [*PROMPT, *first.token_ids, 5, 6, 7]
            second = await ask(engine, 9, prompt)
            assert torch.equal(told(second), chosen(policy, prompt, second).sort(-1).values)
            params = SamplingParams(max_new_tokens=40, temperature=0.0)
            pieces = [piece async for piece in engine.stream(PROMPT, params, session="s")]
            assert len(pieces) > 1
            assert len(RoutedExperts.joined(piece.routed_experts for piece in pieces)) == 40

    asyncio.run(play())


def run_settings(directory, url, *more):
    return load_config(overrides=(f"engine.model={directory}", f"engine.url={url}", *SMALL, *more))


def test_a_run_replays_the_experts_of_its_servers(telling, mixture, tmp_path):
    config = run_settings(
        mixture[1], telling, "trainer.routing_replay=true", "engine.kwargs.take_over=true"
    )
    train(config, run_dir=tmp_path / "run")
    run = RunDir(tmp_path / "run")
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["train/router_agreement"] > 0.99 for row in rows)
    assert all(row["train/engine_gap"] < 1e-4 for row in rows)
    assert all(
        span.routed_experts.num_layers == 4
        for trajectory in run.read_trajectories(2)
        for span in trajectory.spans
        if span.origin == "policy"
    )
    # The journal has the experts as well.
    assert replay(load_config(run.config_file), run.path).is_identical


def test_a_server_that_tells_no_experts_is_refused_with_what_to_type(kind, mixture, tmp_path):
    if kind == "real":
        pytest.skip("the message is ours, and a start takes a minute")
    with running_server(kind, mixture[1], tmp_path / "server.log") as (url, _):
        config = run_settings(mixture[1], url, "trainer.routing_replay=true")
        with pytest.raises(ConfigError, match="does not report the experts") as caught:
            train(config, run_dir=tmp_path / "run")
        assert any(FLAG in hint for hint in caught.value.hints)
        train(run_settings(mixture[1], url, "steps=1"), run_dir=tmp_path / "without")
        (row,) = RunDir(tmp_path / "without").read_metrics()
        assert "train/router_agreement" not in row


def test_servers_that_a_run_starts_are_told_to_tell(kind, mixture, tmp_path):
    if kind == "real":
        pytest.skip("the flag is the same, and a start takes a minute")
    config = load_config(
        overrides=(
            *(f"engine.model={mixture[1]}", *SMALL, "steps=1", "trainer.routing_replay=true"),
            f"engine.kwargs.command={sys.executable} -m areal_gym.engines.sglang.fake",
            "engine.kwargs.server_args=--max-running-requests 8",
        )
    )
    train(config, run_dir=tmp_path / "run")
    (row,) = RunDir(tmp_path / "run").read_metrics()
    assert row["train/router_agreement"] > 0.99
