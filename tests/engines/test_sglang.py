"""The SGLang engine against fake servers in this process."""

import asyncio
import json
from contextlib import aclosing

import pytest
from aiohttp import web

from areal_gym.config import EngineConfig
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.engines.sglang import FakeSGLangServer, SGLangEngine
from areal_gym.errors import ConfigError, EngineError, EngineUnreachableError
from tests._support.sglang_servers import (
    POLICY,
    ask,
    count,
    counted,
    fake,
    is_sampling,
    publish,
    serving,
    until,
    website,
)

# ---- one server ---------------------------------------------------------------------------------


def test_closed_stream_stops_the_sampling():
    async def scenario():
        async with serving(fake()) as engine:
            params = SamplingParams(max_new_tokens=500)
            async with aclosing(engine.stream([1, 2], params)) as pieces:
                async for _ in pieces:
                    break
            assert engine.stats.num_tokens == 16

    asyncio.run(scenario())


def test_sglang_uses_the_servers_context_limit():
    async def scenario():
        small = FakeSGLangServer(ScriptedEngine(count, max_context=50))
        async with serving(small, max_context=4096) as engine:
            assert engine.max_context == 44
            assert len((await ask(engine, 100, prompt=[1] * 40)).token_ids) == 4
            assert len((await ask(engine, 100, prompt=[1] * 43)).token_ids) == 1
            with pytest.raises(EngineError, match="44 tokens; 1 to 43 fit"):
                await ask(engine, prompt=[1] * 44)
            with pytest.raises(EngineError, match="0 tokens"):
                await ask(engine, prompt=[])

    asyncio.run(scenario())


def test_refusal_quotes_the_servers_message():
    async def scenario():
        small = FakeSGLangServer(ScriptedEngine(count, max_context=50))
        async with serving(small) as engine:
            engine.max_context = 60
            with pytest.raises(EngineError, match="maximum context length of 50 tokens"):
                await ask(engine, 30, prompt=[1] * 30)
            assert engine.stats.num_retries == 0

    asyncio.run(scenario())


def test_sglang_from_settings():
    async def scenario():
        async with fake() as server:
            settings = EngineConfig(id="sglang", url=server.url, kwargs={"max_retries": 0})
            engine = SGLangEngine.from_settings(POLICY, settings)
            await engine.start()
            assert engine.max_context == 512
            await engine.aclose()
            await engine.aclose()

    asyncio.run(scenario())
    with pytest.raises(TypeError, match="nonsense"):
        SGLangEngine.from_settings(POLICY, EngineConfig(kwargs={"nonsense": 1}))
    with pytest.raises(ConfigError, match="abort, retract"):
        SGLangEngine(POLICY, urls=["http://a:1"], interrupt="in_place")
    with pytest.raises(ConfigError, match="is not the URL"):
        SGLangEngine(POLICY, urls=["ftp://a:1"])


def test_cancelled_call_is_aborted_on_the_server():
    async def scenario():
        server = fake(latency_s=0.005)
        async with serving(server) as engine:
            call = asyncio.create_task(ask(engine, 3000))
            await until(lambda: server.num_running)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until(lambda: not server.num_running)
            assert (await ask(engine, 4)).token_ids == counted(2, 4)

    asyncio.run(scenario())


# ---- not an SGLang server ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda: web.Response(text="<html>hi", content_type="text/html"), "answers HTML"),
        (lambda: web.Response(text="{", content_type="application/json"), "invalid JSON"),
        (lambda: web.json_response({"hello": 1}), "not a server of SGLang"),
        (lambda: web.json_response([1]), "not a server of SGLang|refused"),
        (lambda: web.Response(status=404), "not a server of SGLang: it has no /model_info"),
    ],
    ids=["html", "broken", "other", "list", "404"],
)
def test_non_sglang_service_is_refused_at_start(answer, words):
    async def handle(request):
        return answer()

    async def scenario():
        async with website(handle) as url:
            engine = SGLangEngine(POLICY, urls=[url])
            with pytest.raises(ConfigError, match=words):
                await engine.start()
            await engine.aclose()

    asyncio.run(scenario())


def test_server_with_another_vocabulary_is_refused_before_sampling(tiny_policy, tmp_path):
    """A token id beyond its vocabulary would kill the server."""
    vocab_size = json.loads((tiny_policy / "config.json").read_text())["vocab_size"]
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 77}}')

    async def scenario():
        async with fake(model_path=str(tiny_policy)) as server:
            engine = SGLangEngine(tiny_policy, urls=[server.url])
            await engine.start()
            assert engine.servers[0].facts.vocab_size == vocab_size
            await engine.aclose()
            engine = SGLangEngine(tmp_path, urls=[server.url])
            with pytest.raises(ConfigError, match=rf"has {vocab_size} tokens; .* has 77"):
                await engine.start()
            await engine.aclose()
            assert server.num_requests == 0

    asyncio.run(scenario())


def test_unreachable_server_error_has_the_start_command():
    async def scenario():
        engine = SGLangEngine(POLICY, urls=["127.0.0.1:9"])
        with pytest.raises(
            EngineUnreachableError, match=r"127\.0\.0\.1:9: Connection refused"
        ) as caught:
            await engine.start()
        await engine.aclose()
        assert (
            "launch_server --model-path policy --host 127.0.0.1 --port 9" in caught.value.hints[0]
        )

    asyncio.run(scenario())


