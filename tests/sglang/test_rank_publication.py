"""The trainer's ranks publish themselves: what servers get, and what happens to lost servers."""

import asyncio
import hashlib
import os
import signal
from dataclasses import replace

import pytest
import torch

from areal_gym.config import TrainerConfig
from areal_gym.engines.servers.fake_tensors import read_weights
from areal_gym.engines.sglang import SGLangEngine
from areal_gym.engines.weight_relay import WeightRelay
from areal_gym.errors import EngineError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint, weight_files
from areal_gym.testing.engine_contract import EnginePolicies, check_engine
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.parallel.worker import ProcessTrainer
from areal_gym.trainer.trainer import Trainer
from areal_gym.trainer.weight_sync.base import update_session
from areal_gym.trainer.weight_sync.disk import WriteFiles
from areal_gym.trainer.weight_sync.rank_tasks import TrainerWeights
from areal_gym.trainer.weight_sync.tensor import _Post, _Routes
from tests._support.engines_under_test import RULES_OF_WORKERS, SERVED_SGLANG, served
from tests._support.long_tests import skip_long_if_real
from tests._support.sglang_processes import running_server
from tests._support.sglang_suite import ask, checksums, engine_over, sync_of
from tests._support.tiny_training import batch

CHANNELS = [
    ("disk", {"file_mb": 0.05}),
    ("tensor", {"bucket_mb": 0.05}),
    ("distributed", {"bucket_mb": 0.05}),
]


@pytest.fixture(scope="module")
def two_ranks(policies):
    trainer = ProcessTrainer(
        Trainer,
        policies[0],
        TrainerConfig(lr=1e-2, num_ranks=2),
        advantage=grpo,
        loss=ppo_clip,
    )
    yield trainer
    trainer.close()


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize(("id", "kwargs"), CHANNELS)
def test_ranks_publish_bit_for_bit_what_one_process_publishes(
    server, policies, two_ranks, tmp_path, id, kwargs, dtype
):
    def collected():  # the process that drives the run must not hold the weights
        raise AssertionError("the weights came to this process")

    async def play():
        async with engine_over(policies[0], server) as engine:
            plain = sync_of(engine, "disk", tmp_path / "plain", dtype=dtype)
            sync = sync_of(engine, id, tmp_path / "weights", dtype=dtype, **kwargs)
            for version in (1, 3):
                two_ranks.step(batch(version), version)
                await plain.publish(dict(two_ranks.weights()).items(), version)
                expected = await checksums(server)
                await plain.publish(load_checkpoint(policies[1]).state_dict().items(), version)
                assert expected is None or expected != await checksums(server)
                weights, two_ranks.weights = two_ranks.weights, collected
                try:
                    await sync.publish(TrainerWeights(two_ranks), version + 1)
                finally:
                    two_ranks.weights = weights
                assert set((await ask(engine)).versions) == {version + 1}
                assert await checksums(server) == expected
            await sync.aclose()
            await plain.aclose()

    asyncio.run(play())


def test_delta_gives_servers_the_same_bits(server, policies, two_ranks, tmp_path):
    async def play():
        async with (
            engine_over(policies[0], server) as engine,
            WeightRelay(tmp_path / "relay") as relay,
        ):
            plain = sync_of(engine, "disk", tmp_path / "plain", dtype="bfloat16")
            port = int(relay.url.rpartition(":")[2])
            sync = sync_of(engine, "delta", tmp_path / "unused", relay_port=port)
            for version in (1, 3, 5):
                two_ranks.step(batch(version), version)
                await plain.publish(dict(two_ranks.weights()).items(), version)
                expected = await checksums(server)
                await plain.publish(load_checkpoint(policies[1]).state_dict().items(), version)
                assert expected is None or expected != await checksums(server)
                await sync.publish(TrainerWeights(two_ranks), version + 1)
                assert set((await ask(engine)).versions) == {version + 1}
                assert await checksums(server) == expected
                if version == 1:
                    assert sync.last.num_changed == sync.last.num_weights
                    assert len(list(relay.directory.glob("part-*"))) == 2  # one of each rank
                else:
                    assert 0 < sync.last.num_changed < sync.last.num_weights
            await plain.aclose()

    asyncio.run(play())


