"""Sampling through SGLang's endpoints: the same tests for the fake server and the real one."""

import asyncio

import pytest
import torch

from areal_gym.engines.base import Generation, SamplingParams
from areal_gym.errors import EngineError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint
from areal_gym.trainer.weight_sync.disk import DiskWeightSync
from areal_gym.types import FinishReason
from tests._support.sglang_suite import (
    PROMPT,
    TOLERANCE,
    ask,
    engine_over,
    logprob_gap,
    trainer_logprobs,
    turns_in_flight,
)


@pytest.fixture
def in_engine(server, policies, tmp_path):
    """Run a coroutine function with an engine that serves policy 0."""

    def run(test, **options):
        async def play():
            async with engine_over(policies[0], server, **options) as engine:
                sync = DiskWeightSync(engine, directory=tmp_path / "weights")
                decoder = load_checkpoint(policies[0])
                await sync.publish(decoder.state_dict().items(), 0)
                await test(engine, decoder)
                await sync.aclose()

        asyncio.run(play())

    return run


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_server_logprobs_equal_the_trainers(in_engine, temperature):
    async def test(engine, decoder):
        generation = await ask(engine, temperature=temperature)
        assert len(generation.token_ids) == len(generation.logprobs) == 32
        assert logprob_gap(decoder, generation, temperature=temperature) < TOLERANCE
        assert generation.finish_reason is FinishReason.LENGTH
        assert set(generation.versions) == {0}

    in_engine(test)


def test_stream_pieces_make_the_whole_turn(in_engine):
    async def test(engine, decoder):
        params = SamplingParams(max_new_tokens=40, temperature=0.0)
        pieces = [piece async for piece in engine.stream(PROMPT, params, session="s")]
        assert len(pieces) > 1
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        whole = Generation(
            token_ids=tuple(i for piece in pieces for i in piece.token_ids),
            logprobs=tuple(p for piece in pieces for p in piece.logprobs),
            versions=tuple(v for piece in pieces for v in piece.versions),
            finish_reason=pieces[-1].finish_reason,
        )
        assert whole.token_ids == (await ask(engine, 40, temperature=0.0)).token_ids
        assert logprob_gap(decoder, whole) < TOLERANCE

    in_engine(test)


def test_server_scores_equal_the_trainers(in_engine):
    async def test(engine, decoder):
        scores = await engine.score(PROMPT)
        mine = trainer_logprobs(decoder, PROMPT, 1)
        assert len(scores) == len(PROMPT) - 1
        assert max(abs(a - b) for a, b in zip(scores, mine, strict=True)) < TOLERANCE

    in_engine(test)


def test_greedy_sampling_is_deterministic(in_engine):
    async def test(engine, decoder):
        first, second = await ask(engine, temperature=0.0), await ask(engine, temperature=0.0)
        assert first.token_ids == second.token_ids
        assert logprob_gap(decoder, first) < TOLERANCE

    in_engine(test)


def test_stop_token_is_the_last_token_of_the_turn(in_engine):
    async def test(engine, decoder):
        whole = await ask(engine, temperature=0.0)
        stop = whole.token_ids[5]
        cut = await ask(engine, temperature=0.0, stop_token_ids=(stop,))
        end = whole.token_ids.index(stop) + 1
        assert cut.token_ids == whole.token_ids[:end]
        assert len(cut.logprobs) == end
        assert cut.finish_reason is FinishReason.STOP

    in_engine(test)


def test_model_eos_ends_only_turns_with_that_stop_token(in_engine, tmp_path):
    """SGLang stops at the model's own eos unless the request switches that off."""

    async def test(engine, decoder):
        eos = decoder.config.eos_token_id
        likeliest = (await ask(engine, 1, temperature=0.0)).token_ids[0]
        with torch.no_grad():  # embeddings are tied: with twice its logit, it is the likeliest
            weight = decoder.model.embed_tokens.weight
            weight[eos] = 2 * weight[likeliest]
        sync = DiskWeightSync(engine, directory=tmp_path / "ending")
        await sync.publish(decoder.state_dict().items(), 1)
        for elsewhere in ((), (eos - 1,)):
            generation = await ask(engine, 12, temperature=0.0, stop_token_ids=elsewhere)
            assert generation.finish_reason is FinishReason.LENGTH
            assert len(generation.token_ids) == 12
            assert generation.token_ids[0] == eos
            assert logprob_gap(decoder, generation) < TOLERANCE
        assert engine.stats.num_retries == 0
        ended = await ask(engine, 12, temperature=0.0, stop_token_ids=(eos,))
        assert ended.finish_reason is FinishReason.STOP
        assert ended.token_ids == (eos,)
        sampling = {"max_new_tokens": 12, "temperature": 0.0}
        request = {"input_ids": PROMPT, "sampling_params": sampling}
        answer = await engine.servers[0].client.post("/generate", request)
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": eos}
        await sync.aclose()

    in_engine(test)


def test_concurrent_turns_have_exact_logprobs(in_engine):
    async def test(engine, decoder):
        prompts = [[20 + i, *PROMPT] for i in range(24)]
        generations = await asyncio.gather(*(ask(engine, 16, prompt) for prompt in prompts))
        for prompt, generation in zip(prompts, generations, strict=True):
            assert logprob_gap(decoder, generation, prompt) < TOLERANCE

    in_engine(test)


def test_new_tokens_are_limited_by_the_context(in_engine):
    async def test(engine, decoder):
        room = 5
        prompt = (PROMPT * 20)[: engine.max_context - room]
        generation = await ask(engine, 64, prompt)
        assert len(generation.token_ids) == room
        assert generation.finish_reason is FinishReason.LENGTH

    in_engine(test)


def test_prompt_filling_the_context_is_refused(in_engine):
    async def test(engine, decoder):
        with pytest.raises(EngineError, match="tokens"):
            await ask(engine, 8, (PROMPT * 20)[: engine.max_context])
        # The server's own words, where the client's check is not asked:
        with pytest.raises(EngineError, match=r"exceeds|longer"):
            await engine.servers[0].client.post(
                "/generate",
                {"input_ids": PROMPT * 20, "sampling_params": {"max_new_tokens": 8}},
            )

    in_engine(test)


def test_cancelled_calls_free_the_server(in_engine):
    async def test(engine, decoder):
        tasks = await turns_in_flight(engine, 8, 400)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(end) for end in ends} == {asyncio.CancelledError}
        # The next request is answered normally.
        assert logprob_gap(decoder, await ask(engine)) < TOLERANCE

    in_engine(test)
