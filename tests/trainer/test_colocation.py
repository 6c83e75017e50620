"""A trainer that leaves its GPU to servers, and an engine whose servers are lost while asleep."""

from __future__ import annotations

import asyncio

import pytest
import torch

from areal_gym.config import TrainerConfig, load_config
from areal_gym.engines.base import LocalEngine, SamplingParams
from areal_gym.engines.embedded import EmbeddedEngine
from areal_gym.engines.sglang import SGLangEngine
from areal_gym.engines.sglang.fake import FakeSGLangServer
from areal_gym.engines.sglang.sglang_client import SGLangClient
from areal_gym.engines.vllm import FakeVLLMServer, VLLMEngine
from areal_gym.errors import ConfigError, EngineError
from areal_gym.models.tiny.checkpoint_files import save_checkpoint
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.algorithms.token_advantages import gae
from areal_gym.trainer.colocation import SharedGpus
from areal_gym.trainer.trainer import Trainer
from areal_gym.trainer.update import TrainerThread, WeightPublisher
from areal_gym.trainer.weight_sync.disk import DiskWeightSync
from areal_gym.trainer.weight_sync.tensor import TensorWeightSync
from tests._support.tiny_training import batch, tiny_decoder


def learner(reference, device="cpu"):
    config = TrainerConfig(advantage="gae", critic={"trunk": "own"}, kl={"coefficient": 0.1})
    decoder = tiny_decoder(0).to(device)
    return Trainer(decoder, config, advantage=gae, loss=ppo_clip, reference=reference)


def everything(trainer):
    """All tensors that a trainer keeps on its device."""
    for part in trainer._parts():
        if isinstance(part, torch.nn.Module):
            yield from part.parameters()
            yield from part.buffers()
        else:
            yield from part.states().values()


@pytest.fixture
def policy(tmp_path):
    return save_checkpoint(tiny_decoder(0), tmp_path / "policy")


def test_offloading_moves_everything(policy):
    trainer = learner(policy)
    trainer.step(batch(), 0)
    tensors = list(everything(trainer))
    assert len(tensors) > 7 * len(list(trainer.decoder.parameters()))
    # The only other device of a CPU is the one without memory.
    trainer._move(torch.device("meta"))
    assert {tensor.device.type for tensor in everything(trainer)} == {"meta"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_offloaded_trainer_goes_on_with_the_same_numbers(policy):
    device = torch.accelerator.current_accelerator()
    plain, moved = learner(policy, device), learner(policy, device)
    for step in range(3):
        moved.offload()
        assert {tensor.device.type for tensor in everything(moved)} == {"cpu"}
        moved.reload()
        ours, theirs = moved.step(batch(), step), plain.step(batch(), step)
        # Sums by atomic additions have no fixed order on GPUs.
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-6)


def test_server_that_dies_asleep_gets_the_weights_when_it_is_back(policy, tmp_path):
    trainer = learner(policy)

    async def play():
        engine = EmbeddedEngine.from_checkpoint(policy, max_context=64)
        assert isinstance(engine, LocalEngine)
        async with FakeSGLangServer(engine, model_path=str(policy)) as server:
            client = SGLangEngine(policy, urls=[server.url], health_interval_s=0.05, grace_s=0.1)
            await client.start()
            thread = TrainerThread()
            gpus = SharedGpus(trainer, thread.call, keeps_weights=False)
            gpus.share_with(client)
            sync = DiskWeightSync(client, directory=tmp_path / "weights")
            publisher = WeightPublisher(sync, trainer, client, 30.0, gpus)
            await publisher.begin_step()
            assert server.released == {"weights", "kv_cache"}
            await server.die()
            publication = asyncio.create_task(publisher.publish(1))
            await asyncio.sleep(0.3)
            assert not publication.done()
            assert not client.is_asleep  # so that it can be started again
            await server.start()
            await publication
            assert client.policy_version == 1
            await client.aclose()
            thread.close()

    asyncio.run(play())


@pytest.mark.parametrize("server_class", [FakeSGLangServer, FakeVLLMServer])
@pytest.mark.parametrize("keeps_weights", [True, False])
def test_servers_that_wake_up_without_a_publication_go_on(
    policy, tmp_path, server_class, keeps_weights
):
    """With the weights that they have kept, or those of their start, or those on the disk."""
    is_sglang = server_class is FakeSGLangServer
    engine_class = SGLangEngine if is_sglang else VLLMEngine

    async def play():
        engine = EmbeddedEngine.from_checkpoint(policy, max_context=64)
        async with server_class(engine, model_path=str(policy)) as server:
            client = engine_class(policy, urls=[server.url], grace_s=5.0)
            await client.start()
            sync = DiskWeightSync(client, directory=tmp_path / "weights")
            for version in (0, 1):
                if version:
                    await sync.publish(tiny_decoder(1).named_parameters(), version)
                await client.sleep(keeps_weights=keeps_weights)
                late = asyncio.create_task(client.generate([1, 2, 3], SamplingParams()))
                await asyncio.sleep(0.05)
                assert not late.done()
                await client.wake_up()
                assert set((await late).versions) == {version}
                assert client.stats.num_servers_lost == 0
            await client.aclose()

    asyncio.run(play())


def test_server_whose_weights_are_nowhere_waits_for_the_next_publication(policy):
    async def play():
        engine = EmbeddedEngine.from_checkpoint(policy, max_context=64)
        async with FakeSGLangServer(engine, model_path=str(policy)) as server:
            client = SGLangEngine(policy, urls=[server.url], grace_s=5.0)
            await client.start()
            sync = TensorWeightSync(client)
            await sync.publish(tiny_decoder(1).named_parameters(), 1)
            await client.sleep()
            await client.wake_up()
            assert client.needs_weights
            late = asyncio.create_task(client.generate([1, 2, 3], SamplingParams()))
            await sync.publish(tiny_decoder(2).named_parameters(), 2)
            assert set((await late).versions) == {2}
            await client.aclose()

    asyncio.run(play())


def test_servers_without_the_flag_are_refused_by_name(policy):
    class OnGpus(FakeSGLangServer):
        def _facts(self):
            return {**super()._facts(), "device": "cuda"}

    async def play():
        engine = EmbeddedEngine.from_checkpoint(policy, max_context=64)
        async with OnGpus(engine, model_path=str(policy)) as server:
            client = SGLangEngine(policy, urls=[server.url])
            await client.start()
            try:
                with pytest.raises(ConfigError, match="cannot release its memory") as caught:
                    client.require_sleep()
                assert "--enable-memory-saver" in caught.value.hints[0]
            finally:
                await client.aclose()

    asyncio.run(play())


def test_fake_server_ends_when_released_memory_is_used(policy):
    """As SGLang does: its scheduler ends by a failed assertion."""

    async def play():
        engine = EmbeddedEngine.from_checkpoint(policy, max_context=64)
        async with FakeSGLangServer(engine, model_path=str(policy)) as server:
            client = SGLangClient(server.url)
            await client.post("/release_memory_occupation", {"tags": ["kv_cache"]})
            with pytest.raises(EngineError, match="503"):
                await client.post("/release_memory_occupation", {"tags": ["kv_cache"]})
            await asyncio.sleep(0.1)
            with pytest.raises(EngineError, match="no answer"):
                await client.weight_version()
            await client.aclose()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ([], "no servers"),
        (["engine.id=sglang", "trainer.weight_sync=distributed"], "NCCL"),
    ],
)
def test_colocation_that_cannot_be_is_refused(settings, word):
    with pytest.raises(ConfigError, match=word):
        load_config(overrides=["env.id=math", "trainer.colocate=true", *settings])
