"""Servers that are lost, restarted or refuse while they sleep: stand-ins of both kinds."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from areal_gym.engines.embedded import EmbeddedEngine
from areal_gym.engines.servers.launch import LaunchedServer
from areal_gym.engines.sglang import FakeSGLangServer, SGLangEngine
from areal_gym.engines.vllm import FakeVLLMServer, VLLMEngine
from areal_gym.errors import EngineUnreachableError
from areal_gym.models.tiny import load_checkpoint
from areal_gym.testing.engine_contract import tiny_policies
from tests._support.engines_under_test import started
from tests._support.sglang_processes import command_of
from tests._support.sglang_servers import publish, website
from tests._support.sglang_suite import TOLERANCE, ask, logprob_gap
from tests._support.vllm_processes import FAKE as FAKE_VLLM


class VLLMOnGpu(FakeVLLMServer):
    """A server that reports a GPU: those on CPUs have no memory to release."""

    async def _collective_rpc(self, request):
        answer = await super()._collective_rpc(request)
        body = answer.body.replace(b'"cpu"', b'"cuda"')
        return web.Response(body=body, content_type="application/json")


KINDS = {"sglang": (FakeSGLangServer, SGLangEngine), "vllm": (VLLMOnGpu, VLLMEngine)}
PATIENCE_S = 30


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    return tiny_policies(tmp_path_factory.mktemp("policies"), max_context=128)


class Link:
    """A connection to a server that can be cut."""

    is_cut = False

    async def __call__(self, request):
        if self.is_cut:
            request.transport.close()
            return web.Response()
        return None


def stand_in(server_class, policy):
    engine = EmbeddedEngine.from_checkpoint(policy, max_context=128, num_slots=8)
    return server_class(engine, model_path=str(policy))


@asynccontextmanager
async def engine_behind_a_link(server_class, engine_class, policy):
    """Run an engine that reaches its only server over a link; yield all three."""
    link = Link()
    async with (
        stand_in(server_class, policy) as server,
        website(link, behind=server) as url,
        started(engine_class(policy, urls=[url], health_interval_s=0.05, grace_s=10)) as engine,
    ):
        yield engine, server, link


async def check_answer(engine, policy, version):
    """The next turn has this version, and this checkpoint's log-probabilities."""
    async with asyncio.timeout(PATIENCE_S):
        turn = await ask(engine, 16)
    assert set(turn.versions) == {version}
    assert logprob_gap(load_checkpoint(policy), turn) < TOLERANCE


@pytest.mark.parametrize("keeps_weights", [True, False])
@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_server_that_is_lost_in_its_sleep_is_woken_when_it_is_back(
    kind, version, keeps_weights, policies
):
    async def play():
        async with engine_behind_a_link(*KINDS[kind], policies.first) as (engine, server, link):
            if version:
                await publish(engine, version, policies.second)
            await engine.sleep(keeps_weights=keeps_weights)
            link.is_cut = True
            await engine.wake_up()
            assert not engine.serving
            assert server.released
            link.is_cut = False
            await check_answer(engine, policies.second if version else policies.first, version)
            assert not server.released
            await engine.sleep()
            await publish(engine, 2, policies.first)
            await engine.wake_up()
            await check_answer(engine, policies.first, 2)
            assert engine.stats.num_servers_lost == 1

    asyncio.run(play())


@pytest.mark.parametrize("kind", KINDS)
def test_server_that_is_lost_after_a_publication_in_its_sleep_is_woken(kind, policies):
    async def play():
        async with engine_behind_a_link(*KINDS[kind], policies.first) as (engine, server, link):
            await engine.sleep()
            async with engine.updating(1) as servers:  # by a way that leaves nothing on the disk
                await servers[0].load_from_disk(policies.second, 1, is_kept=False)
            link.is_cut = True
            await engine.wake_up()
            assert server.released == {"kv_cache"}
            link.is_cut = False
            await check_answer(engine, policies.second, 1)
            assert not server.released

    asyncio.run(play())