def test_server_of_two_workers_gets_its_weights_by_every_channel(
    kind, policies, tmp_path, monkeypatch
):
    """Each worker of a server with tensor parallelism takes its part of each tensor.

    The engine over such a server keeps the contract, too.
    """
    skip_long_if_real(kind)
    if kind == "fake":
        pytest.skip("the stand-in is one worker")
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # else it wants a NUMA node for each
    weights = load_checkpoint(policies[1]).state_dict()

    async def play(url):
        async with (
            engine_over(policies[0], url) as engine,
            WeightRelay(tmp_path / "relay") as relay,
        ):
            assert engine.servers[0].client.num_ranks == 2
            port = int(relay.url.rpartition(":")[2])
            base = sync_of(engine, "disk", tmp_path / "disk", dtype="bfloat16")
            await base.publish(weights.items(), 1)
            expected = await checksums(url)
            values, delta = {"handles": False}, {"relay_port": port}
            channels = [*CHANNELS[1:], ("tensor", values), ("delta", delta)]
            for version, (id, kwargs) in enumerate(channels, start=1):
                await base.publish(load_checkpoint(policies[0]).state_dict().items(), 2 * version)
                assert await checksums(url) != expected
                sync = sync_of(engine, id, tmp_path / id, dtype="bfloat16", **kwargs)
                await sync.publish(weights.items(), 2 * version + 1)
                assert await checksums(url) == expected
                await sync.aclose()
            await base.aclose()

    pair = EnginePolicies(first=policies[0], second=policies[1])
    syncs = ("disk", "tensor", "distributed")
    with running_server(kind, policies[0], tmp_path / "two.log", "--tp-size", "2") as (url, _):
        asyncio.run(play(url))
        for rule in RULES_OF_WORKERS:
            abilities = replace(SERVED_SGLANG[kind], weight_syncs=syncs)
            check_engine(rule, served(SGLangEngine, url), pair, abilities)


class PostByRank(_Post):
    """Sends handles of the second rank's memory, as where the server's worker is on its GPU."""

    def _routes(self, side):
        return _Routes(num_workers={self.urls[0]: 1}, by_gpu={self.urls[0]: [1]})


def test_each_worker_gets_the_handles_of_the_rank_beside_it(kind, server, policies, two_ranks):
    if kind == "real":
        pytest.skip("only the choice of the rank differs, which the stand-in shows")

    async def play():
        async with engine_over(policies[0], server) as engine:
            for version in (1, 2):
                two_ranks.step(batch(version), version)
                async with engine.updating(version) as servers, update_session(servers, version):
                    task = PostByRank((server,), version, 20_000, None, os.getpid())
                    assert await asyncio.to_thread(two_ranks.run_in_ranks, task) == []
                rows = {name: tensor.float() for name, tensor in two_ranks.weights()}
                digests = {
                    name: hashlib.sha256(row.contiguous().numpy().tobytes()).hexdigest()[:16]
                    for name, row in rows.items()
                }
                assert await checksums(server) == digests

    asyncio.run(play())


def test_files_are_divided_among_the_ranks(policies, two_ranks, tmp_path):
    two_ranks.run_in_ranks(WriteFiles(tmp_path / "written", torch.bfloat16, 50_000))
    assert len(weight_files(tmp_path / "written")) > 2
    written, expected = read_weights(tmp_path / "written"), dict(two_ranks.weights())
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(written[name], tensor.bfloat16())
    assert [path.name for path in tmp_path.iterdir()] == ["written"]


@pytest.mark.parametrize("id", [pytest.param("tensor", marks=pytest.mark.long), "distributed"])
def test_server_lost_during_a_transfer_does_not_stop_the_others(
    server, spare, policies, tmp_path, id
):
    weights = load_checkpoint(policies[1]).state_dict()
    other, process = spare.started()

    class Killing:
        """Weights that are gathered twice; the first time, a server dies half-way."""

        def __iter__(self):
            for number, item in enumerate(weights.items()):
                if number == len(weights) // 2 and process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                yield item

    async def play():
        async with engine_over(policies[0], server, other) as engine:
            sync = sync_of(engine, id, tmp_path / "weights", bucket_mb=0.02)
            await sync.publish(weights.items(), 1)
            assert len([state for state in engine.servers if state.is_serving]) == 2
            await sync.publish(Killing(), 2)
            assert [s.client.url for s in engine.servers if s.is_serving] == [server]
            assert set((await ask(engine)).versions) == {2}
            port = int(other.rpartition(":")[2])
            await asyncio.to_thread(spare.started, port)
            async with asyncio.timeout(60):  # it is back, with other weights
                while not engine.servers[1].is_outdated:
                    await asyncio.sleep(0.05)
            await sync.publish(weights.items(), 3)
            assert len([state for state in engine.servers if state.is_serving]) == 2
            assert await checksums(server) == await checksums(other)
            await sync.aclose()

    asyncio.run(play())


def test_group_that_does_not_form_is_described(server, spare, policies, two_ranks, tmp_path):
    other, process = spare.started()

    async def play():
        async with engine_over(policies[0], other) as engine:
            sync = sync_of(engine, "distributed", tmp_path, timeout_s=0.001)
            with pytest.raises(EngineError, match=r"gloo group of 2 ranks at 127.0.0.1:\d+") as got:
                await sync.publish(TrainerWeights(two_ranks), 1)
            assert "within 0.001 s" in str(got.value)
            assert f"rank 1 ({other})" in str(got.value)
            assert engine.policy_version == 0
        # SGLang has no time-out for this: a server that was late waits for rank 0 for minutes.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        async with engine_over(policies[0], server) as engine:  # the trainer is well
            disk = sync_of(engine, "disk", tmp_path / "weights")
            await disk.publish(TrainerWeights(two_ranks), 2)
            assert set((await ask(engine)).versions) == {2}
            await disk.aclose()

    asyncio.run(play())
