"""Generation, publications and refusals: against the stand-in and the real vLLM."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import torch
from conftest import NEEDS_REAL, running_server

from areal_gym.config import LoraConfig, PluginConfig
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.vllm import VLLMEngine
from areal_gym.errors import EngineError, GrammarError
from areal_gym.trainer.weight_sync.base import make_weight_sync
from areal_gym.types import FinishReason
from tests._support.sglang_suite import (
    PROMPT,
    TOLERANCE,
    ask,
    is_ascending,
    logprob_gap,
    trainer_logprobs,
    turns_kept_in_flight,
)


@asynccontextmanager
async def engine_over(policy, *urls, **options):
    """Run an engine over servers; it begins with the weights of `policy` as version 0."""
    settings = {"max_context": 512, "health_interval_s": 0.2, **options}
    engine = VLLMEngine(policy, urls=urls, **settings)
    try:
        await engine.start()
        async with engine.updating(1) as servers:
            for server in servers:
                await server.load_from_disk(policy, 1)
        yield engine
    finally:
        await engine.aclose()


def sync_of(engine, id, directory, **kwargs):
    settings = PluginConfig(id=id, kwargs=kwargs)
    return make_weight_sync(engine, settings, directory=directory, lora=LoraConfig())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_sampling_distribution(server, policies, decoders, temperature):
    async def play():
        async with engine_over(policies[0], server) as engine:
            turns = await asyncio.gather(
                *(ask(engine, 24, temperature=temperature, seed=seed) for seed in (1, 1, 2))
            )
            scores = await engine.score(PROMPT)
            return turns, scores

    (first, same, other), scores = asyncio.run(play())
    assert tuple(first.token_ids) == tuple(same.token_ids) != tuple(other.token_ids)
    assert first.finish_reason is FinishReason.LENGTH
    assert set(first.versions) == {1}
    for turn in (first, other):
        assert logprob_gap(decoders[0], turn, temperature=temperature) < TOLERANCE
    expected = trainer_logprobs(decoders[0], PROMPT, 1)
    assert max(abs(a - b) for a, b in zip(scores, expected, strict=True)) < TOLERANCE


def test_turns_end_at_the_given_tokens_only(server, policies):
    async def play():
        async with engine_over(policies[0], server) as engine:
            free = await ask(engine, 64, seed=5)
            stop = free.token_ids[10]
            stopped = await ask(engine, 64, seed=5, stop_token_ids=(stop,))
            with pytest.raises(EngineError, match="tokens; 1 to 511 fit"):
                await ask(engine, 4, prompt=[1] * 512)
            return free, stop, stopped, await ask(engine, 9999, prompt=[1] * 505)

    free, stop, stopped, long = asyncio.run(play())
    assert len(free.token_ids) == 64
    end = list(free.token_ids).index(stop) + 1
    assert list(stopped.token_ids) == list(free.token_ids)[:end]
    assert stopped.finish_reason is FinishReason.STOP
    assert len(long.token_ids) == 7


def test_streams_do_not_repeat_their_random_numbers(server, policies, decoders):
    async def play():
        async with engine_over(policies[0], server) as engine:
            params = SamplingParams(max_new_tokens=64, seed=7)
            return [piece async for piece in engine.stream(PROMPT, params)]

    pieces = asyncio.run(play())
    assert sum(len(piece.token_ids) for piece in pieces) == 64
    assert len({tuple(piece.token_ids) for piece in pieces}) == len(pieces) == 4


@pytest.mark.parametrize("interrupt", ["abort", "keep"])
def test_publications_under_load_are_exact(server, policies, decoders, tmp_path, interrupt):
    async def play():
        async with engine_over(policies[0], server, interrupt=interrupt) as engine:
            sync = sync_of(engine, "disk", tmp_path)
            async with turns_kept_in_flight(engine) as turns:
                for version in (2, 3, 4):
                    weights = decoders[(version + 1) % 2].state_dict().items()
                    await sync.publish(weights, version)
                    assert engine.policy_version == version
                    await asyncio.sleep(0.05)
            await sync.aclose()
            return turns, engine.stats

    turns, stats = asyncio.run(play())
    assert any(len(set(turn.versions)) > 1 for turn in turns)
    assert all(is_ascending(turn.versions) for turn in turns)
    assert (stats.num_continued > 0) == (interrupt == "abort")
    assert stats.num_servers_lost == 0
    for turn in turns:
        ids = [*PROMPT, *turn.token_ids]
        by_decoder = [trainer_logprobs(decoder, ids, len(PROMPT)) for decoder in decoders]
        for place, (logprob, version) in enumerate(zip(turn.logprobs, turn.versions, strict=True)):
            expected = by_decoder[(version + 1) % 2][place]
            assert abs(logprob - expected) < TOLERANCE, (place, version)


def test_refused_weights_change_nothing(server, policies, decoders):
    async def play():
        async with engine_over(policies[0], server) as engine:
            for directory in (policies[2], policies[0] / "nowhere"):
                with pytest.raises(EngineError, match="refused the weights"):
                    async with engine.updating(2) as servers:
                        await servers[0].load_from_disk(directory, 2)
            return engine.policy_version, await ask(engine)

    version, turn = asyncio.run(play())
    assert version == 1
    assert logprob_gap(decoders[0], turn) < TOLERANCE


def test_tensors_are_broadcast_to_workers(server, policies, decoders):
    async def play():
        async with engine_over(policies[0], server) as engine:
            sync = sync_of(engine, "distributed", None, bucket_mb=0.1)
            gaps = []
            for version in (2, 3):
                decoder = decoders[(version + 1) % 2]
                await sync.publish(list(decoder.state_dict().items()), version)
                gaps.append(logprob_gap(decoder, await ask(engine)))
            await sync.aclose()
            return engine.policy_version, gaps

    version, gaps = asyncio.run(play())
    assert version == 3
    assert max(gaps) < TOLERANCE


def adapter_weights(decoder, rank=4):
    """Return an adapter of one layer under peft's names."""
    torch.manual_seed(3)
    weights = {}
    for name, tensor in decoder.state_dict().items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(rank, tensor.shape[1]) * 0.3
            weights[f"{stem}.lora_B.weight"] = torch.randn(tensor.shape[0], rank) * 0.3
    return weights