# ---- several servers ----------------------------------------------------------------------------


def test_sessions_stay_on_one_server_and_are_balanced():
    async def scenario():
        servers = [fake(), fake(), fake()]
        async with serving(*servers) as engine:
            for _ in range(4):
                await asyncio.gather(*(ask(engine, session=f"s{i}") for i in range(9)))
            assert [server.num_requests for server in servers] == [12, 12, 12]
            assert [member.num_sessions for member in engine.servers] == [3, 3, 3]
            for i in range(9):
                engine.release(f"s{i}")
            engine.release("never seen")
            assert [member.num_sessions for member in engine.servers] == [0, 0, 0]

    asyncio.run(scenario())


def test_calls_without_session_go_to_the_least_busy_server():
    async def scenario():
        servers = [fake(latency_s=0.01), fake(latency_s=0.01)]
        async with serving(*servers) as engine:
            await asyncio.gather(*(ask(engine) for _ in range(10)))
            assert [server.num_requests for server in servers] == [5, 5]

    asyncio.run(scenario())


def test_calls_move_off_a_dead_server():
    async def scenario():
        servers = [fake(latency_s=0.01), fake(latency_s=0.01)]
        async with serving(*servers) as engine:
            calls = [asyncio.create_task(ask(engine, 60, session=f"s{i}")) for i in range(10)]
            await until(lambda: servers[0].num_running == servers[1].num_running == 5)
            await servers[0].die()
            for generation in await asyncio.gather(*calls):
                assert generation.token_ids == counted(2, 60)
            assert engine.stats.num_moved == 5
            assert engine.stats.num_servers_lost == 1
            assert [member.is_serving for member in engine.servers] == [False, True]
            assert (await ask(engine, session="s0")).token_ids == counted(2, 20)

    asyncio.run(scenario())


def test_idle_server_death_is_noticed():
    async def scenario():
        servers = [fake(), fake()]
        async with serving(*servers) as engine:
            await servers[1].die()
            await until(lambda: not engine.servers[1].is_serving)
            await asyncio.gather(*(ask(engine, session=f"s{i}") for i in range(4)))
            assert engine.stats.num_retries == 0

    asyncio.run(scenario())


def test_unresponsive_server_is_given_up():
    """The server accepts connections and never answers: only the health check notices."""

    async def scenario():
        stuck = asyncio.Event()

        async def handle(request):
            if stuck.is_set():
                return web.Response(status=503)
            if await is_sampling(request):
                await asyncio.sleep(60)
            return None

        async with fake() as behind, fake() as other, website(handle, behind=behind) as url:
            engine = SGLangEngine(POLICY, urls=[url, other.url], health_interval_s=0.02)
            await engine.start()
            call = asyncio.create_task(ask(engine))
            await until(lambda: engine.servers[0].num_in_flight)
            stuck.set()
            assert (await call).token_ids == counted(2, 20)
            assert engine.stats.num_moved == 1
            await engine.aclose()

    asyncio.run(scenario())


def test_no_server_left_is_an_error_after_grace_period():
    async def scenario():
        server = fake(latency_s=0.01)
        async with serving(server) as engine:
            call = asyncio.create_task(ask(engine, 3000))
            await until(lambda: server.num_running)
            await server.die()
            with pytest.raises(EngineUnreachableError, match=server.url) as caught:
                await call
            assert "sglang.launch_server" in caught.value.hints[0]
            with pytest.raises(EngineUnreachableError):
                await ask(engine)
            with pytest.raises(EngineUnreachableError):
                await publish(engine, 1, POLICY)
            assert engine.policy_version == 0

    asyncio.run(scenario())


def test_spent_retry_budget_is_an_error():
    async def scenario():
        requests = []

        async def handle(request):
            if not await is_sampling(request):
                return None
            requests.append(request)
            return web.json_response({"error": {"message": "out of memory"}}, status=500)

        async with fake() as behind, website(handle, behind=behind) as url:
            engine = SGLangEngine(POLICY, urls=[url], max_retries=1, health_interval_s=5)
            await engine.start()
            with pytest.raises(EngineError, match=r"budget is spent.*out of memory"):
                await ask(engine)
            assert len(requests) == 2
            await engine.aclose()

    asyncio.run(scenario())


def test_slow_answer_is_cut_only_by_request_timeout_and_retried():
    async def scenario():
        async with serving(fake(latency_s=0.2), request_timeout_s=0.1, max_retries=1) as engine:
            with pytest.raises(EngineError, match=r"no answer within 0\.1 s"):
                await ask(engine)
            assert engine.stats.num_retries == 1

    asyncio.run(scenario())


def test_sglang_scores_through_the_server():
    async def scenario():
        async def handle(request):
            if not await is_sampling(request):
                return None
            ids = (await request.json())["input_ids"]
            rows = [[None if i == 0 else -float(i), token, None] for i, token in enumerate(ids)]
            return web.json_response(
                {"output_ids": [], "meta_info": {"input_token_logprobs": rows}}
            )

        async with fake() as behind, website(handle, behind=behind) as url:
            engine = SGLangEngine(POLICY, urls=[url])
            await engine.start()
            assert await engine.score([7, 8, 9]) == [-1.0, -2.0]
            await engine.aclose()
        async with serving(fake()) as engine:
            with pytest.raises(EngineError, match="does not score prompts: ScriptedEngine"):
                await engine.score([7, 8, 9])

    asyncio.run(scenario())
