import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from areal_gym.chat import Renderer
from areal_gym.chat.template import BREAK
from areal_gym.engines.scripted import CHATML, ByteTokenizer, byte_renderer
from areal_gym.errors import ConfigError

QWEN_LIKE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- generation %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""A template that groups tool results in one user turn, as Qwen's do."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Naïve 数学",
            "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
        },
    }
    for name in ("zeta", "alpha")
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small BPE tokenizer whose merges cross spaces, with a template beside it."""
    directory = tmp_path_factory.mktemp("checkpoint")
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the answer is 42, the other 7\nuser assistant tool"] * 9, trainer
    )
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    tokenizer.enable_truncation(max_length=8)  # saved by some checkpoints; must be ignored
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": {"content": "<|endoftext|>"}, "bos_token": None}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    (directory / "chat_template.jinja").write_text(QWEN_LIKE)
    return directory


def render_whole(renderer, messages, tools=()):
    """Return the template's text for the whole dialogue."""
    return renderer.render(messages, tools).replace(BREAK, "")


ANY_TEXT = st.text(st.characters(), max_size=40)
reply = st.lists(
    st.fixed_dictionaries({"role": st.just("tool"), "content": ANY_TEXT}), min_size=1, max_size=3
) | st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": ANY_TEXT}), min_size=1, max_size=1
)


@settings(max_examples=60, deadline=None)
@given(
    st.booleans(),
    ANY_TEXT,
    st.lists(st.tuples(st.text("abc <>{}\n7", max_size=20), reply, st.booleans()), max_size=4),
)
def test_bridged_turns_equal_the_rendered_dialogue(checkpoint, has_tools, first, turns):
    renderer = Renderer.from_checkpoint(checkpoint)
    tools = TOOLS if has_tools else []
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": first}]
    text = renderer.tokenizer.decode(renderer.first_ids(messages, tools))
    for answer, new_messages, is_cut in turns:
        messages += [{"role": "assistant", "content": answer}, *new_messages]
        text += answer if is_cut else answer + "<|im_end|>"
        last_id = 5 if is_cut else renderer.end_of_turn_id
        text += renderer.tokenizer.decode(renderer.bridge_ids(last_id, new_messages))
    expected = render_whole(renderer, messages, tools).encode("utf-8", "replace").decode()
    assert text == expected


def test_bridge_is_cached_and_ends_a_truncated_turn(checkpoint):
    renderer = Renderer.from_checkpoint(checkpoint)
    new = [{"role": "tool", "content": "7"}]
    after_stop = renderer.bridge_ids(renderer.end_of_turn_id, new)
    after_cut = renderer.bridge_ids(99, new)
    assert [renderer.end_of_turn_id, *after_stop] == list(after_cut)
    assert renderer.bridge_ids(99, new) == after_cut  # from the cache
    assert renderer.tokenizer.decode(after_stop) == (
        "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_tool_order_is_kept(checkpoint):  # trap 26
    renderer = Renderer.from_checkpoint(checkpoint)
    text = renderer.tokenizer.decode(renderer.first_ids([{"role": "user", "content": "x"}], TOOLS))
    assert text.index("zeta") < text.index("alpha")
    assert "Naïve 数学" in text  # not escaped


def test_stop_tokens_come_from_template_and_checkpoint(checkpoint):
    renderer = Renderer.from_checkpoint(checkpoint)
    assert renderer.end_of_turn_id == 2
    assert renderer.stop_token_ids == (0, 2)
    ids = renderer.tokenizer.encode("the answer")
    assert renderer.decode([*ids, 2]) == "the answer"
    assert renderer.decode([*ids, 0]) == "the answer"
    assert renderer.decode([2, *ids]) == "<|im_end|>the answer"


def test_rendering_agrees_with_transformers(checkpoint):
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(checkpoint / "tokenizer.json"), chat_template=QWEN_LIKE
    )
    call = {"type": "function", "function": {"name": "zeta", "arguments": {"x": 1}}, "id": "1"}
    messages = [
        {"role": "system", "content": "Naïve 数学 🙂"},
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "<b>7</b>"},
    ]
    expected = reference.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    renderer = Renderer.from_checkpoint(checkpoint)
    assert render_whole(renderer, messages, TOOLS) == expected
    plain = messages[:2]
    text = reference.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
    reference.backend_tokenizer.no_truncation()
    assert list(renderer.first_ids(plain)) == reference.backend_tokenizer.encode(text).ids


def test_default_of_several_named_templates_is_used(checkpoint, tmp_path):
    for name in ("tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    templates = [{"name": "rag", "template": "x"}, {"name": "default", "template": QWEN_LIKE}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert Renderer.from_checkpoint(tmp_path).stop_token_ids == (0, 2)


def test_checkpoint_without_tokenizer_or_template_is_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Renderer.from_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match="no chat template") as caught:
        Renderer.from_checkpoint(tmp_path)
    assert "instruction-tuned" in caught.value.hints[0]
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        Renderer.from_checkpoint(tmp_path)


HEADERS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}", "is broken, line 1"),
        ("{{ raise_exception('no roles at all') }}", "no roles at all"),
        ("{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}", "writes nothing"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "end an assistant's turn"),
        ("{% for m in messages %}{{ m.content }}\nend\n{% endfor %}", "end an assistant's turn"),
    ],
)
def test_templates_without_an_end_of_turn_are_refused(template, reason):
    with pytest.raises(ConfigError, match=reason):
        Renderer(ByteTokenizer(), template)


PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    "template",
    [
        # Numbers the turns: what comes after a turn depends on how many came before it.
        HEADERS.replace("{{ m.role }}", "{{ m.role }}{{ loop.index }}"),
        # Forgets all answers but the last one.
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n"
            "{% if m.role != 'assistant' or loop.index0 >= messages | length - 2 %}"
            "{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        ),
    ],
)
def test_templates_that_rewrite_history_are_detected(template):
    renderer = Renderer(ByteTokenizer(), template + PROMPT)
    question = [{"role": "user", "content": "x"}]
    reason = renderer.no_bridge_reason(question, [], question)
    assert "rewrites earlier turns" in reason
    (warning,) = renderer.warnings(question)
    assert "after a message of the user begins a new branch" in warning
    assert reason in warning


def test_template_runs_in_a_sandbox():
    with pytest.raises(ConfigError, match="unsafe"):
        Renderer(ByteTokenizer(), "{{ messages.__class__.__mro__[1].__subclasses__() }}" + CHATML)


def test_remembered_probes_are_bounded():
    renderer = byte_renderer()
    question = [{"role": "user", "content": "2+2?"}]
    for number in range(4200):
        function = {"name": f"tool{number}", "description": "", "parameters": {}}
        renderer.render(question, [{"type": "function", "function": function}])
    assert renderer._tool_support.cache_info().currsize <= 4096
    assert renderer._reason.cache_info().maxsize == 4096


def test_renderer_loads_without_torch_and_transformers(checkpoint):
    code = (
        "import sys; from areal_gym.chat import Renderer;"
        f"Renderer.from_checkpoint({str(checkpoint)!r});"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
