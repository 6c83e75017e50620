import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_gym.chat.tool_call_formats import DIALECTS, parse_assistant
from areal_gym.errors import ConfigError

ANY_TEXT = st.text(st.characters(), max_size=200)  # surrogates too
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)
json_objects = st.dictionaries(ANY_TEXT, json_values, max_size=4)


def hermes(name, arguments):
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def arguments_of(message):
    return [call["function"]["arguments"] for call in message.get("tool_calls", [])]


@given(st.lists(st.tuples(st.text(min_size=1, max_size=10), json_objects), min_size=1, max_size=4))
def test_hermes_calls_round_trip(calls):
    message = parse_assistant("Let me see. " + " then ".join(hermes(n, a) for n, a in calls))
    assert [c["function"]["name"] for c in message["tool_calls"]] == [name for name, _ in calls]
    assert arguments_of(message) == [arguments for _, arguments in calls]
    assert [c["id"] for c in message["tool_calls"]] == [f"call{i:05d}" for i in range(len(calls))]
    assert "parse_error" not in message
    assert "tool_call" not in message["content"]
    assert message["content"].startswith("Let me see.")


@given(json_objects)
def test_arguments_as_json_text_are_decoded(arguments):  # trap 25
    message = parse_assistant(hermes("f", json.dumps(arguments)))
    assert arguments_of(message) == [arguments]


def test_closing_tag_inside_a_string_does_not_end_the_call():
    code = "print('</tool_call>', {1: {2: 3}})"
    message = parse_assistant(hermes("python", {"code": code}) + " bye")
    assert arguments_of(message) == [{"code": code}]
    assert message["content"] == "bye"


def test_text_without_calls_is_unchanged():
    assert parse_assistant("  42 \n") == {"role": "assistant", "content": "  42 \n"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>{'name': 1}</tool_call>", "no JSON"),
        ('<tool_call>{"name": "f"', "no JSON"),
        ('<tool_call>{"name": "f"}', "never closed"),
        ('<tool_call>{"name": "f"} and</tool_call>', "text between"),
        ("<tool_call>[1]</tool_call>", "is an object"),
        ('<tool_call>{"name": 7}</tool_call>', "is an object"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "are an object"),
        ('<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>', "are an object"),
        ('<tool_call>{"name": "f", "arguments": "{} x"}</tool_call>', "after the arguments"),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "NaN is no JSON"),
        ("<tool_call>" + "[" * 100_000, "nested too deeply"),
    ],
)
def test_malformed_hermes_calls_are_explained_and_kept(text, reason):
    message = parse_assistant(text)
    assert reason in message["parse_error"]
    assert message["content"] == text
    assert "tool_calls" not in message


def test_malformed_call_does_not_affect_other_calls():
    message = parse_assistant("<tool_call>oops</tool_call>" + hermes("f", {}))
    assert message["parse_error"]
    assert arguments_of(message) == [{}]
    assert message["content"] == "<tool_call>oops</tool_call>"


def test_fenced_blocks_are_python_calls():
    message = parse_assistant("First\n```python\nx = 1\n```\nthen\n  ```py\nx\n```\nend", "fenced")
    assert arguments_of(message) == [{"code": "x = 1\n"}, {"code": "x\n"}]
    assert message["content"].split() == ["First", "then", "end"]
    assert "never closed" in parse_assistant("```python\nx", "fenced")["parse_error"]
    assert "tool_calls" not in parse_assistant("```text\nx\n```", "fenced")


@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=10), json_objects), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from(["parameters", "arguments"]),
)
def test_llama_calls_round_trip(calls, is_tagged, key):
    written = [json.dumps({"name": name, key: arguments}) for name, arguments in calls]
    text = "<|python_tag|>" * is_tagged + "; ".join(written)
    message = parse_assistant(text, "llama")
    assert [c["function"]["name"] for c in message["tool_calls"]] == [name for name, _ in calls]
    assert arguments_of(message) == [arguments for _, arguments in calls]
    assert message["content"] == ""


