"""Weight publication over disk, tensor and distributed channels, also within turns."""

import asyncio

import pytest
import torch

from areal_gym.errors import EngineError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint
from areal_gym.models.tiny.decoder import build_decoder
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.trainer.weight_sync.base import update_session
from areal_gym.trainer.weight_sync.flat_buckets import flat_buckets
from areal_gym.trainer.weight_sync.pickled_buckets import encoded
from tests._support.long_tests import skip_long_if_real
from tests._support.sglang_processes import running_server
from tests._support.sglang_suite import (
    PROMPT,
    TOLERANCE,
    ask,
    checksums,
    engine_over,
    is_ascending,
    logprob_gap,
    sync_of,
    turns_in_flight,
)

CHANNELS = [  # the contract has each with its defaults
    ("disk", {"dtype": "bfloat16"}),
    ("tensor", {"bucket_mb": 0.05, "handles": False}),
    ("distributed", {"bucket_mb": 0.05}),
]


@pytest.mark.parametrize(("id", "kwargs"), CHANNELS)
def test_server_samples_with_the_published_weights(
    server, policies, decoders, tmp_path, id, kwargs
):
    # bfloat16 rounds the weights, and with them the log-probabilities.
    tolerance = 0.2 if "dtype" in kwargs else TOLERANCE

    async def play():
        async with engine_over(policies[0], server) as engine:
            sync = sync_of(engine, id, tmp_path / "weights", **kwargs)
            seen = []
            for version in (1, 2, 3):
                decoder = decoders[version % 2]
                await sync.publish(decoder.state_dict().items(), version)
                assert engine.policy_version == version
                generation = await ask(engine)
                assert set(generation.versions) == {version}
                assert logprob_gap(decoder, generation) < tolerance
                assert logprob_gap(decoders[1 - version % 2], generation) > 1
                assert await engine.servers[0].reported_version() == version
                seen.append(await checksums(server))
            assert seen[0] == seen[2]
            assert seen[0] != seen[1] or seen[0] is None
            await sync.aclose()

    asyncio.run(play())


async def load_from(engine, directory, version):
    async with engine.updating(version) as servers:
        for server in servers:
            await server.load_from_disk(directory, version)


async def send_and_break_off(engine, bucket):
    async with engine.updating(2) as servers, update_session(servers, 2) as alive:
        body = {
            "serialized_named_tensors": [b"".join(encoded(bucket)).decode()],
            "load_format": "flattened_bucket",
        }
        await alive[0].post("/update_weights_from_tensor", body, timeout_s=60)
        raise EngineError("the connection is cut")


def test_refused_publication_keeps_the_old_weights(server, policies, decoders, tmp_path):
    async def play():
        async with engine_over(policies[0], server) as engine:
            sync = sync_of(engine, "disk", tmp_path / "weights")
            await sync.publish(decoders[1].state_dict().items(), 4)
            with pytest.raises(EngineError, match="refused"):
                await load_from(engine, tmp_path / "nowhere", 5)
            assert engine.policy_version == 4
            generation = await ask(engine)
            assert set(generation.versions) == {4}
            assert logprob_gap(decoders[1], generation) < TOLERANCE
            await sync.aclose()

    asyncio.run(play())


def test_broken_transfer_is_never_sampled_with(server, policies, decoders, tmp_path):
    async def play():
        async with engine_over(policies[0], server) as engine:
            disk = sync_of(engine, "disk", tmp_path / "weights")
            await disk.publish(decoders[0].state_dict().items(), 1)
            first = next(flat_buckets(decoders[1].state_dict().items(), 50_000))
            with pytest.raises(EngineError, match="cut"):
                await send_and_break_off(engine, first)
            # It holds neither 1 nor 2; before it serves again it gets version 1.
            generation = await ask(engine)
            assert set(generation.versions) == {1}
            assert logprob_gap(decoders[0], generation) < TOLERANCE
            await disk.publish(decoders[1].state_dict().items(), 3)
            generation = await ask(engine)
            assert set(generation.versions) == {3}
            assert logprob_gap(decoders[1], generation) < TOLERANCE
            await disk.aclose()

    asyncio.run(play())


