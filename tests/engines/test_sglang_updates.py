"""New weights within turns: the turns continue, and every token has its version."""

import asyncio

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

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

KINDS = [("abort", "0.5.23"), ("retract", "0.5.23"), ("abort", "0.5.20"), ("abort", "0.5.18")]


@pytest.mark.parametrize(("interrupt", "emulate"), KINDS)
def test_interrupted_turns_continue_with_new_weights(tiny_policy, interrupt, emulate):
    async def scenario():
        server = fake(latency_s=0.005, emulate=emulate)
        async with serving(server, interrupt=interrupt) as engine:
            await ask(engine, 1)
            calls = [asyncio.create_task(ask(engine, 200, prompt=(1, i))) for i in range(6)]
            for version in (1, 2, 3):
                await asyncio.sleep(0.04)
                await publish(engine, version, tiny_policy)
                assert engine.policy_version == version
            for i, generation in enumerate(await asyncio.gather(*calls)):
                assert generation.token_ids == counted(i, 200)
                assert len(generation.logprobs) == 200
                assert list(generation.versions) == sorted(generation.versions)
                assert set(generation.versions) == {0, 1, 2, 3}
            assert engine.stats.num_continued == (18 if interrupt == "abort" else 0)
            assert engine.stats.num_retries == 0
            assert engine.stats.publication_s > 0
            assert (await ask(engine)).versions == (3,) * 20

    asyncio.run(scenario())


def recording_server(truth, **options):
    """Return a server that records in `truth` the version that sampled each token."""

    def reply(question):
        tokens = count(question)
        version = 0 if server.version == "default" else int(server.version)
        for position in range(len(question.prompt_ids), len(question.prompt_ids) + len(tokens)):
            truth[question.prompt_ids[1], position] = version
        return tokens

    server = FakeSGLangServer(ScriptedEngine(reply, latency_s=0.001), **options)
    return server


def check_versions(truth, lengths, generations):
    """Check the tokens of the calls, and that their versions are the recorded ones."""
    for i, generation in enumerate(generations):
        assert generation.token_ids == counted(i, lengths[i])
        assert list(generation.versions) == [truth[i, 2 + n] for n in range(lengths[i])]


@settings(max_examples=20)
@given(
    pauses=st.lists(st.floats(0, 0.02), max_size=6),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    kind=st.sampled_from(KINDS),
)
def test_token_versions_are_exact_under_random_publications(tiny_policy, pauses, lengths, kind):
    """The policy behind the server records the version that sampled each token."""
    interrupt, emulate = kind
    truth = {}

    async def scenario():
        server = recording_server(truth, emulate=emulate)
        async with serving(server, interrupt=interrupt) as engine:
            calls = [
                asyncio.create_task(ask(engine, n, prompt=(1, i))) for i, n in enumerate(lengths)
            ]
            for version, pause_s in enumerate(pauses, 1):
                await asyncio.sleep(pause_s)
                await publish(engine, version, tiny_policy)
            check_versions(truth, lengths, await asyncio.gather(*calls))

    asyncio.run(scenario())


@settings(max_examples=25)
@given(
    events=st.lists(
        st.tuples(st.floats(0, 0.02), st.sampled_from(["publish", "restart 0", "restart 1"])),
        max_size=7,
    ),
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=8),
    interrupt=st.sampled_from(["abort", "retract"]),
)
def test_token_versions_are_exact_while_servers_restart(tiny_policy, events, lengths, interrupt):
    truth = {}

    async def restart(server):
        await server.die()
        server.version = "default"
        await server.start()

    async def scenario():
        servers = [recording_server(truth), recording_server(truth)]
        async with serving(
            *servers, interrupt=interrupt, health_interval_s=0.01, grace_s=5, max_retries=20
        ) as engine:
            calls = [
                asyncio.create_task(ask(engine, n, prompt=(1, i), session=f"s{i}"))
                for i, n in enumerate(lengths)
            ]
            version = 0
            for pause_s, event in events:
                await asyncio.sleep(pause_s)
                if event == "publish":
                    version += 1
                    await publish(engine, version, tiny_policy)
                else:
                    await restart(servers[int(event[-1])])
            check_versions(truth, lengths, await asyncio.gather(*calls))
            assert engine.policy_version == version

    asyncio.run(scenario())


