"""Sampling through SGLang's endpoints: the same tests for the fake server and the real one."""

import asyncio

import pytest
from suite import PROMPT, TOLERANCE, ask, engine_over, gap, ours

from areal_gym.errors import EngineError
from areal_gym.modeling.checkpoint import load_checkpoint
from areal_gym.trainer.weight_syncs.disk import DiskWeightSync
from areal_gym.types import FinishReason


@pytest.fixture
def in_engine(server, policies, tmp_path):
    """Runs a coroutine function with an engine that has policy 0."""

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
def test_log_probabilities_are_the_trainers(in_engine, temperature):
    async def test(engine, decoder):
        generation = await ask(engine, temperature=temperature)
        assert len(generation.token_ids) == len(generation.logprobs) == 32
        assert gap(decoder, generation, temperature=temperature) < TOLERANCE
        assert generation.finish_reason is FinishReason.LENGTH
        assert set(generation.versions) == {0}

    in_engine(test)


def test_scores_are_the_trainers(in_engine):
    async def test(engine, decoder):
        scores = await engine.score(PROMPT)
        mine = ours(decoder, PROMPT, 1)
        assert len(scores) == len(PROMPT) - 1
        assert max(abs(a - b) for a, b in zip(scores, mine, strict=True)) < TOLERANCE

    in_engine(test)


def test_greedy_is_the_same_every_time(in_engine):
    async def test(engine, decoder):
        first, second = await ask(engine, temperature=0.0), await ask(engine, temperature=0.0)
        assert first.token_ids == second.token_ids
        assert gap(decoder, first) < TOLERANCE

    in_engine(test)


def test_a_stop_token_ends_the_turn_and_is_its_last_token(in_engine):
    async def test(engine, decoder):
        whole = await ask(engine, temperature=0.0)
        stop = whole.token_ids[5]
        cut = await ask(engine, temperature=0.0, stop_token_ids=(stop,))
        end = whole.token_ids.index(stop) + 1
        assert cut.token_ids == whole.token_ids[:end]
        assert len(cut.logprobs) == end
        assert cut.finish_reason is FinishReason.STOP

    in_engine(test)


def test_many_at_once(in_engine):
    async def test(engine, decoder):
        prompts = [[20 + i, *PROMPT] for i in range(24)]
        found = await asyncio.gather(*(ask(engine, 16, prompt) for prompt in prompts))
        for prompt, generation in zip(prompts, found, strict=True):
            assert gap(decoder, generation, prompt) < TOLERANCE

    in_engine(test)


def test_new_tokens_are_cut_to_what_the_context_leaves(in_engine):
    async def test(engine, decoder):
        room = 5
        prompt = (PROMPT * 20)[: engine.max_context - room]
        generation = await ask(engine, 64, prompt)
        assert len(generation.token_ids) <= room
        assert generation.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)

    in_engine(test)


def test_a_prompt_that_fills_the_context_is_refused(in_engine):
    async def test(engine, decoder):
        with pytest.raises(EngineError, match="tokens"):
            await ask(engine, 8, (PROMPT * 20)[: engine.max_context])
        # The server's own words, where the client's check is not asked:
        with pytest.raises(EngineError, match=r"exceeds|longer"):
            await engine.members[0].server.post(
                "/generate",
                {"input_ids": PROMPT * 20, "sampling_params": {"max_new_tokens": 8}},
            )

    in_engine(test)


def test_who_stops_waiting_frees_the_server(in_engine):
    async def test(engine, decoder):
        task = asyncio.create_task(ask(engine, 400))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The next request is answered as if nothing had been.
        assert gap(decoder, await ask(engine)) < TOLERANCE

    in_engine(test)
