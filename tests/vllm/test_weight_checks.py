"""Publications that are compared with the trainer, other ways in, and a server that is killed."""

import asyncio
import os
import signal

import pytest
from test_served_policy import engine_over, sync_of

from areal_gym.engines.base import ReferenceScores
from areal_gym.engines.servers.launch import LaunchedServer
from areal_gym.engines.vllm import VLLMEngine
from areal_gym.errors import EngineError
from tests._support.long_tests import skip_long_if_real
from tests._support.sglang_suite import (
    PROMPT,
    TOLERANCE,
    ask,
    is_ascending,
    logprob_gap,
    trainer_logprobs,
)
from tests._support.vllm_processes import FAKE, LIMITS, NEEDS_REAL, START_S, real_command


def reference_of(decoder, version):
    return ReferenceScores(
        version=version,
        token_ids=PROMPT,
        logprobs=trainer_logprobs(decoder, PROMPT, 1),
        max_gap=1e-4,
        max_rounded_gap=1e-4,
    )


async def reload_alone(server, directory, version):
    """Load by vLLM's own method, which forgets tied matrices on CPUs."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
    await server.post("/collective_rpc", body, timeout_s=60)
    await server.set_version(str(version))


async def load(server, directory, version):
    await server.load_from_disk(directory, version)


async def load_by_session(server, directory, version):
    await server.begin_update()
    update = {"update_info": {"directory": str(directory)}}
    await server.post("/update_weights", update, timeout_s=60)
    await server.end_update(version)


@pytest.mark.parametrize("way", [load, load_by_session])
def test_published_weights_are_those_of_the_trainer(server, policies, decoders, way):
    async def play():
        async with engine_over(policies[0], server) as engine:
            engine.reference = reference_of(decoders[1], 2)
            async with engine.updating(2) as servers:
                await way(servers[0], policies[1], 2)
            return await ask(engine)

    turn = asyncio.run(play())
    assert set(turn.versions) == {2}
    assert logprob_gap(decoders[1], turn) < TOLERANCE


def test_server_with_other_weights_than_the_trainer_is_lost(server, policies, decoders):
    async def play():
        async with engine_over(policies[0], server, grace_s=1) as engine:
            engine.reference = reference_of(decoders[0], 2)
            with pytest.raises(EngineError, match="version 2 and has other weights"):
                async with engine.updating(2) as servers:
                    await servers[0].load_from_disk(policies[1], 2, is_kept=False)
            assert not engine.serving
            engine.reference = reference_of(decoders[0], 3)
            async with engine.updating(3) as servers:
                await servers[0].load_from_disk(policies[0], 3)
            return await ask(engine)

    assert set(asyncio.run(play()).versions) == {3}


def test_scores_between_turns_are_those_of_the_trainer(server, policies, decoders):
    async def play():
        async with engine_over(policies[0], server) as engine:
            turns = [asyncio.create_task(ask(engine, 60, seed=seed)) for seed in range(4)]
            await asyncio.sleep(0.1)
            scores = await asyncio.gather(*(engine.score(PROMPT) for _ in range(3)))
            return await asyncio.gather(*turns), scores

    turns, scores = asyncio.run(play())
    assert all(logprob_gap(decoders[0], turn) < TOLERANCE for turn in turns)
    expected = trainer_logprobs(decoders[0], PROMPT, 1)
    for row in scores:
        assert max(abs(a - b) for a, b in zip(row, expected, strict=True)) < TOLERANCE


@NEEDS_REAL
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["real"], indirect=True)
def test_tied_matrix_that_a_reload_leaves_behind_is_found(server, policies, decoders):
    async def play():
        async with engine_over(policies[0], server) as engine:
            engine.reference = reference_of(decoders[1], 2)
            with pytest.raises(EngineError, match="has other weights"):
                async with engine.updating(2) as servers:
                    await reload_alone(servers[0], policies[1], 2)

    asyncio.run(play())


def test_changes_are_sent_by_a_relay(server, policies, decoders, tmp_path):
    async def play():
        async with engine_over(policies[0], server) as engine:
            sync = sync_of(engine, "delta", tmp_path, dtype="float32")
            gaps = []
            for version in (2, 3):
                decoder = decoders[version % 2]
                engine.reference = reference_of(decoder, version)
                await sync.publish(list(decoder.state_dict().items()), version)
                gaps.append(logprob_gap(decoder, await ask(engine)))
            await sync.aclose()
            return gaps

    assert max(asyncio.run(play())) < TOLERANCE


def test_killed_server_is_restarted_with_the_newest_weights(
    kind, server, policies, decoders, tmp_path
):
    skip_long_if_real(kind)

    async def play():
        own = LaunchedServer(
            policies[0],
            recipe=VLLMEngine.recipe,
            command=FAKE if kind == "fake" else real_command(),
            server_args=LIMITS,
            log=tmp_path / "server.log",
            start_timeout_s=START_S,
        )
        async with engine_over(policies[0], server, processes=[own]) as engine:
            engine.reference = reference_of(decoders[1], 2)
            async with engine.updating(2) as servers:
                await asyncio.gather(*(load(each, policies[1], 2) for each in servers))
            turns = [asyncio.create_task(ask(engine, 400, seed=seed)) for seed in range(8)]
            async with asyncio.timeout(60):
                while not engine.servers[1].num_in_flight:
                    await asyncio.sleep(0.01)
            os.killpg(own.process_group, signal.SIGKILL)
            ended = await asyncio.gather(*turns)
            assert engine.stats.num_moved >= 1
            async with asyncio.timeout(START_S):
                while len(engine.serving) < 2:
                    await asyncio.sleep(0.2)
            back = engine.servers[1]
            assert await back.reported_version() == 2
            scores = await back.client.score(PROMPT, adapter=None, timeout_s=60)
            return ended, scores

    ended, scores = asyncio.run(play())
    for turn in ended:
        assert is_ascending(turn.versions)
        assert logprob_gap(decoders[1], turn) < TOLERANCE
    expected = trainer_logprobs(decoders[1], PROMPT, 1)
    assert max(abs(a - b) for a, b in zip(scores, expected, strict=True)) < TOLERANCE
