"""Streamed text is never revised, and adds up to the whole answer."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from areal_gym.chat.tool_call_formats import DIALECTS
from areal_gym.engines.scripted import ByteTokenizer, byte_renderer
from areal_gym.gateway.text_stream import TextStream, deltas_of

RENDERER = byte_renderer()
PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "<tool_call>",
        "<tool",
        "[TOOL_CALLS]",
        '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
        "```python\nx\n```\n",
        '{"name": "f", "parameters": {}}',
        "\n",
        "  ",
        "é🙂",
        "END",
        "words and words",
        "<|channel|>final<|message|>",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}",
        "<tool_call>f\n</tool_call>",
        "<function=f>\n</function>",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "[f(a=1)]",
        "functools[",
    ]
)


@given(
    pieces=st.lists(PIECES, max_size=8),
    dialect=st.sampled_from(sorted(DIALECTS)),
    stops=st.lists(st.sampled_from(["END", "words", "é"]), max_size=2),
    step=st.integers(1, 7),
)
@example(pieces=["é🙂", "<tool", "words"], dialect="hermes", stops=[], step=1)
def test_streamed_text_adds_up_to_the_parsed_answer(pieces, dialect, stops, step):
    text = "".join(pieces)
    ids = [*text.encode(), ByteTokenizer.eos_token_id]
    reader = TextStream(RENDERER, dialect, stops)
    shown = {"content": "", "reasoning_content": ""}
    num_taken = len(ids)
    for start in range(0, len(ids), step):
        taken = reader.add(ids[start : start + step])
        for kind, new in reader.new_deltas():
            assert new
            shown[kind] += new
        if taken is not None:
            num_taken = start + taken
            break
    places = [text.find(stop) for stop in stops if stop in text]
    if places:
        assert reader.stop is not None
        assert reader.text == text[: min(places)]
        # Sampling ended with the token that completes the stop string: trap 34.
        assert bytes(ids[:num_taken]).decode().endswith(reader.stop)
    message = RENDERER.parse(reader.text if reader.stop else text, dialect)
    before = dict(shown)
    for kind, new in reader.remaining_deltas(message):
        shown[kind] += new
    whole = dict(deltas_of(message))
    content = whole.get("content", "")
    # A closing tag without an opening one makes the text before it a thought, in hindsight.
    opens = (reader.text if reader.stop else text).lstrip().startswith("<think>")
    if opens or "</think>" not in text:
        assert shown["content"] == content
        assert shown["reasoning_content"] == whole.get("reasoning_content", "")
        assert content.startswith(before["content"])


@pytest.mark.parametrize("dialect", [None, "plain"])
def test_plain_text_is_streamed_letter_by_letter(dialect):
    reader = TextStream(RENDERER, dialect)
    shown = []
    for byte in "Größe 🙂!".encode():
        assert reader.add([byte]) is None
        shown += [text for _, text in reader.new_deltas()]
    assert shown == list("Größe 🙂!")


def test_raw_text_is_not_parsed_for_thoughts():
    reader = TextStream(RENDERER, None)
    reader.add(list(b"<think>a</think>b"))
    assert reader.new_deltas() == [("content", "<think>a</think>b")]