@pytest.mark.parametrize("text", ["42", '{"answer": 42}', 'It is {"name": "f"}.', "[1, 2]", ""])
def test_plain_llama_answer_is_not_a_call(text):
    assert parse_assistant(text, "llama") == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<|python_tag|>print(1)", "no JSON"),
        ('{"name": "f", "parameters": {', "no JSON"),
        ('{"name": "f", "parameters": [1]}', "are an object"),
    ],
)
def test_malformed_llama_calls_are_explained_and_kept(text, reason):
    message = parse_assistant(text, "llama")
    assert reason in message["parse_error"]
    assert message["content"] == text


names = st.text(st.sampled_from("abcXYZ_019"), min_size=1, max_size=10)


@given(st.lists(st.tuples(names, json_objects), min_size=1, max_size=4), st.booleans())
def test_mistral_calls_round_trip(calls, is_list):
    if is_list:
        listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
        text = "Let me see.[TOOL_CALLS]" + json.dumps(listed)
    else:
        written = [f"[TOOL_CALLS]{name}[ARGS]{json.dumps(a)}" for name, a in calls]
        text = "Let me see." + "".join(written)
    message = parse_assistant(text, "mistral")
    assert [c["function"]["name"] for c in message["tool_calls"]] == [name for name, _ in calls]
    assert arguments_of(message) == [arguments for _, arguments in calls]
    assert message["content"] == "Let me see."


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[TOOL_CALLS]", "comes a list"),
        ("[TOOL_CALLS][{]", "no JSON"),
        ("[TOOL_CALLS][1]", "is an object"),
        ("[TOOL_CALLS]f[ARGS]{", "no JSON"),
        ("[TOOL_CALLS]f[ARGS]7", "comes a list"),
    ],
)
def test_malformed_mistral_calls_are_explained_and_kept(text, reason):
    message = parse_assistant(text, "mistral")
    assert reason in message["parse_error"]
    assert message["content"] == text


@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        ("<think>\n6*7\n</think>\n\n42", "6*7", "42"),
        ("<think></think>42", "", "42"),
        ("\n<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("<think>never closed, 41", "never closed, 41", ""),
        ("opened by the template</think>42", "opened by the template", "42"),
        ("42 <think>too late</think>", None, "42 <think>too late</think>"),
        ("42", None, "42"),
    ],
)
def test_thinking_is_separated_from_content(text, thought, content):
    message = parse_assistant(text)
    assert message["content"] == content
    assert message.get("reasoning_content") == thought


def test_call_inside_thinking_is_not_a_call():
    message = parse_assistant("<think>" + hermes("f", {}) + "</think>" + hermes("g", {}))
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["g"]


def test_unknown_dialect_is_named():
    with pytest.raises(ConfigError) as caught:
        parse_assistant("x", "hermess")
    assert "did you mean 'hermes'" in caught.value.hints[0]


@given(ANY_TEXT | st.text(st.sampled_from('<tool_cal>/{}":,[]`python\n \\'), max_size=300))
def test_parsing_accepts_any_text(text):
    for dialect in DIALECTS:
        message = parse_assistant(text, dialect)
        assert all(isinstance(a, dict) for a in arguments_of(message))


def test_parsing_takes_linear_time():
    units = [
        "<tool_call>",
        '<tool_call>"</tool_call>',
        '<tool_call>{"name":"a"}</tool_call>',
        '<tool_call>{"a":"</tool_call>',
        "<tool_call>[",
        "```python\n",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]a[ARGS]{}",
        '{"name": "a"};',
        "<think>",
        "</think>",
        "```python\n```\n",
        "\n\t",
        " ",
        "<|channel|>final<|message|>",
        "<|start|>assistant",
        "<|start|>assistant to=f<|message|>{}<|end|>",
        '<|start|>assistant to=f<|message|>{"',
        "<|end|>",
        "<|end|> ",
        "<function=f><parameter=a>",
        "<parameter=a></parameter>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>",
        "<arg_key>a</arg_key><arg_value></arg_value>",
        "<|tool_call_begin|>f:0<|tool_call_argument_begin|>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>f\n```json\n",
        "<|tool_call|>{",
        "functools[",
        "<|python_start|>",
        "[f(a=1), ",
    ]
    size = 150_000
    start = time.process_time()
    for unit in units:
        for dialect in DIALECTS:
            for opening in ("", "<tool_call>", "<|channel|>final<|message|>"):
                parse_assistant(opening + unit * (size // len(unit)), dialect)
    assert time.process_time() - start < 15  # quadratic parsing takes minutes
