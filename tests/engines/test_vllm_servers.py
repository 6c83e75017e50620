"""Servers of vLLM that are started wrongly, die, return with old weights, or load wrong ones."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from areal_gym.config import load_config
from areal_gym.engines.embedded import EmbeddedEngine
from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.engines.sglang import FakeSGLangServer
from areal_gym.engines.vllm import FakeVLLMServer, VLLMEngine
from areal_gym.engines.vllm.fake_transfer import FakeTransfer
from areal_gym.errors import ConfigError, EngineError, EngineUnreachableError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint, save_checkpoint
from areal_gym.runs.train import train
from tests._support.sglang_servers import ask, count, counted, until

POLICY = Path("policy")


def scripted(latency_s=0.0, **options):
    return FakeVLLMServer(ScriptedEngine(count, latency_s=latency_s), **options)


def embedded(policy, **options):
    engine = EmbeddedEngine.from_checkpoint(policy, max_context=128)
    return FakeVLLMServer(engine, model_path=str(policy), **options)


@asynccontextmanager
async def serving(*servers, policy=POLICY, **options):
    """Run fake servers and an engine over them."""
    settings = {"grace_s": 0.3, "health_interval_s": 0.05, **options}
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        engine = VLLMEngine(policy, urls=[server.url for server in servers], **settings)
        stack.push_async_callback(engine.aclose)
        await engine.start()
        yield engine


async def publish(engine, version, directory):
    async with engine.updating(version) as servers:
        for server in servers:
            await server.load_from_disk(directory, version)


async def restart(server):
    """End a server and start it again, with the weights of its model."""
    await server.die()
    server.version = "default"
    await server.start()


@pytest.mark.parametrize(
    ("lacks", "remedy"),
    [
        ("dev mode", "VLLM_SERVER_DEV_MODE=1"),
        ("scale out", "--enable-scale-out"),
        ("extension", "--worker-extension-cls areal_gym_weights.WeightLoader"),
    ],
)
def test_missing_routes_are_named_with_what_enables_them(lacks, remedy):
    async def scenario():
        with pytest.raises(ConfigError, match=r"vLLM 0\.32\.0 at http") as caught:
            async with serving(scripted(lacks=[lacks])):
                pass
        assert any(remedy in hint for hint in caught.value.hints)
        assert any("vllm serve policy --host 127.0.0.1" in hint for hint in caught.value.hints)

    asyncio.run(scenario())


def test_another_kind_of_server_is_named():
    async def scenario():
        async with FakeSGLangServer(ScriptedEngine(count)) as server:
            engine = VLLMEngine(POLICY, urls=[server.url])
            with pytest.raises(ConfigError, match="is not a vLLM server"):
                await engine.start()
            await engine.aclose()

    asyncio.run(scenario())


def test_raw_logprobs_are_refused_unless_the_temperature_is_1():
    async def scenario():
        async with serving(scripted(logprobs_mode="raw_logprobs")) as engine:
            assert (await ask(engine)).token_ids == counted(2, 20)
            with pytest.raises(ConfigError, match=r"of temperature 1, and .* sampled at 0\.7"):
                await ask(engine, temperature=0.7)

    asyncio.run(scenario())


def test_requests_of_a_dead_server_move_to_another():
    async def scenario():
        servers = [scripted(latency_s=0.02), scripted(latency_s=0.02)]
        async with serving(*servers) as engine:
            turns = [asyncio.create_task(ask(engine, 60, session=f"{i}")) for i in range(4)]
            await until(lambda: all(server.num_running == 2 for server in servers))
            await servers[0].die()
            assert [turn.token_ids for turn in await asyncio.gather(*turns)] == [counted(2, 60)] * 4
            assert engine.stats.num_servers_lost == 1
            assert engine.stats.num_moved == 2

    asyncio.run(scenario())


def test_server_that_returns_with_old_weights_gets_the_new_ones_before_it_serves(tiny_policy):
    async def scenario():
        server = embedded(tiny_policy)
        async with serving(server, policy=tiny_policy, grace_s=10) as engine:
            await publish(engine, 1, tiny_policy)
            await restart(server)
            assert set((await ask(engine)).versions) == {1}
            assert server.version == "1"

    asyncio.run(scenario())


def test_server_that_returns_without_files_to_load_waits_for_the_next_publication(tiny_policy):
    async def scenario():
        server = embedded(tiny_policy)
        async with serving(server, policy=tiny_policy) as engine:
            async with engine.updating(1) as clients:
                await clients[0].load_from_disk(tiny_policy, 1, is_kept=False)
            await restart(server)
            with pytest.raises(EngineUnreachableError, match="version 1"):
                await ask(engine)
            assert engine.needs_weights
            await publish(engine, 2, tiny_policy)
            assert set((await ask(engine)).versions) == {2}

    asyncio.run(scenario())


class OwnServer:
    """A server that the engine starts and ends, in this process."""

    def __init__(self, server):
        self.server, self.num_starts, self.is_running = server, 0, False
        self.log = Path("log")

    @property
    def url(self):
        return self.server.url

    async def start(self):
        await restart(self.server)
        self.num_starts, self.is_running = self.num_starts + 1, True

    async def aclose(self):
        await self.server.die()
        self.is_running = False

    def last_lines(self, limit=20):
        return []


async def tear_update(engine, version, directory):
    """Begin an update, and leave it before its end."""
    async with engine.updating(version) as clients:
        await clients[0].begin_update()
        update = {"update_info": {"directory": str(directory)}}
        await clients[0].post("/update_weights", update, timeout_s=10)
        await clients[0].abandon_update()


def test_server_whose_update_was_torn_is_restarted_with_the_newest_weights(tiny_policy):
    async def scenario():
        server = embedded(tiny_policy)
        async with server:
            own = OwnServer(server)
            engine = VLLMEngine(tiny_policy, processes=[own], grace_s=10, health_interval_s=0.05)
            await engine.start()
            await publish(engine, 1, tiny_policy)
            with pytest.raises(EngineError, match="no server reports version 2"):
                await tear_update(engine, 2, tiny_policy)
            assert engine.servers[0].is_serving is False
            assert set((await ask(engine)).versions) == {1}
            assert own.num_starts == 2
            await engine.aclose()

    asyncio.run(scenario())


class Careless(FakeTransfer):
    """A loader that answers with success, and has loaded nothing."""

    async def load_directory(self, directory):
        return 1


def test_wrong_weights_behind_a_success_are_found_by_the_probe(tiny_policy, shaped_env, tmp_path):
    decoder = load_checkpoint(tiny_policy)
    for parameter in decoder.parameters():
        parameter.data.mul_(1.5)
    other = save_checkpoint(decoder, tmp_path / "other", tokenizer_dir=tiny_policy)

    class Server(FakeVLLMServer):
        def forget_weights(self):
            super().forget_weights()
            self._transfer = Careless(self)

    async def serve(started, ended):
        engine = EmbeddedEngine.from_checkpoint(other, max_context=128)
        async with Server(engine, model_path=str(other)) as server:
            started.set_result(server.url)
            await ended.wait()

    async def scenario():
        started, ended = asyncio.get_running_loop().create_future(), asyncio.Event()
        task = asyncio.create_task(serve(started, ended))
        config = load_config(
            overrides=[
                *(f"engine.model={tiny_policy}", "env.id=shaped", "engine.id=vllm"),
                *(f"engine.url={await started}", "engine.kwargs.take_over=true"),
                *("engine.max_context=128", "rollout.max_new_tokens=8", "steps=1"),
                *("rollout.group_size=2", "rollout.batch_groups=1", "eval.num_tasks=1"),
            ]
        )
        try:
            with pytest.raises(ConfigError, match="log-probabilities"):
                await asyncio.to_thread(train, config, run_dir=tmp_path / "run")
        finally:
            ended.set()
            await task

    asyncio.run(scenario())