def test_adapters_are_versions(server, policies, decoders, tmp_path):
    async def play():
        async with engine_over(policies[0], server) as engine:
            sync = sync_of(engine, "lora", tmp_path)
            await sync.publish(adapter_weights(decoders[0]).items(), 2)
            adapted = await ask(engine)
            await sync.publish(adapter_weights(decoders[0]).items(), 3)
            again = await ask(engine)
            with pytest.raises(EngineError, match=r"refused|rank"):
                await sync.publish(adapter_weights(decoders[0], rank=16).items(), 4)
            engine.adapter = None
            return adapted, again, await ask(engine)

    adapted, again, base = asyncio.run(play())
    assert (set(adapted.versions), set(again.versions)) == ({2}, {3})
    assert logprob_gap(decoders[0], adapted) > 0.05
    assert logprob_gap(decoders[0], base) < TOLERANCE


def tokenizer_id(policy, text):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(policy / "tokenizer.json")).token_to_id(text)


def test_grammars_hold_or_are_refused(server, policies, kind):
    schema = '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'

    async def play(schema):
        async with engine_over(policies[0], server) as engine:
            params = SamplingParams(max_new_tokens=48, grammar=("json_schema", schema), seed=1)
            return await engine.generate(PROMPT, params)

    if kind == "fake":
        with pytest.raises(GrammarError, match="structured outputs"):
            asyncio.run(play(schema))
        return
    assert asyncio.run(play(schema)).token_ids[0] == tokenizer_id(policies[0], "{")
    with pytest.raises(GrammarError):
        asyncio.run(play('{"type": 7}'))


def test_servers_sleep_and_go_on(server, policies, decoders):
    async def play():
        async with engine_over(policies[0], server, interrupt="keep") as engine:
            engine.require_sleep()
            turn = asyncio.create_task(ask(engine, 150))
            await ask(engine, 1)
            await engine.sleep()
            async with engine.updating(2) as servers:
                await servers[0].load_from_disk(policies[1], 2)
            assert not turn.done()
            await engine.wake_up()
            return await turn, await ask(engine)

    turn, after = asyncio.run(play())
    assert is_ascending(turn.versions)
    assert len(turn.token_ids) == 150
    assert logprob_gap(decoders[1], after) < TOLERANCE


@NEEDS_REAL
@pytest.mark.slow
def test_each_of_two_workers_takes_its_part(policies, decoders, tmp_path):
    async def play(url):
        async with engine_over(policies[1], url) as engine:
            assert engine.servers[0].client.num_ranks == 2
            loaded = await ask(engine)
            sync = sync_of(engine, "distributed", None, bucket_mb=0.1)
            await sync.publish(list(decoders[0].state_dict().items()), 2)
            sent = await ask(engine)
            await sync.aclose()
            return logprob_gap(decoders[1], loaded), logprob_gap(decoders[0], sent)

    flags = ("--tensor-parallel-size", "2")
    with running_server("real", policies[0], tmp_path / "log", *flags) as url:
        assert max(asyncio.run(play(url))) < TOLERANCE
