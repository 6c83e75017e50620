"""Models that transformers runs in the trainer, published into the real SGLang."""

import asyncio
import shutil

import pytest

from areal_gym.config import LoraConfig, PluginConfig
from areal_gym.models.hf.hf_loading import build_policy
from areal_gym.trainer.weight_sync import make_weight_sync
from tests._support.sglang_processes import NEEDS_REAL, running_server
from tests._support.sglang_suite import TOLERANCE, ask, engine_over, logprob_gap
from tests._support.tiny_architectures import tiny_config

pytestmark = [NEEDS_REAL, pytest.mark.long]


def saved(directory, tokenizer_dir, name, seed):
    """Save a checkpoint with a tokenizer; return its policy and directory."""
    facts = {"vocab_size": 264, "eos_token_id": 2}
    policy = build_policy(tiny_config(name, **facts), seed=seed)
    policy.network.save_pretrained(directory)
    for file in (*tokenizer_dir.glob("tokenizer*"), *tokenizer_dir.glob("*.jinja")):
        shutil.copy(file, directory)
    return policy, directory


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])  # dense, not tied; experts, fused in ours
def test_server_computes_what_the_trainer_publishes(name, policies, tmp_path):
    old, directory = saved(tmp_path / "old", policies[0], name, seed=0)
    new, _ = saved(tmp_path / "new", policies[0], name, seed=1)

    async def play(url):
        async with engine_over(directory, url) as engine:
            assert logprob_gap(old, await ask(engine)) < TOLERANCE
            for version, channel in enumerate(("disk", "tensor", "distributed"), start=1):
                settings = PluginConfig(id=channel)
                sync = make_weight_sync(
                    engine, settings, directory=tmp_path / "weights", lora=LoraConfig()
                )
                policy, other = (new, old) if version % 2 else (old, new)
                await sync.publish(policy.published(), version)
                generation = await ask(engine)
                assert set(generation.versions) == {version}
                assert logprob_gap(policy, generation) < TOLERANCE
                assert logprob_gap(other, generation) > 0.1
                await sync.aclose()

    log = tmp_path / "server.log"
    with running_server("real", directory, log) as (url, _):
        asyncio.run(play(url))