def random_adapter(policy, rank=4, seed=0):
    """An adapter that clearly changes what is sampled, under peft's names."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, matrix in load_checkpoint(policy).state_dict().items():
        if name.endswith("_proj.weight"):
            stem = "base_model.model." + name.removesuffix(".weight")
            out_size, in_size = matrix.shape
            down = torch.randn(rank, in_size, generator=generator)
            up = torch.randn(out_size, rank, generator=generator)
            weights[f"{stem}.lora_A.weight"] = 0.2 * down
            weights[f"{stem}.lora_B.weight"] = 0.2 * up
    return weights


def merged_decoder(policy, adapter, alpha, rank=4):
    decoder = load_checkpoint(policy)
    state = decoder.state_dict()
    for name, down in adapter.items():
        if name.endswith(".lora_A.weight"):
            target = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            up = adapter[name.replace(".lora_A.", ".lora_B.")]
            state[target] = state[target] + alpha / rank * up @ down
    decoder.load_state_dict(state)
    return decoder


def test_lora_adapters_are_policy_versions(server, policies, decoders, tmp_path):
    async def play():
        async with engine_over(policies[0], server) as engine:
            base = sync_of(engine, "disk", tmp_path / "weights")
            await base.publish(decoders[0].state_dict().items(), 0)
            sync = sync_of(engine, "lora", tmp_path / "adapters", alpha=8.0)
            [running] = await turns_in_flight(engine, 1, 200)
            for version in (1, 2):
                adapter = random_adapter(policies[0], seed=version)
                await sync.publish(adapter.items(), version)
                assert engine.adapter == f"policy-v{version}"
                generation = await ask(engine)
                assert set(generation.versions) == {version}
                decoder = merged_decoder(policies[0], adapter, 8.0)
                assert logprob_gap(decoder, generation) < 1e-3
                assert logprob_gap(decoders[0], generation) > 0.05
            assert is_ascending((await running).versions)
            # Only the newest is kept, on the server and on the disk.
            assert [path.name for path in (tmp_path / "adapters").iterdir()] == ["policy-v2"]
            answer = await engine.servers[0].client.post(
                "/unload_lora_adapter", {"lora_name": "policy-v2"}
            )
            assert not {"policy-v1", "policy-v2"} & set(answer["loaded_adapters"])
            await sync.aclose()
            await base.aclose()

    asyncio.run(play())


def test_publication_reaches_two_servers(server, spare, policies, decoders, tmp_path):
    async def play(other):
        async with engine_over(policies[0], server, other) as engine:
            for version, id in enumerate(("disk", "tensor", "distributed"), start=1):
                sync = sync_of(engine, id, tmp_path / id)
                decoder = decoders[version % 2]
                await sync.publish(decoder.state_dict().items(), version)
                generations = await asyncio.gather(
                    *(
                        engine.generate(PROMPT, _params(), session=f"{version}-{i}")
                        for i in range(8)
                    )
                )
                assert all(set(generation.versions) == {version} for generation in generations)
                assert all(
                    logprob_gap(decoder, generation) < TOLERANCE for generation in generations
                )
                await sync.aclose()

    asyncio.run(play(spare.started()[0]))


def _params():
    from areal_gym.engines.base import SamplingParams

    return SamplingParams(max_new_tokens=16)


def test_weights_of_another_shape_are_never_served(kind, policies, tmp_path):
    """The real server does not survive such weights, so this test starts its own server."""
    skip_long_if_real(kind)
    config = DecoderConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
    )

    async def play(url):
        async with engine_over(policies[0], url, grace_s=0.5) as engine:
            sync = sync_of(engine, "disk", tmp_path / "weights")
            with pytest.raises(EngineError):
                await sync.publish(build_decoder(config, seed=0).state_dict().items(), 1)
            assert engine.policy_version == 0

    with running_server(kind, policies[0], tmp_path / "server.log") as (url, _):
        asyncio.run(play(url))
