"""Servers of vLLM that are started wrongly, die, return with old weights, or load wrong ones."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from areal_gym.config import load_config
from areal_gym.engines.base import BROKEN_WEIGHTS, ReferenceScores
from areal_gym.engines.embedded import EmbeddedEngine
from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.engines.sglang import FakeSGLangServer, SGLangEngine
from areal_gym.engines.vllm import FakeVLLMServer, VLLMEngine
from areal_gym.engines.vllm.fake_transfer import FakeTransfer
from areal_gym.errors import ConfigError, EngineError, EngineUnreachableError, InfrastructureError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint, save_checkpoint
from areal_gym.runs.train import train
from tests._support.sglang_servers import ask, count, counted, until
from tests._support.sglang_suite import trainer_logprobs

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


@pytest.mark.parametrize(
    ("fake", "engine_class", "reason"),
    [
        (FakeSGLangServer, VLLMEngine, "not a server of vLLM: it has no /version"),
        (FakeVLLMServer, SGLangEngine, "not a server of SGLang: it has no /model_info"),
    ],
)
def test_another_kind_of_server_is_named(fake, engine_class, reason):
    async def scenario():
        async with fake(ScriptedEngine(count)) as server:
            engine = engine_class(POLICY, urls=[server.url])
            with pytest.raises(ConfigError, match=reason) as caught:
                await engine.start()
            assert caught.value.hints[0].startswith("start one: ")
            await engine.aclose()

    asyncio.run(scenario())


def test_raw_logprobs_are_refused_unless_the_temperature_is_1():
    async def scenario():
        async with serving(scripted(logprobs_mode="raw_logprobs")) as engine:
            assert (await ask(engine)).token_ids == counted(2, 20)
            with pytest.raises(ConfigError, match=r"of temperature 1, and .* sampled at 0\.7"):
                await ask(engine, temperature=0.7)

    asyncio.run(scenario())


def test_versions_of_tokens_are_needed_where_requests_are_kept(tiny_policy):
    async def scenario(interrupt):
        server = embedded(tiny_policy, lacks=["versions"], emulate="0.20.0")
        async with serving(server, policy=tiny_policy, interrupt=interrupt) as engine:
            turn = asyncio.create_task(ask(engine, 100))
            await until(lambda: server.num_running == 1)
            await publish(engine, 1, tiny_policy)
            return await turn

    assert set(asyncio.run(scenario("abort")).versions) == {0, 1}
    with pytest.raises(ConfigError, match="which weights sampled a token"):
        asyncio.run(scenario("keep"))


def test_adapter_that_is_not_served_is_named_with_those_that_are(tiny_policy):
    async def scenario():
        async with serving(embedded(tiny_policy), policy=tiny_policy) as engine:
            engine.adapter = "policy-v9"
            with pytest.raises(
                EngineError, match="does not serve the adapter 'policy-v9'"
            ) as caught:
                await ask(engine)
            assert "it serves: policy" in caught.value.hints

    asyncio.run(scenario())


def test_adapter_above_the_servers_rank_is_refused_with_the_flag(tiny_policy, tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"r": 64, "lora_alpha": 64}')

    async def scenario():
        async with serving(embedded(tiny_policy, max_lora_rank=8), policy=tiny_policy) as engine:
            client = engine.servers[0].client
            with pytest.raises(EngineError, match="rank 64 is greater than max_lora_rank 8") as e:
                await client.load_adapter(tmp_path, 1)
            assert any("--max-lora-rank RANK" in hint for hint in e.value.hints)

    asyncio.run(scenario())


class TwoWorkers(FakeVLLMServer):
    """A server of two workers, one of which fails to load an adapter."""

    async def _world_size(self, request):
        return web.json_response({"world_size": 2})

    async def _load_adapter(self, request):
        return web.Response(text="Internal Server Error", status=500)


def test_server_of_several_workers_is_broken_when_one_fails(tiny_policy, tmp_path):
    """It would take the answers of the other workers for those to later requests."""

    async def scenario():
        server = TwoWorkers(EmbeddedEngine.from_checkpoint(tiny_policy, max_context=128))
        async with serving(server, policy=tiny_policy) as engine:
            client = engine.servers[0].client
            with pytest.raises(EngineError, match="of several workers must be restarted"):
                await client.load_adapter(tmp_path, 1)
            assert await client.weight_version() == BROKEN_WEIGHTS

    asyncio.run(scenario())


def test_adapter_above_the_servers_rank_is_not_sent(tiny_policy, tmp_path):
    """Workers fail at it, and a server of several workers must be restarted then."""
    (tmp_path / "adapter_config.json").write_text('{"r": 17, "lora_alpha": 17}')

    async def scenario():
        server = TwoWorkers(EmbeddedEngine.from_checkpoint(tiny_policy, max_context=128))
        async with serving(server, policy=tiny_policy) as engine:
            client = engine.servers[0].client
            with pytest.raises(EngineError, match="rank 17 is greater than max_lora_rank 16"):
                await client.load_adapter(tmp_path, 1)
            assert await client.weight_version() != BROKEN_WEIGHTS

    asyncio.run(scenario())


def test_context_is_that_of_the_smallest_server(tiny_policy):
    async def scenario():
        server = embedded(tiny_policy)  # 128 tokens
        async with serving(server, policy=tiny_policy, max_context=4096) as engine:
            assert engine.max_context == 128
            assert len((await ask(engine, 4000, prompt=[1] * 120)).token_ids) == 8
            with pytest.raises(EngineError, match="a prompt of 128 tokens; 1 to 127 fit") as caught:
                await ask(engine, prompt=[1] * 128)
            hint = f"the limit is that of {server.url}: start it with a larger --max-model-len"
            assert caught.value.hints == (hint,)

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


def test_own_server_with_wrong_weights_is_restarted(tiny_policy, other_weights):
    async def scenario():
        server = careless(tiny_policy, num_starts=2)
        async with server:
            own = OwnServer(server)
            engine = VLLMEngine(tiny_policy, processes=[own], grace_s=10, health_interval_s=0.05)
            await engine.start()
            engine.reference = reference_of(other_weights, 1)
            with pytest.raises(EngineError, match="other weights"):
                await publish(engine, 1, other_weights)
            assert set((await ask(engine)).versions) == {1}
            assert own.num_starts == 2
            assert server.version == "1"
            await engine.aclose()

    asyncio.run(scenario())


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


class CarelessServer(FakeVLLMServer):
    """A server that ignores new weights after its first starts, and takes them after later ones."""

    num_careless_starts = 10**6

    def forget_weights(self):
        super().forget_weights()
        if self.num_careless_starts > 0:
            self._transfer = Careless(self)
        self.num_careless_starts -= 1


@pytest.fixture(scope="module")
def other_weights(tiny_policy, tmp_path_factory):
    """A checkpoint of the shape of the tiny policy, and other weights."""
    decoder = load_checkpoint(tiny_policy)
    for parameter in decoder.parameters():
        parameter.data.mul_(1.5)
    return save_checkpoint(
        decoder, tmp_path_factory.mktemp("weights") / "other", tokenizer_dir=tiny_policy
    )


def reference_of(policy, version):
    ids = (1, 2, 3, 4, 5, 6)
    logprobs = trainer_logprobs(load_checkpoint(policy), ids, 1)
    return ReferenceScores(
        version=version, token_ids=ids, logprobs=logprobs, max_gap=1e-3, max_rounded_gap=0.2
    )


def careless(policy, num_starts=10**6):
    engine = EmbeddedEngine.from_checkpoint(policy, max_context=128)
    server = CarelessServer(engine, model_path=str(policy))
    server.num_careless_starts = num_starts
    return server


@pytest.mark.parametrize("interrupt", ["abort", "keep"])
def test_server_with_wrong_weights_takes_no_requests(tiny_policy, other_weights, interrupt):
    async def scenario():
        good, bad = servers = [embedded(tiny_policy), careless(tiny_policy)]
        options = {"interrupt": interrupt, "grace_s": 10}
        async with serving(*servers, policy=tiny_policy, **options) as engine:
            turns = [asyncio.create_task(ask(engine, 60, session=f"{i}")) for i in range(4)]
            await until(lambda: all(server.num_running == 2 for server in servers))
            engine.reference = reference_of(other_weights, 1)
            await publish(engine, 1, other_weights)
            assert [state.client.url for state in engine.serving] == [good.url]
            assert bad.version == "broken"
            decoder = load_checkpoint(other_weights)
            for turn in await asyncio.gather(*turns):
                num_old = turn.versions.count(0)
                expected = trainer_logprobs(decoder, [1, 2, *turn.token_ids], 2 + num_old)
                pairs = zip(turn.logprobs[num_old:], expected, strict=True)
                assert all(abs(a - b) < 1e-3 for a, b in pairs)
            await asyncio.sleep(0.2)  # its return is tried again, and refused
            assert len(engine.serving) == 1

    asyncio.run(scenario())


def test_server_that_a_publication_admits_is_not_brought_back_again(tiny_policy, other_weights):
    async def scenario():
        server = embedded(tiny_policy)
        async with serving(server, policy=tiny_policy, health_interval_s=0.01) as engine:
            engine.reference = reference_of(other_weights, 1)
            with pytest.raises(EngineError, match="other weights"):
                await publish(engine, 1, tiny_policy)
            assert not engine.serving
            engine.reference = reference_of(tiny_policy, 2)
            async with engine.updating(2) as (client,):
                await client.load_from_disk(tiny_policy, 2)
                await asyncio.sleep(0.2)  # its watch finds it lost, and waits for the publication
                num_before = server.num_requests
            await ask(engine)
            await asyncio.sleep(0.1)
            return server.num_requests - num_before

    assert asyncio.run(scenario()) == 2  # the comparison with the trainer, and the turn


class CountingServer(FakeVLLMServer):
    """A server that counts the requests which run beside one for scores."""

    num_inside = num_scored = 0
    most_beside_scores = 0

    async def _generate_tokens(self, request):
        is_scored = (await request.json())["sampling_params"].get("prompt_logprobs") is not None
        self.num_inside += 1
        try:
            answer = await super()._generate_tokens(request)
            if is_scored:
                self.num_scored += 1
                self.most_beside_scores = max(self.most_beside_scores, self.num_inside - 1)
            return answer
        finally:
            self.num_inside -= 1


@pytest.mark.parametrize(("lacks", "most"), [([], 0), (["lora"], 1)])
def test_only_scores_of_a_cpu_with_adapters_are_alone(tiny_policy, lacks, most):
    async def scenario():
        embedded = EmbeddedEngine.from_checkpoint(tiny_policy, max_context=128)
        server = CountingServer(embedded, model_path=str(tiny_policy), lacks=lacks)
        async with serving(server, policy=tiny_policy) as engine:
            turns = [asyncio.create_task(ask(engine, 60)) for _ in range(3)]
            await until(lambda: server.num_inside == 3)
            scores = [asyncio.create_task(engine.score((1, 2, 3, 4))) for _ in range(3)]
            await asyncio.sleep(0.01)
            later = [asyncio.create_task(ask(engine, 60)) for _ in range(3)]
            await asyncio.gather(*turns, *scores, *later)
            assert server.num_scored == 3
            return min(server.most_beside_scores, 1)

    assert asyncio.run(scenario()) == most


def test_only_server_with_wrong_weights_is_named_with_the_difference(tiny_policy, other_weights):
    async def scenario():
        async with serving(careless(tiny_policy), policy=tiny_policy) as engine:
            engine.reference = reference_of(other_weights, 1)
            with pytest.raises(EngineError, match=r"version 1 and has other weights: .*by \d"):
                await publish(engine, 1, other_weights)
            assert engine.outage_s > 0

    asyncio.run(scenario())


def test_wrong_weights_behind_a_success_end_a_run(tiny_policy, other_weights, shaped_env, tmp_path):
    async def serve(started, ended):
        async with careless(other_weights) as server:
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
                "rollout.outage_patience_s=0.5",
            ]
        )
        try:
            with pytest.raises(InfrastructureError, match="other weights: log-probabilities"):
                await asyncio.to_thread(train, config, run_dir=tmp_path / "run")
        finally:
            ended.set()
            await task

    asyncio.run(scenario())
