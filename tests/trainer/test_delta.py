"""Relays get what has changed, or all of it when they have another base; never half of it."""

import asyncio
import re
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_gym.config import PluginConfig
from areal_gym.engines.weight_relay import WeightRelay
from areal_gym.errors import ConfigError, EngineError, EngineUnreachableError
from areal_gym.trainer.weight_sync import make_weight_sync
from areal_gym.trainer.weight_sync.rank_posts import Body, request
from tests._support.sglang_servers import ask, fake, serving


def random_weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(40, 12, generator=generator),
        "layer.weight": torch.randn(12, 12, generator=generator),
        "layer.bias": torch.randn(12, generator=generator),
        "layer.scale": torch.randn((), generator=generator),
        "router.count": torch.arange(5),
        "router.is_on": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
    }


def changed(weights):
    new = {name: tensor.clone() for name, tensor in weights.items()}
    new["embed.weight"][3, 4] += 1.0
    new["layer.bias"][-1] = float("nan")
    new["router.count"][0] = -1
    return new


def in_files(relay):
    tensors = {}
    for file in sorted(relay.directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same(found, weights):
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert found[name].dtype == expected.dtype
        assert found[name].shape == expected.shape
        ours, theirs = (each.flatten().view(torch.uint8) for each in (found[name], expected))
        assert torch.equal(ours, theirs), name


class TakesAll:
    """An engine behind the fake server that notes the weights it is given."""

    def __init__(self, engine):
        self.engine = engine
        self.weights = {}

    def __getattr__(self, name):
        return getattr(self.engine, name)

    async def publish(self, weights, version):
        self.weights = dict(weights)


@asynccontextmanager
async def publishing(tmp_path, **kwargs):
    server = fake()
    server.engine = TakesAll(server.engine)
    async with WeightRelay(tmp_path / "relay") as relay, serving(server) as engine:
        port = int(relay.url.rpartition(":")[2])
        settings = PluginConfig(id="delta", kwargs={"relay_port": port, **kwargs})
        yield relay, server, engine, make_weight_sync(engine, settings, directory=tmp_path / "w")


def test_only_changes_are_sent_after_the_first_time(tmp_path):
    async def scenario():
        async with publishing(tmp_path) as (relay, server, engine, sync):
            old = random_weights()
            await sync.publish(old.items(), 1)
            assert_same(in_files(relay), old)
            whole = sync.last.num_bytes[relay.url]
            new = changed(old)
            await sync.publish(new.items(), 2)
            assert sync.last.num_changed == 3
            assert sync.last.num_bytes[relay.url] < whole / 2
            assert_same(in_files(relay), new)
            assert_same(server.engine.weights, new)
            assert server.version == "2"
            await sync.publish(new.items(), 3)
            assert sync.last.num_changed == 0
            assert set((await ask(engine)).versions) == {3}

    asyncio.run(scenario())


def test_all_weights_are_sent_every_so_often(tmp_path):
    async def scenario():
        async with publishing(tmp_path, full_every=3) as (relay, _, _, sync):
            sizes, weights = [], random_weights()
            for version in range(1, 8):
                await sync.publish(weights.items(), version)
                sizes.append(sync.last.num_bytes[relay.url])
                weights = changed(weights)
            is_whole = [size == sizes[0] for size in sizes]
            assert is_whole == [True, False, False, True, False, False, True]

    asyncio.run(scenario())


def test_relay_that_was_restarted_gets_all(tmp_path):
    async def scenario():
        async with publishing(tmp_path) as (relay, server, engine, sync):
            weights = random_weights()
            await sync.publish(weights.items(), 1)
            port = int(relay.url.rpartition(":")[2])
            await relay.__aexit__()
            with pytest.raises(EngineUnreachableError, match="no relay takes the weights") as got:
                await sync.publish(changed(weights).items(), 2)
            assert any("areal_gym.engines.weight_relay" in hint for hint in got.value.hints)
            assert engine.policy_version == 1
            async with WeightRelay(tmp_path / "relay", port=port) as again:
                await sync.publish(changed(weights).items(), 2)
                assert_same(in_files(again), changed(weights))
                assert_same(server.engine.weights, changed(weights))
                assert set((await ask(engine)).versions) == {2}

    asyncio.run(scenario())


def test_damaged_files_of_a_relay_are_noticed_and_repaired(tmp_path):
    async def scenario():
        async with publishing(tmp_path) as (relay, _, _, sync):
            old = random_weights()
            await sync.publish(old.items(), 1)
            damaged = in_files(relay)
            damaged["embed.weight"][0, 0] += 1
            save_file(damaged, relay.directory / "part-00000.safetensors")
            new = changed(old)
            with pytest.raises(EngineError, match=r"embed\.weight .* its checksum differs"):
                await sync.publish(new.items(), 2)
            await asyncio.sleep(0.1)
            await sync.publish(new.items(), 3)
            assert_same(in_files(relay), new)

    asyncio.run(scenario())


def test_server_that_missed_a_version_gets_the_next_one(tmp_path):
    async def scenario():
        async with publishing(tmp_path) as (_, server, engine, sync):
            weights = random_weights()
            await sync.publish(weights.items(), 1)
            await server.die()
            server.version = "default"
            server.engine.weights = {}
            with pytest.raises(EngineError):
                await sync.publish(changed(weights).items(), 2)
            await server.start()
            async with asyncio.timeout(5):
                while not engine.needs_weights:
                    await asyncio.sleep(0.02)
            await sync.publish(changed(weights).items(), 2)
            assert sync.last.num_changed == 0  # the relay has them already
            assert_same(server.engine.weights, changed(weights))
            assert set((await ask(engine)).versions) == {2}

    asyncio.run(scenario())


def test_incomplete_publications_have_no_base(tmp_path):
    async def scenario():
        async with WeightRelay(tmp_path / "relay") as relay:

            def post(route, **content):
                body = Body.of_json(content)
                return asyncio.to_thread(request, "POST", relay.url, route, body, timeout_s=5)

            with pytest.raises(EngineError, match="has the weights None"):
                await post("/weights/begin", id="b", base="a")
            await post("/weights/begin", id="a")
            with pytest.raises(EngineError, match=r"parts \[0, 1\] have not arrived"):
                await post("/weights/commit", id="a", num_parts=2)
            with pytest.raises(EngineError, match="not the one that has begun"):
                await post("/weights/commit", id="b", num_parts=1)
            for query in ("", "?id=a&number=0&kind=half", "?id=a&number=x&kind=whole"):
                with pytest.raises(EngineError, match="refused"):
                    await post(f"/weights/part{query}")
            with pytest.raises(EngineError, match="the header is incomplete"):
                await post("/weights/part?id=a&number=0&kind=changes", tensors=[])

    asyncio.run(scenario())


def test_relay_refuses_a_directory_with_other_weights(tmp_path):
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has other weights: model\.safetensors"):
        WeightRelay(tmp_path)


def test_relay_is_a_program(tmp_path):
    command = [sys.executable, "-m", "areal_gym.engines.weight_relay", "--port", "0"]
    with subprocess.Popen(
        [*command, "--directory", tmp_path / "new"], stdout=subprocess.PIPE, text=True
    ) as process:
        line = process.stdout.readline().strip()
        url = re.search(r"changes at (http://127.0.0.1:\d+)$", line)[1]
        state = request("GET", url, "/weights", timeout_s=5)
        assert state == {"id": None, "directory": str(tmp_path / "new")}
        process.terminate()
        assert process.wait(20) == 0
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    refused = subprocess.run(
        [*command, "--directory", tmp_path], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "has other weights" in refused.stderr
    assert "--directory DIR" in refused.stderr


def test_settings_that_make_no_sense_are_refused(tmp_path):
    async def scenario():
        async with serving(fake()) as engine:
            for kwargs in ({"full_every": 0}, {"dtype": "int8"}):
                settings = PluginConfig(id="delta", kwargs=kwargs)
                with pytest.raises(ConfigError, match=next(iter(kwargs))):
                    make_weight_sync(engine, settings, directory=tmp_path)

    asyncio.run(scenario())
