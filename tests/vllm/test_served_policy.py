"""Generation, publications and refusals: against the stand-in and the real vLLM."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch

from areal_gym.config import LoraConfig, PluginConfig
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.vllm import VLLMEngine
from areal_gym.errors import EngineError
from areal_gym.trainer.weight_sync.base import make_weight_sync
from tests._support.sglang_suite import (
    PROMPT,
    TOLERANCE,
    ask,
    logprob_gap,
)


@asynccontextmanager
async def engine_over(policy, *urls, **options):
    """Run an engine over servers; it begins with the weights of `policy` as version 0."""
    settings = {"max_context": 512, "health_interval_s": 0.2, **options}
    engine = VLLMEngine(policy, urls=urls, **settings)
    try:
        await engine.start()
        async with engine.updating(1) as servers:
            for server in servers:
                await server.load_from_disk(policy, 1)
        yield engine
    finally:
        await engine.aclose()


def sync_of(engine, id, directory, **kwargs):
    settings = PluginConfig(id=id, kwargs=kwargs)
    return make_weight_sync(engine, settings, directory=directory, lora=LoraConfig())


def test_streams_do_not_repeat_their_random_numbers(server, policies, decoders):
    async def play():
        async with engine_over(policies[0], server) as engine:
            params = SamplingParams(max_new_tokens=64, seed=7)
            return [piece async for piece in engine.stream(PROMPT, params)]

    pieces = asyncio.run(play())
    assert sum(len(piece.token_ids) for piece in pieces) == 64
    assert len({tuple(piece.token_ids) for piece in pieces}) == len(pieces) == 4


def test_tensors_are_broadcast_to_workers(server, policies, decoders):
    async def play():
        async with engine_over(policies[0], server) as engine:
            sync = sync_of(engine, "distributed", None, bucket_mb=0.1)
            gaps = []
            for version in (2, 3):
                decoder = decoders[(version + 1) % 2]
                await sync.publish(list(decoder.state_dict().items()), version)
                gaps.append(logprob_gap(decoder, await ask(engine)))
            await sync.aclose()
            return engine.policy_version, gaps

    version, gaps = asyncio.run(play())
    assert version == 3
    assert max(gaps) < TOLERANCE


def adapter_weights(decoder, rank=4):
    """Return an adapter of one layer under peft's names."""
    torch.manual_seed(3)
    weights = {}
    for name, tensor in decoder.state_dict().items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(rank, tensor.shape[1]) * 0.3
            weights[f"{stem}.lora_B.weight"] = torch.randn(tensor.shape[0], rank) * 0.3
    return weights


def test_adapters_are_versions(server, policies, decoders, tmp_path):
    async def play():
        async with engine_over(policies[0], server) as engine:
            sync = sync_of(engine, "lora", tmp_path)
            await sync.publish(adapter_weights(decoders[0]).items(), 2)
            adapted = await ask(engine)
            await sync.publish(adapter_weights(decoders[0]).items(), 3)
            again = await ask(engine)
            with pytest.raises(EngineError, match=r"refused|rank"):
                await sync.publish(adapter_weights(decoders[0], rank=16).items(), 4)
            engine.adapter = None
            return adapted, again, await ask(engine)

    adapted, again, base = asyncio.run(play())
    assert (set(adapted.versions), set(again.versions)) == ({2}, {3})
    assert logprob_gap(decoders[0], adapted) > 0.05
    assert logprob_gap(decoders[0], base) < TOLERANCE