@pytest.mark.parametrize("publishes", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_server_that_restarts_in_its_sleep_answers_after_it(kind, publishes, policies):
    async def play():
        server_class, engine_class = KINDS[kind]
        async with (
            stand_in(server_class, policies.first) as other,
            stand_in(server_class, policies.first) as server,
        ):
            urls = [server.url, other.url]
            engine = engine_class(policies.first, urls=urls, health_interval_s=0.05)
            async with started(engine):
                await publish(engine, 1, policies.second)
                await engine.sleep()
                await server.die()
                await server.start()
                if publishes:
                    await publish(engine, 2, policies.first)
                await engine.wake_up()
                async with asyncio.timeout(PATIENCE_S):
                    while len(engine.serving) < 2:
                        await asyncio.sleep(0.02)
                await other.die()
                policy = policies.first if publishes else policies.second
                await check_answer(engine, policy, 1 + publishes)

    asyncio.run(play())


@pytest.mark.parametrize("kind", KINDS)
def test_server_that_is_lost_in_a_publication_goes_on_when_it_is_back(kind, policies):
    """It was paused, and nobody could tell it to go on."""
    interrupt = {"sglang": "retract", "vllm": "keep"}[kind]
    server_class, engine_class = KINDS[kind]

    def make_engine(policy, **options):
        return engine_class(policy, interrupt=interrupt, **options)

    async def play():
        async with engine_behind_a_link(server_class, make_engine, policies.first) as opened:
            engine, _, link = opened

            async def publish_and_cut():
                async with engine.updating(1) as servers:
                    link.is_cut = True
                    await servers[0].load_from_disk(policies.second, 1)

            with pytest.raises(EngineUnreachableError, match="no answer"):
                await publish_and_cut()
            link.is_cut = False
            await check_answer(engine, policies.first, 0)

    asyncio.run(play())


class RefusesToRelease(VLLMOnGpu):
    """A server that fails to release memory.

    It hangs up afterwards, which the client does not know when it sends its next request on that
    connection.
    """

    num_refused = 0

    def _routes(self):
        lost = set()

        def hanging_up(route, handle):
            async def answer(request):
                if request.transport in lost:
                    request.transport.close()
                    return web.Response()
                if route in ("/sleep", "/release_kv_cache_memory"):
                    self.num_refused += 1
                    lost.add(request.transport)
                    return web.Response(text="Internal Server Error", status=500)
                return await handle(request)

            return answer

        return [(way, route, hanging_up(route, handle)) for way, route, handle in super()._routes()]


@pytest.mark.parametrize("interrupt", ["abort", "keep"])
@pytest.mark.parametrize("keeps_weights", [True, False])
def test_server_that_does_not_release_its_memory_sleeps_and_goes_on(
    keeps_weights, interrupt, policies
):
    async def play():
        async with stand_in(RefusesToRelease, policies.first) as server:
            engine = VLLMEngine(
                policies.first, urls=[server.url], interrupt=interrupt, health_interval_s=0.05
            )
            async with started(engine):
                begun = asyncio.create_task(ask(engine, 80))
                await ask(engine, 1)
                for num_sleeps in (1, 2):
                    await engine.sleep(keeps_weights=keeps_weights)
                    assert server.num_refused == num_sleeps
                    late = asyncio.create_task(ask(engine, 4))
                    await asyncio.sleep(0.05)
                    assert not late.done()
                    await engine.wake_up()
                    await late
                await check_answer(engine, policies.first, 0)
                assert set((await begun).versions) == {0}
                # Where weights were to be released, they are not known to be there.
                assert engine.stats.num_servers_lost == (0 if keeps_weights else num_sleeps)

    asyncio.run(play())


@pytest.mark.parametrize("kind", KINDS)
def test_launched_server_that_is_killed_in_its_sleep_is_started_again(kind, policies, tmp_path):
    engine_class = KINDS[kind][1]
    command, arguments = command_of("fake") if kind == "sglang" else (FAKE_VLLM, [])
    own = LaunchedServer(
        policies.first,
        recipe=engine_class.recipe,
        command=command,
        server_args=arguments,
        log=tmp_path / "server.log",
    )

    async def play():
        engine = engine_class(policies.first, processes=[own], health_interval_s=0.05)
        async with started(engine):
            await publish(engine, 1, policies.second)
            await engine.sleep()
            os.killpg(own.process_group, signal.SIGKILL)
            await engine.wake_up()
            await check_answer(engine, policies.second, 1)
            assert engine.stats.num_relaunches == 1

    asyncio.run(play())


def test_vllm_on_a_cpu_is_not_asked_to_release_its_cache_alone(policies):
    """One of several workers would fail, and the server take its answer for a later one."""

    class OnCpu(FakeVLLMServer):
        num_asked = 0

        async def _release_cache(self, request):
            self.num_asked += 1
            return await super()._release_cache(request)

    async def play():
        async with (
            stand_in(OnCpu, policies.first) as server,
            started(VLLMEngine(policies.first, urls=[server.url])) as engine,
        ):
            await engine.sleep(keeps_weights=True)
            await engine.wake_up()
            assert server.num_asked == 0
            await check_answer(engine, policies.first, 0)

    asyncio.run(play())
