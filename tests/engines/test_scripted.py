import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ByteTokenizer, ScriptedEngine
from areal_gym.errors import EngineError
from areal_gym.types import FinishReason

END = ByteTokenizer.eos_token_id
PARAMS = SamplingParams(max_new_tokens=20, stop_token_ids=(END,))


def ask(engine, prompt=(1, 2), params=PARAMS, **options):
    return asyncio.run(engine.generate(prompt, params, **options))


def test_each_session_plays_the_script_from_its_start():
    engine = ScriptedEngine(["one", "two"])
    decode = engine.tokenizer.decode
    assert [decode(ask(engine, session=s).token_ids) for s in "aba"] == [
        "one<|im_end|>",
        "one<|im_end|>",
        "two<|im_end|>",
    ]
    with pytest.raises(EngineError, match="2 replies"):
        ask(engine, session="a")
    engine.release("a")
    engine.release("never seen")
    assert decode(ask(engine, session="a").token_ids) == "one<|im_end|>"
    assert engine.num_calls == 5


def test_script_function_gets_prompt_and_turn():
    engine = ScriptedEngine(lambda q: f"{q.text}{q.turn}")
    generation = ask(engine, tuple(b"hi"), session="a")
    assert generation.token_ids == (*b"hi0", END)
    assert generation.finish_reason is FinishReason.STOP
    assert len(generation.logprobs) == len(generation.versions) == 4


def test_weights_published_within_a_turn_stamp_its_second_half():
    async def scenario():
        engine = ScriptedEngine(["abc"], latency_s=0.01)
        turn = asyncio.create_task(engine.generate([1], PARAMS))
        await asyncio.sleep(0)
        await engine.publish(iter([]), 5)
        return (await turn).versions

    assert asyncio.run(scenario()) == (0, 0, 5, 5)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_byte_tokenizer_round_trips(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.integers(0, 258)), st.text(st.characters()))
def test_byte_tokenizer_accepts_any_text_and_ids(ids, text):
    tokenizer = ByteTokenizer()
    assert isinstance(tokenizer.decode(ids), str)
    assert all(0 <= i < tokenizer.vocab_size for i in tokenizer.encode(text))


def test_control_tokens_are_single_ids():
    ids = ByteTokenizer().encode("<|im_start|>user\n<|im_end|>")
    assert ids == [256, *b"user\n", 257]
