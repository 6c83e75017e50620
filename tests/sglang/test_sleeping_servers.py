"""Servers that sleep while the trainer works on their GPUs: against both kinds of servers."""

import asyncio

import pytest
from test_runs import config_of

from areal_gym.engines.sglang.sglang_client import SGLangClient
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.train import train
from tests._support.long_tests import skip_long_if_real
from tests._support.sglang_processes import require_retract
from tests._support.sglang_suite import (
    TOLERANCE,
    ask,
    check_each_version,
    engine_over,
    is_ascending,
    logprob_gap,
    sync_of,
    turns_in_flight,
    turns_kept_in_flight,
)


@pytest.fixture(autouse=True)
def retracts(kind):
    require_retract(kind)


def test_turns_in_flight_sleep_and_go_on_with_new_tensors(server, policies, decoders):
    async def play():
        async with engine_over(policies[0], server, interrupt="retract") as engine:
            sync = sync_of(engine, "tensor", None)
            await sync.publish(decoders[0].state_dict().items(), 0)
            async with turns_kept_in_flight(engine) as turns:
                for version in (1, 2):
                    await engine.sleep()
                    num_tokens = engine.stats.num_tokens
                    late = asyncio.create_task(ask(engine, 8))
                    await asyncio.sleep(0.5)
                    assert engine.stats.num_tokens == num_tokens  # nothing is sampled meanwhile
                    await sync.publish(decoders[version % 2].state_dict().items(), version)
                    assert not late.done()  # the trainer still uses the GPU
                    await engine.wake_up()
                    assert set((await late).versions) == {version}
            for generation in turns:
                assert is_ascending(generation.versions)
                check_each_version(decoders, generation)
            assert any(len(set(generation.versions)) > 1 for generation in turns)
            assert engine.stats.asleep_s > 1.0
            await sync.aclose()

    asyncio.run(play())


def test_next_run_wakes_servers_that_a_killed_one_left_asleep(server, policies, decoders, tmp_path):
    async def play():
        async with engine_over(policies[0], server) as engine:
            sync = sync_of(engine, "disk", tmp_path / "weights")
            await sync.publish(decoders[1].state_dict().items(), 1)
            turns = await turns_in_flight(engine, 2, 200)
            await engine.sleep()
            for turn in turns:  # as when the process is killed
                turn.cancel()
        async with engine_over(policies[0], server) as engine:
            generation = await ask(engine)
            assert set(generation.versions) == {0}
            assert logprob_gap(decoders[0], generation) < TOLERANCE

    asyncio.run(play())


@pytest.mark.parametrize(
    "extra",
    [
        ["trainer.weight_sync=disk", "rollout.max_staleness=1"],
        ["trainer.weight_sync=tensor", "trainer.num_ranks=2"],
        ["trainer.weight_sync=lora", "trainer.lora.rank=8", "trainer.lora.alpha=8"],
    ],
)
def test_run_with_servers_and_trainer_in_turns(kind, server, policies, shaped_env, tmp_path, extra):
    if "trainer.num_ranks=2" in extra:
        skip_long_if_real(kind)

    async def serve_the_base():
        async with engine_over(policies[0], server):
            client = SGLangClient(server)
            await client.reload(str(policies[0]))
            await client.aclose()

    asyncio.run(serve_the_base())
    if any("lora" in setting for setting in extra):
        pytest.importorskip("peft", reason="pip install 'areal-gym[lora]'")
    config = config_of(
        policies[0], f"engine.url={server}", "trainer.colocate=true", *extra, steps=3
    )
    train(config, run_dir=tmp_path / "run")
    rows = RunDir(tmp_path / "run").read_metrics()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["engine/asleep_s"] > 0 for row in rows)
    assert rows[0]["train/ratio"] == pytest.approx(1, abs=1e-3)
