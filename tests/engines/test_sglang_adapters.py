"""LoRA adapters as versions, with two processes' engines over the same servers."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.engines.servers.server_client import RefusedError
from areal_gym.engines.sglang import FakeSGLangServer, SGLangEngine
from areal_gym.errors import EngineError, EngineUnreachableError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint
from areal_gym.trainer.weight_sync.adapters import LoraWeightSync
from tests._support.sglang_servers import POLICY, ask, count, counted, serving, until

MATRIX = "model.layers.0.self_attn.o_proj"


def recording_server(policy, truth, latency_s=0.001):
    """Return a server that records in `truth` the version whose adapter sampled each token."""

    def reply(question):
        tokens = count(question)
        adapter = server._adapter
        version = 0 if adapter is None else int(adapter.removeprefix("policy-v"))
        for position in range(len(question.prompt_ids), len(question.prompt_ids) + len(tokens)):
            truth[question.prompt_ids[1], position] = version
        return tokens

    engine = ScriptedEngine(reply, latency_s=latency_s)
    server = FakeSGLangServer(engine, model_path=str(policy))
    return server


def adapter_of(policy):
    out_size, in_size = load_checkpoint(policy).state_dict()[f"{MATRIX}.weight"].shape
    down, up = torch.ones(2, in_size), torch.ones(out_size, 2)
    name = f"base_model.model.{MATRIX}"
    return {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}


@asynccontextmanager
async def guest_of(servers, **options):
    """An engine as a rollout worker has one."""
    urls = [server.url for server in servers]
    settings = {"grace_s": 5, "health_interval_s": 0.05, **options}
    engine = SGLangEngine(POLICY, urls=urls, is_guest=True, has_adapters=True, **settings)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.aclose()


@settings(max_examples=15)
@given(
    pauses=st.lists(st.floats(0, 0.03), max_size=5),
    lengths=st.lists(st.integers(1, 80), min_size=2, max_size=8),
)
def test_token_versions_are_those_of_the_adapters(tiny_policy, tmp_path_factory, pauses, lengths):
    """The trainer's own engine samples every other turn, a rollout worker's the rest."""
    truth = {}
    adapter = adapter_of(tiny_policy)

    async def scenario():
        servers = [recording_server(tiny_policy, truth) for _ in range(2)]
        async with serving(*servers, grace_s=5) as engine, guest_of(servers) as guest:
            sync = LoraWeightSync(engine, directory=tmp_path_factory.mktemp("adapters"))
            calls = [
                asyncio.create_task(ask((engine, guest)[i % 2], n, prompt=(1, i)))
                for i, n in enumerate(lengths)
            ]
            for version, pause_s in enumerate(pauses, 1):
                await asyncio.sleep(pause_s)
                await sync.publish(adapter.items(), version)
            for i, generation in enumerate(await asyncio.gather(*calls)):
                assert generation.token_ids == counted(i, lengths[i])
                assert list(generation.versions) == [truth[i, 2 + n] for n in range(lengths[i])]
            late = await ask(guest, 8, prompt=(1, 99))  # refused or told at the latest by now
            late = await ask(guest, 8, prompt=(1, 99))
            assert set(late.versions) == {len(pauses)}
            assert list(late.versions) == [truth[99, 2 + n] for n in range(8)]
            # One adapter is left.
            names = [f"policy-v{len(pauses)}"] if pauses else []
            assert all(list(server._adapters) == names for server in servers)

    asyncio.run(scenario())


def test_turns_of_guests_continue_with_the_new_adapter(tiny_policy, tmp_path):
    async def scenario():
        truth = {}
        server = recording_server(tiny_policy, truth, latency_s=0.005)
        async with serving(server) as engine, guest_of([server]) as guest:
            sync = LoraWeightSync(engine, directory=tmp_path)
            turn = asyncio.create_task(ask(guest, 200, prompt=(1, 2)))
            for version in (1, 2):
                await asyncio.sleep(0.04)
                await sync.publish(adapter_of(tiny_policy).items(), version)
            generation = await turn
            assert generation.token_ids == counted(2, 200)
            assert set(generation.versions) == {0, 1, 2}
            assert guest.stats.num_continued == 2
            assert guest.stats.num_retries == 0

    asyncio.run(scenario())


def test_late_guest_begins_with_the_newest_adapter(tiny_policy, tmp_path):
    async def scenario():
        server = recording_server(tiny_policy, {})
        async with serving(server) as engine:
            sync = LoraWeightSync(engine, directory=tmp_path)
            await sync.publish(adapter_of(tiny_policy).items(), 4)
            async with guest_of([server]) as guest:
                assert (await ask(guest)).versions == (4,) * 20
                # It names an adapter that is gone once: it is told, and asks again.
                await sync.publish(adapter_of(tiny_policy).items(), 5)
                assert (await ask(guest)).versions == (5,) * 20
                assert guest.stats.num_retries == 0
                with pytest.raises(EngineError, match="top_p"):  # not for want of an adapter
                    await ask(guest, top_p=5.0)

    asyncio.run(scenario())


def test_restarted_server_is_given_the_adapter(tiny_policy, tmp_path):
    async def scenario():
        servers = [recording_server(tiny_policy, {}) for _ in range(2)]
        async with serving(*servers, grace_s=5) as engine, guest_of(servers) as guest:
            sync = LoraWeightSync(engine, directory=tmp_path)
            await sync.publish(adapter_of(tiny_policy).items(), 1)
            assert (await ask(engine)).versions == (1,) * 20
            for session in ("a", "b"):
                await ask(guest, session=session)
            for server in servers:  # so fast that nobody sees it
                await server.die()
                server.version = "default"
                await server.start()
            for asking, session in ((engine, None), (guest, "a"), (guest, "b")):
                assert (await ask(asking, session=session)).versions == (1,) * 20
            await until(lambda: all(state.is_serving for state in engine.servers))
            assert [list(server._adapters) for server in servers] == [["policy-v1"]] * 2

    asyncio.run(scenario())


def test_adapter_of_an_earlier_run_is_replaced(tiny_policy, tmp_path):
    async def scenario():
        server = recording_server(tiny_policy, {})
        async with serving(server) as engine:
            for run in ("first", "second"):
                sync = LoraWeightSync(engine, directory=tmp_path / run)
                await sync.publish(adapter_of(tiny_policy).items(), 1)
            assert server._adapters["policy-v1"].path == tmp_path / "second" / "policy-v1"
            with pytest.raises(RefusedError, match="no adapter_config"):
                await engine.servers[0].client.load_adapter(tmp_path / "none", 7)

    asyncio.run(scenario())


def test_guest_begins_while_a_server_is_away(tiny_policy):
    """A rollout worker that is restarted beside a server that is."""

    async def scenario():
        servers = [recording_server(tiny_policy, {}) for _ in range(2)]
        async with serving(*servers):
            await servers[0].die()
            async with guest_of(servers) as guest:
                assert [state.is_serving for state in guest.servers] == [False, True]
                assert (await ask(guest)).versions == (0,) * 20
                await servers[0].start()
                await until(lambda: guest.servers[0].is_serving)
                await servers[1].die()
                assert (await ask(guest)).versions == (0,) * 20
            await servers[0].die()
            with pytest.raises(EngineUnreachableError):
                async with guest_of(servers):
                    pass

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("targets", "missing"),
    [
        (["q_proj", "o_proj"], "q_proj without v_proj"),
        (["k_proj"], "k_proj without q_proj and v_proj"),
        (["v_proj", "k_proj"], "k_proj without q_proj"),
        (["up_proj", "down_proj"], "up_proj without gate_proj"),
    ],
)
def test_adapter_that_sglang_does_not_survive_is_refused(targets, missing, tmp_path):
    config = {"r": 2, "lora_alpha": 2, "target_modules": targets}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    async def scenario():
        async with serving(FakeSGLangServer(ScriptedEngine(count))) as engine:
            with pytest.raises(EngineError, match=f"no LoRA adapter of {missing};") as caught:
                await engine.servers[0].client.load_adapter(tmp_path, 1)
            assert "trainer.lora.targets=all" in caught.value.hints

    asyncio.run(scenario())
