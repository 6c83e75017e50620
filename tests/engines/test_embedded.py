"""The embedded engine agrees with the plain model under batching, caching and new weights."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace

import pytest
import torch

from areal_gym.engines.base import Generation, SamplingParams
from areal_gym.engines.embedded import EmbeddedEngine
from areal_gym.engines.embedded.network import CachedDecoder
from areal_gym.errors import ConfigError, EngineError
from areal_gym.models.tiny.decoder import Decoder, build_decoder
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.models.tiny.kernels import product_kernels as products
from tests._support.plain_attention import causal_attend
from tests._support.tiny_models import SHAPES, WINDOW, their_logits, tiny_model

CONFIG = DecoderConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    initializer_range=0.3,
    max_position_embeddings=256,
)
ATTENTION = {"C": CONFIG, "torch": replace(CONFIG, head_dim=8)}
"""Attention kernels on a CPU; the one in C needs a head_dim that is a multiple of 16."""


def decoder(seed: int = 0, attention: str = "C") -> Decoder:
    torch.set_num_threads(1)
    return build_decoder(ATTENTION[attention], seed=seed)


def logprobs(model: Decoder, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        hidden = model.hidden_states(
            torch.tensor(ids), torch.arange(len(ids)), causal_attend([len(ids)])
        )
        return (hidden @ model.lm_head_weight.T).log_softmax(-1)


def run(play, *, model: Decoder | None = None, **settings):
    """Run `play` with a started engine, and close it afterwards."""

    async def main():
        engine = EmbeddedEngine(model or decoder(), **{"max_context": 128, **settings})
        await engine.start()
        try:
            return await play(engine)
        finally:
            await engine.aclose()

    return asyncio.run(main())


def worst_gap(model: Decoder, prompt: list[int], generation: Generation) -> float:
    scores = logprobs(model, [*prompt, *generation.token_ids])
    return max(
        abs(float(scores[len(prompt) + i - 1, token]) - logprob)
        for i, (token, logprob) in enumerate(
            zip(generation.token_ids, generation.logprobs, strict=True)
        )
    )


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(CONFIG.vocab_size) for _ in range(length)]


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("num_slots", [2, 8])
def test_logprobs_are_exact_through_turns_siblings_and_evictions(num_slots, attention):
    model = decoder(0, attention)
    rng = random.Random(0)
    prompts = [prompt_of(rng, rng.randint(5, 30)) for _ in range(3)]

    async def episode(engine: EmbeddedEngine, index: int) -> float:
        own = random.Random(index)
        ids, worst = list(prompts[index % 3]), 0.0
        for turn in range(3):
            params = SamplingParams(
                max_new_tokens=own.randint(1, 12), stop_token_ids=(3, 4, 5), seed=index * 9 + turn
            )
            generation = await engine.generate(ids, params, session=f"s{index}")
            worst = max(worst, worst_gap(model, ids, generation))
            ids += [*generation.token_ids, *prompt_of(own, own.randint(1, 5))]
            await asyncio.sleep(own.random() * 0.003)
        engine.release(f"s{index}")
        return worst

    async def play(engine: EmbeddedEngine):
        gaps = await asyncio.gather(*(episode(engine, i) for i in range(24)))
        return max(gaps), engine.stats

    worst, stats = run(play, model=model, num_slots=num_slots)
    assert worst < 1e-4
    assert stats.reused > 0


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_embedded_engine_agrees_with_transformers(shape, tmp_path):
    """Two turns beyond the attention window: prompts and decoded tokens, cached or new."""
    theirs = tiny_model(shape)
    theirs.save_pretrained(tmp_path)
    rng = random.Random(1)
    prompts = [prompt_of(rng, length) for length in (3, WINDOW - 2, WINDOW + 9, 3 * WINDOW)]

    async def episode(engine: EmbeddedEngine, index: int) -> list[tuple[list[int], Generation]]:
        ids, turns = prompts[index % len(prompts)], []
        for turn, temperature in enumerate((0.0, 0.7)):
            params = SamplingParams(
                max_new_tokens=WINDOW + 5 + index, temperature=temperature, seed=index
            )
            generation = await engine.generate(ids, params, session=str(index))
            turns.append((ids, generation))
            ids = [*ids, *generation.token_ids, *prompt_of(rng, 4 + turn)]
        return turns

    async def main():
        engine = EmbeddedEngine.from_checkpoint(tmp_path, max_context=160, num_slots=6)
        await engine.start()
        try:
            return await asyncio.gather(*(episode(engine, i) for i in range(2 * len(prompts))))
        finally:
            await engine.aclose()

    for (prompt, greedy), (context, warm) in asyncio.run(main()):
        ids = torch.tensor([*context, *warm.token_ids])
        logits = their_logits(theirs, ids)
        first = range(len(prompt) - 1, len(prompt) - 1 + len(greedy.token_ids))
        assert list(greedy.token_ids) == logits[first].argmax(-1).tolist()
        second = range(len(context) - 1, len(ids) - 1)
        scores = (logits[second] / 0.7).log_softmax(-1)
        expected = scores.gather(1, ids[len(context) :, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(warm.logprobs), expected, atol=2e-5, rtol=0)


def test_seeded_samples_do_not_depend_on_the_batch():
    prompt = prompt_of(random.Random(2), 10)
    params = SamplingParams(max_new_tokens=15, seed=11)

    async def alone(engine: EmbeddedEngine):
        return await engine.generate(prompt, params)

    async def crowded(engine: EmbeddedEngine):
        others = [
            engine.generate(prompt_of(random.Random(i), 5 + i), SamplingParams(max_new_tokens=20))
            for i in range(7)
        ]
        return (await asyncio.gather(*others, engine.generate(prompt, params)))[-1]

    generation = run(alone)
    assert generation.token_ids == run(crowded).token_ids
    if products.has_kernel(torch.empty(0, 16)):
        assert generation.logprobs == run(crowded).logprobs  # every digit
    assert (
        generation.token_ids
        != run(
            lambda engine: engine.generate(prompt, SamplingParams(max_new_tokens=15, seed=12))
        ).token_ids
    )


def test_siblings_share_prompt_attention_and_stay_exact(monkeypatch):
    """Covers families of several sizes, single rows, staggered ends and new weights."""
    old, new = decoder(0), decoder(1)
    rng = random.Random(11)
    prompts = [prompt_of(rng, length) for length in (40, 33, 50)]
    prompts = [*prompts[:1] * 5, *prompts[1:2] * 4, prompts[2], prompt_of(rng, 5)]
    shared = set()
    compute = CachedDecoder.forward

    def forward(self, step):
        shared.update(family.num_shared for family in step.families)
        return compute(self, step)

    monkeypatch.setattr(CachedDecoder, "forward", forward)

    async def episode(engine: EmbeddedEngine, index: int) -> float:
        ids, worst = prompts[index], 0.0
        for turn in range(2):
            params = SamplingParams(max_new_tokens=20 + 3 * index, seed=index)
            generation = await engine.generate(ids, params, session=str(index))
            if len(set(generation.versions)) == 1:
                model = new if generation.versions[0] else old
                worst = max(worst, worst_gap(model, ids, generation))
            ids = [*ids, *generation.token_ids, turn]
        return worst

    async def play(engine: EmbeddedEngine):
        turns = [asyncio.create_task(episode(engine, i)) for i in range(len(prompts))]
        while engine.stats.generated < 400:
            await asyncio.sleep(0)
        await engine.publish(new.state_dict().items(), 1)
        return max(await asyncio.gather(*turns))

    assert run(play, model=old, max_context=200) < 1e-4
    assert shared == {0, 32, 39}  # the last token of a prompt is computed by each


@pytest.mark.parametrize("change", ["rewrites its history", "continues under new weights"])
def test_diverging_row_leaves_its_sibling_family(change):
    old, new = decoder(0), decoder(1)
    rng = random.Random(12)
    prompt = prompt_of(rng, 40)

    async def play(engine: EmbeddedEngine):
        long = SamplingParams(max_new_tokens=200, seed=0)
        first = asyncio.create_task(engine.generate(prompt, long, session="first"))
        short = SamplingParams(max_new_tokens=3, seed=1)
        generation = await engine.generate(prompt, short, session="second")
        if change == "rewrites its history":
            longer = [*prompt[:20], *prompt_of(rng, 30)]
        else:
            longer = [*prompt, *generation.token_ids, 1]
            await engine.publish(new.state_dict().items(), 1)
        again = await engine.generate(
            longer, SamplingParams(max_new_tokens=20, seed=2), session="second"
        )
        assert not first.done()
        return longer, again, await first

    longer, again, first = run(play, model=old, max_context=250)
    if change == "rewrites its history":
        assert worst_gap(old, longer, again) < 1e-4
        assert worst_gap(old, prompt, first) < 1e-4
    else:
        assert worst_gap(new, longer, again) < 1e-4


def test_siblings_compute_their_prompt_once(monkeypatch):
    """Its last token is computed by each, together with the rows that decode."""
    prompt = prompt_of(random.Random(3), 40)
    prompts = []
    compute = CachedDecoder.forward

    def forward(self, step):
        prompts.extend(step.prompts)
        return compute(self, step)

    monkeypatch.setattr(CachedDecoder, "forward", forward)

    async def play(engine: EmbeddedEngine):
        await asyncio.gather(
            *(
                engine.generate(prompt, SamplingParams(max_new_tokens=5, seed=i), session=f"{i}")
                for i in range(6)
            )
        )
        late = await engine.generate(prompt, SamplingParams(max_new_tokens=5), session="late")
        return late, engine.stats

    model = decoder()
    late, stats = run(play, model=model)
    assert worst_gap(model, prompt, late) < 1e-4
    # 40 tokens once, and for each of six others the last one again.
    assert stats.prefilled == 40 + 6
    assert stats.reused == 6 * 39
    assert list(map(len, prompts)) == [40]


def test_turn_prefills_new_tokens_only():
    prompt = prompt_of(random.Random(4), 30)

    async def play(engine: EmbeddedEngine):
        params = SamplingParams(max_new_tokens=6, seed=1)
        first = await engine.generate(prompt, params, session="a")
        before = engine.stats.prefilled
        longer = [*prompt, *first.token_ids, 1, 2, 3]
        second = await engine.generate(longer, params, session="a")
        rewritten = [*longer[:20], 9, 9]
        third = await engine.generate(rewritten, params, session="a")
        return before, engine.stats.prefilled, longer, second, rewritten, third

    model = decoder()
    before, after, longer, second, rewritten, third = run(play, model=model)
    # The last sampled token was never fed; then the three new ones; then the rewritten two.
    assert after - before == 4 + 2
    assert worst_gap(model, longer, second) < 1e-4
    assert worst_gap(model, rewritten, third) < 1e-4


def test_nonfinite_weights_fail_the_turn_only():
    good, broken = decoder(), decoder()
    with torch.no_grad():
        broken.lm_head_weight.fill_(torch.nan)

    async def play(engine: EmbeddedEngine):
        await engine.publish(broken.state_dict().items(), 1)
        with pytest.raises(EngineError, match="not finite"):
            await engine.generate([1, 2], SamplingParams())
        await engine.publish(good.state_dict().items(), 2)
        return await engine.generate([1, 2], SamplingParams(seed=0))

    assert worst_gap(good, [1, 2], run(play)) < 1e-4


def test_sessions_share_a_single_slot():
    prompt = prompt_of(random.Random(7), 12)

    async def episode(engine: EmbeddedEngine, name: str) -> float:
        ids, worst = list(prompt), 0.0
        for turn in range(3):
            params = SamplingParams(max_new_tokens=4, seed=turn)
            generation = await engine.generate(ids, params, session=name)
            worst = max(worst, worst_gap(model, ids, generation))
            ids += [*generation.token_ids, 7]
        return worst

    async def play(engine: EmbeddedEngine):
        # No session is released: idle ones have to make room.
        return await asyncio.wait_for(
            asyncio.gather(*(episode(engine, name) for name in "abcd")), timeout=30
        )

    model = decoder()
    assert max(run(play, model=model, num_slots=1)) < 1e-4


def test_turns_of_one_session_run_in_order():
    model = decoder()
    prompts = [prompt_of(random.Random(8), 10), prompt_of(random.Random(9), 14)]

    async def play(engine: EmbeddedEngine):
        turns = [
            asyncio.create_task(
                engine.generate(p, SamplingParams(max_new_tokens=6, seed=0), session="a")
            )
            for p in prompts
        ]
        await asyncio.sleep(0)
        engine.release("a")  # too early: what is in flight still ends
        return await asyncio.wait_for(asyncio.gather(*turns), timeout=30)

    for prompt, generation in zip(prompts, run(play, model=model), strict=True):
        assert worst_gap(model, prompt, generation) < 1e-4


def test_compacted_rows_stay_exact():
    model = decoder()
    rng = random.Random(10)
    prompts = [prompt_of(rng, rng.randint(3, 20)) for _ in range(40)]

    async def two_turns(engine: EmbeddedEngine, index: int):
        # Most are short, and keep their rows; the long ones move to the front.
        length = 60 if index % 10 == 9 else 3
        params = SamplingParams(max_new_tokens=length, seed=index)
        generation = await engine.generate(prompts[index], params, session=str(index))
        longer = [*prompts[index], *generation.token_ids, 5]
        again = await engine.generate(longer, params, session=str(index))
        return max(worst_gap(model, prompts[index], generation), worst_gap(model, longer, again))

    async def play(engine: EmbeddedEngine):
        return await asyncio.gather(*(two_turns(engine, i) for i in range(40)))

    assert max(run(play, model=model, num_slots=40, max_context=200)) < 1e-4


def test_closed_stream_frees_its_row():
    async def play(engine: EmbeddedEngine):
        params = SamplingParams(max_new_tokens=100)
        for _ in range(3 * 8):  # more than there are rows
            async with aclosing(engine.stream([1, 2, 3], params)) as pieces:
                async for _ in pieces:
                    break
        return await engine.generate([1, 2], SamplingParams(max_new_tokens=2))

    assert len(run(play).token_ids) == 2


def test_stream_ends_when_its_engine_closes():
    async def play(engine: EmbeddedEngine):
        stream = engine.stream([1, 2, 3], SamplingParams(max_new_tokens=100))
        await anext(stream)
        await engine.aclose()
        with pytest.raises(EngineError, match="closed"):
            async for _ in stream:
                pass

    run(play)


def test_samples_follow_the_distribution():
    model = decoder()
    expected = logprobs(model, [5, 6])[-1].exp()

    async def play(engine: EmbeddedEngine):
        generations = await asyncio.gather(
            *(
                engine.generate([5, 6], SamplingParams(max_new_tokens=1, seed=i))
                for i in range(4000)
            )
        )
        return (
            torch.bincount(torch.tensor([g.token_ids[0] for g in generations]), minlength=61) / 4000
        )

    frequency = run(play, model=model)
    assert float((frequency - expected).abs().sum()) / 2 < 0.06  # total variation


def test_engine_serves_again_after_a_network_error(monkeypatch):
    async def play(engine: EmbeddedEngine):
        network = engine._scheduler.network
        forward = network.forward

        def broken(*args, **kwargs):
            raise RuntimeError("no luck")

        monkeypatch.setattr(network, "forward", broken)
        with pytest.raises(EngineError, match="no luck"):
            await engine.generate([1, 2], SamplingParams())
        monkeypatch.setattr(network, "forward", forward)
        return await engine.generate([1, 2], SamplingParams())

    model = decoder()
    assert worst_gap(model, [1, 2], run(play, model=model)) < 1e-4


def test_unknown_dtype_is_refused():
    with pytest.raises(ConfigError, match="float13"):
        EmbeddedEngine(decoder(), dtype="float13")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_logprobs_are_exact_on_cuda():
    model = decoder()
    generation = run(
        lambda engine: engine.generate([1, 2, 3], SamplingParams(seed=0)),
        model=model,
        device="cuda",
    )
    assert worst_gap(model, [1, 2, 3], generation) < 1e-3


def test_snapshot_of_a_stopped_engine_is_refused():
    async def play(engine):
        await engine.aclose()
        with pytest.raises(EngineError, match="not running"):
            await engine.snapshot()

    run(play)