def test_calls_wait_during_a_publication(tiny_policy):
    async def scenario():
        server = fake()
        async with serving(server) as engine:
            async with engine.updating(1) as servers:
                call = asyncio.create_task(ask(engine))
                await asyncio.sleep(0.02)
                assert server.num_requests == 0
                await servers[0].load_from_disk(tiny_policy, 1)
            assert (await call).versions == (1,) * 20
            assert 0 < engine.stats.held_s < engine.stats.publication_s

    asyncio.run(scenario())


def test_server_without_the_new_weights_does_not_serve(tiny_policy):
    async def scenario():
        servers = [fake(latency_s=0.002), fake(latency_s=0.002)]
        async with serving(*servers) as engine:
            calls = [asyncio.create_task(ask(engine, 100, session=f"s{i}")) for i in range(4)]
            await asyncio.sleep(0.01)
            async with engine.updating(1) as updated_servers:
                await updated_servers[1].post(
                    "/update_weight_version", {"new_version": "1", "abort_all_requests": False}
                )
            assert engine.policy_version == 1
            assert [member.is_serving for member in engine.servers] == [False, True]
            assert all(g.versions[-1] == 1 for g in await asyncio.gather(*calls))
            await asyncio.sleep(0.15)
            assert not engine.servers[0].is_serving
            await publish(engine, 2, tiny_policy)
            assert [member.is_serving for member in engine.servers] == [True, True]

    asyncio.run(scenario())


def test_publication_no_server_took_changes_nothing():
    async def scenario():
        async with serving(fake()) as engine:
            with pytest.raises(EngineError, match="no server reports version 1"):
                async with engine.updating(1):
                    pass
            with pytest.raises(ZeroDivisionError):
                async with engine.updating(1):
                    1 / 0  # noqa: B018
            assert engine.policy_version == 0
            assert (await ask(engine)).versions == (0,) * 20

    asyncio.run(scenario())


@pytest.mark.parametrize("by_disk", [True, False])
def test_restarted_server_reloads_or_waits_for_weights(tiny_policy, by_disk):
    async def scenario():
        servers = [fake(latency_s=0.002), fake(latency_s=0.002)]
        async with serving(*servers) as engine:
            await publish(engine, 1, tiny_policy)
            if not by_disk:
                for member in engine.servers:
                    member.client.loaded_from = None
            await servers[0].die()
            await until(lambda: not engine.servers[0].is_serving)
            servers[0].version = "default"
            await servers[0].start()
            if by_disk:
                await until(lambda: engine.servers[0].is_serving)
                assert servers[0].version == "1"
            else:
                await asyncio.sleep(0.2)
                assert not engine.servers[0].is_serving
            await publish(engine, 2, tiny_policy)
            assert all(member.is_serving for member in engine.servers)

    asyncio.run(scenario())


def test_restarted_only_server_with_old_weights_is_an_error(tiny_policy):
    async def scenario():
        server = fake()
        async with serving(server) as engine:
            await publish(engine, 1, tiny_policy)
            engine.servers[0].client.loaded_from = None  # as if they had come as tensors
            server.version = "default"
            with pytest.raises(EngineUnreachableError, match="version 1") as caught:
                await ask(engine)
            assert caught.value.hints[0] == f"{server.url} was restarted and has other weights"
            await publish(engine, 2, tiny_policy)
            assert (await ask(engine)).versions == (2,) * 20

    asyncio.run(scenario())


