"""Files of dialogues and preferences: what is read, and what errors say."""

import json

import pytest

from areal_gym.chat import Renderer
from areal_gym.errors import DataError, NothingToDoError
from areal_gym.trainer.batch.dialogue_files import encode, read_file
from tests._support import tiny_vision

ASKED = {"role": "user", "content": "2+2?"}
SAID = {"role": "assistant", "content": "4"}


@pytest.fixture
def renderer(tiny_policy):
    return Renderer.from_checkpoint(tiny_policy)


def file_of(tmp_path, *rows):
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return file


def test_read_dialogues(tmp_path, renderer):
    call = {"type": "function", "function": {"name": "python", "arguments": '{"code": "2+2"}'}}
    rows = [
        {"messages": [ASKED, SAID]},
        "",
        {
            "messages": [
                ASKED,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "4", "tool_call_id": "x"},
                SAID,
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "python",
                        "parameters": {
                            "type": "object",
                            "properties": {"code": {"type": "string"}},
                        },
                    },
                }
            ],
        },
    ]
    found = read_file(file_of(tmp_path, *rows), is_preference=False)
    assert [item.where.rpartition(", ")[2] for item in found] == ["line 1", "line 3"]
    assert found[1].messages[1]["tool_calls"][0]["function"]["arguments"] == {"code": "2+2"}
    examples = encode(found, renderer, max_context=1000).examples
    (first,), (second,) = examples
    assert (
        renderer.decode([i for i, m in zip(first.token_ids, first.mask, strict=True) if m]) == "4"
    )
    assert '"code": "2+2"' in renderer.tokenizer.decode(second.token_ids)
    assert '"name": "python"' in renderer.tokenizer.decode(second.token_ids).partition("2+2?")[0]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        {"messages": [ASKED], "chosen": SAID, "rejected": {"role": "assistant", "content": "5"}},
        {"prompt": [ASKED], "chosen": [SAID], "rejected": "5"},
    ],
)
def test_read_preferences(tmp_path, renderer, row):
    data = read_file(file_of(tmp_path, row), is_preference=True)
    ((chosen, rejected),) = encode(data, renderer, max_context=200).examples
    prompt = renderer.first_ids([ASKED])
    for one, said in ((chosen, "4"), (rejected, "5")):
        assert one.token_ids[: one.num_shared] == prompt
        marked = [i for i, m in zip(one.token_ids, one.mask, strict=True) if m]
        assert renderer.decode(marked) == said
        assert marked[-1] == renderer.end_of_turn_id == one.token_ids[-1]
    ((closed, _),) = encode(data, renderer, max_context=200, has_closing=True).examples
    text = renderer.template.render([ASKED, SAID], adds_prompt=False)
    assert renderer.tokenizer.decode(closed.token_ids) == text


def test_too_long_dialogues_are_skipped_and_counted(tmp_path, renderer):
    long = {"messages": [ASKED, {"role": "assistant", "content": "4" * 300}]}
    data = read_file(file_of(tmp_path, long, {"messages": [ASKED, SAID]}), is_preference=False)
    found = encode(data, renderer, max_context=200)
    assert (len(found), found.num_too_long) == (1, 1)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{", "line 2: not valid JSON"),
        ("[]", "line 2: a row is an object, not list"),
        ({"message": [ASKED]}, "line 2: no field 'messages'"),
        ({"messages": "hm", "tools": 3}, "line 2: tools is 3"),
        ({"messages": []}, "line 2: messages is ..; a list of messages"),
        ({"messages": [ASKED, {"role": "asistant", "content": "4"}]}, "no role 'asistant'"),
        ({"messages": [{"role": "user", "content": [1]}, SAID]}, r"messages\[0\]: content is .1."),
        ({"messages": [ASKED, {**SAID, "tool_calls": [{"function": 1}]}]}, "is not a tool call"),
        ({"messages": [ASKED], "chosen": "4", "rejected": "5"}, "a preference, not a dialogue"),
    ],
)
def test_broken_lines_are_reported_by_number(tmp_path, row, complaint):
    file = file_of(tmp_path, {"messages": [ASKED, SAID]}, row)
    with pytest.raises(DataError, match=complaint) as error:
        read_file(file, is_preference=False)
    assert str(file) in str(error.value)


def test_mistyped_field_gets_a_suggestion(tmp_path):
    row = {"prompt": "2+2?", "choosen": "4", "rejected": "5"}
    with pytest.raises(DataError, match="no field 'chosen'") as error:
        read_file(file_of(tmp_path, row), is_preference=True)
    assert "choosen" in error.value.hints[0]


@pytest.mark.parametrize(
    ("row", "is_preference", "complaint"),
    [
        ({"messages": [ASKED]}, False, "line 1: the assistant says nothing"),
        ({"messages": [SAID]}, False, "line 1: the assistant speaks first"),
        ({"prompt": "x", "chosen": "4", "rejected": "4"}, True, "line 1: chosen and rejected are"),
        ({"prompt": "x", "chosen": [ASKED], "rejected": "4"}, True, "line 1: the assistant says"),
    ],
)
def test_dialogues_without_trained_tokens_are_refused(
    tmp_path, renderer, row, is_preference, complaint
):
    data = read_file(file_of(tmp_path, row), is_preference=is_preference)
    with pytest.raises(DataError, match=complaint):
        encode(data, renderer, max_context=200)


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*nothing\.jsonl"):
        read_file(tmp_path / "nothing.jsonl", is_preference=False)
    with pytest.raises(NothingToDoError, match="no rows"):
        read_file(file_of(tmp_path, "", ""), is_preference=False)


def test_dialogues_with_pictures_become_rows_with_their_places(tmp_path):
    tiny_vision.save_files("qwen3_vl", tmp_path / "policy")
    seeing = Renderer.from_checkpoint(tmp_path / "policy")
    pictures = [tmp_path / "a.png", tmp_path / "b.png"]
    for seed, picture in enumerate(pictures):
        tiny_vision.picture(seed).save(picture)
    answer = {"role": "assistant", "content": "2"}
    marked = [{"role": "user", "content": "Now <image> and then <image>?"}, answer]
    parts = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    rows = [
        {"messages": marked, "images": ["a.png", "b.png"]},
        {"messages": [{"role": "user", "content": parts}, answer], "image": "a.png"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    examples = encode(read_file(file, is_preference=False), seeing, max_context=512).examples
    (two,), (one,) = examples
    assert [len(row.images) for row in (two, one)] == [2, 1]
    assert one.images[0].sha256 == two.images[0].sha256 != two.images[1].sha256
    pad = seeing.vision.placeholder_id
    for row in (two, one):
        for image in row.images:
            assert set(row.token_ids[image.start : image.start + image.length]) == {pad}
        assert row.token_ids.count(pad) == sum(image.length for image in row.images)
        assert sum(row.mask) == 2


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "places of pictures"),
        ({"messages": "<image>?", "images": ["none.png"]}, "picture 1"),
    ],
)
def test_rows_whose_pictures_are_missing_are_reported(tmp_path, row, complaint):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    with pytest.raises(DataError, match=f"line 1.*({complaint})"):
        read_file(file, is_preference=False)