def test_unnoticed_restart_is_detected_from_the_answer(tiny_policy):
    async def scenario():
        server = fake()
        async with serving(server, health_interval_s=0.2, grace_s=5) as engine:
            await publish(engine, 1, tiny_policy)
            server.version = "default"
            generation = await ask(engine)
            assert generation.versions == (1,) * 20
            assert engine.stats.num_servers_lost == 1

    asyncio.run(scenario())


def test_weights_of_an_earlier_run_are_version_0(tiny_policy):
    async def scenario():
        server = fake()
        server.version = "60"
        async with serving(server) as engine:
            assert engine.policy_version == 0
            assert (await ask(engine)).versions == (0,) * 20
            await publish(engine, 60, tiny_policy)
            assert (await ask(engine)).versions == (60,) * 20

    asyncio.run(scenario())


def test_sglang_resumes_after_a_pause_of_a_killed_run():
    async def scenario():
        server = fake()
        async with serving(server) as killed:
            await killed.servers[0].client.post("/pause_generation", {"mode": "retract"})
            engine = SGLangEngine(POLICY, urls=[server.url])
            await engine.start()
            assert len((await ask(engine)).token_ids) == 20
            await engine.aclose()

    asyncio.run(scenario())


def test_publication_without_servers_is_an_error(tiny_policy):
    async def scenario():
        server = fake()
        async with serving(server) as engine:
            await server.die()
            with pytest.raises(EngineUnreachableError):
                await publish(engine, 1, tiny_policy)
            assert engine.policy_version == 0

    asyncio.run(scenario())


def test_server_dying_during_publication_is_left_out(tiny_policy):
    async def scenario():
        servers = [fake(latency_s=0.002), fake(latency_s=0.002)]
        async with serving(*servers) as engine:
            calls = [asyncio.create_task(ask(engine, 100, session=f"s{i}")) for i in range(4)]
            await asyncio.sleep(0.01)
            async with engine.updating(1) as updated_servers:
                await servers[0].die()
                with pytest.raises(EngineError):
                    await updated_servers[0].load_from_disk(tiny_policy, 1)
                await updated_servers[1].load_from_disk(tiny_policy, 1)
            assert all(len(g.token_ids) == 100 for g in await asyncio.gather(*calls))
            assert [member.is_serving for member in engine.servers] == [False, True]

    asyncio.run(scenario())


def test_retract_needs_a_server_that_supports_it():
    async def scenario():
        async with fake(emulate="0.5.20") as server:
            engine = SGLangEngine(POLICY, urls=[server.url], interrupt="retract")
            with pytest.raises(ConfigError, match="cannot set requests aside"):
                await engine.start()
            await engine.aclose()

    asyncio.run(scenario())


def test_request_arriving_after_the_abort_is_aborted(tiny_policy):
    """A request already on its way would be sampled by an old server during the update."""

    async def scenario():
        async def handle(request):
            if await is_sampling(request):
                await asyncio.sleep(0.03)

        server = fake(latency_s=0.005, emulate="0.5.18")
        async with server, website(handle, behind=server) as url:
            engine = SGLangEngine(POLICY, urls=[url])
            await engine.start()
            call = asyncio.create_task(ask(engine, 40))
            await asyncio.sleep(0.01)
            async with engine.updating(1) as servers:
                assert server.num_running == 0
                await servers[0].load_from_disk(tiny_policy, 1)
            generation = await call
            assert generation.token_ids == counted(2, 40)
            assert set(generation.versions) <= {0, 1}
            await engine.aclose()

    asyncio.run(scenario())


def test_server_side_abort_costs_retry_budget():
    async def scenario():
        async def handle(request):
            if await is_sampling(request):
                meta = {"finish_reason": {"type": "abort"}, "weight_version": "default"}
                return web.json_response({"output_ids": [], "meta_info": meta})
            return None

        async with fake() as behind, website(handle, behind=behind) as url:
            engine = SGLangEngine(POLICY, urls=[url], max_retries=1)
            await engine.start()
            with pytest.raises(EngineError, match="aborted a request by itself"):
                await ask(engine)
            await engine.aclose()

    asyncio.run(scenario())
