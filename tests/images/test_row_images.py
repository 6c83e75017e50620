"""Columns with pictures: bytes, paths and objects, and their places in the prompt."""

import io
import json
from pathlib import Path

import pytest

from areal_gym.envs.prompts import PromptsEnv
from areal_gym.errors import DataError
from areal_gym.images import image_store, use_image_store
from areal_gym.images.row_images import portable_row
from areal_gym.types import images_of, readable
from tests._support.tiny_vision import picture


@pytest.fixture(autouse=True)
def store(tmp_path):
    with use_image_store(tmp_path / "images") as own:
        yield own


def raw(seed, width=64):
    out = io.BytesIO()
    picture(seed, width).save(out, "PNG")
    return out.getvalue()


def opened(row, **kwargs):
    env = PromptsEnv([{**row, "answer": "4"}], "exact", **kwargs)
    env.reset(options={"split": "train", "index": 0})
    return env


@pytest.mark.parametrize(
    "value",
    [
        raw(1),
        picture(1),
        {"bytes": raw(1), "path": None},
        [{"bytes": raw(1), "path": "a.png"}],
        (picture(1),),
    ],
)
def test_forms_of_a_picture_are_the_same_task(value):
    env = opened({"question": "Red?", "images": value})
    (part,) = images_of(env.messages[0]["content"])
    assert part == image_store().add(picture(1))
    assert readable(env.messages[0]["content"]).endswith("]Red?")
    assert env.task.id == opened({"question": "Red?", "images": [raw(1)]}).task.id
    json.dumps(env.task.to_dict())
    assert env.step("4").reward == 1


def test_paths_begin_at_the_file(tmp_path):
    (tmp_path / "shots").mkdir()
    (tmp_path / "shots" / "a.png").write_bytes(raw(3))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "Red?", "answer": "4", "image": "shots/a.png"}))
    env = PromptsEnv(str(rows), "exact")
    env.reset(options={"split": "train", "index": 0})
    assert len(images_of(env.messages[0]["content"])) == 1


def test_marks_say_where_pictures_stand():
    row = {"prompt": "First <image> then <image>.", "images": [raw(1), raw(2, 96)]}
    (message,) = opened(row).messages
    kinds = [part["type"] for part in message["content"]]
    assert kinds == ["text", "image", "text", "image", "text"]
    assert [part["width"] for part in images_of(message["content"])] == [64, 96]
    parts = [{"type": "image"}, {"type": "text", "text": "What?"}]
    row = {"messages": [{"role": "user", "content": parts}], "images": [raw(1)]}
    (message,) = opened(row).messages
    assert [part["type"] for part in message["content"]] == ["image", "text"]


def test_rows_with_equal_texts_and_other_pictures_are_other_tasks():
    rows = [{"prompt": "Red?", "answer": "4", "image": raw(seed)} for seed in range(40)]
    env = PromptsEnv(rows, "exact")
    assert env.num_tasks("train") + env.num_tasks("test") == 40


def test_texts_in_a_column_of_that_name_stay_texts():
    env = opened({"prompt": "Describe <image>.", "image": "a red square"})
    assert env.messages[0]["content"] == "Describe <image>."
    assert env.task.data["image"] == "a red square"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "<image> <image>", "images": [raw(1)]}, "2 marks of pictures, the row 1"),
        ({"prompt": "x", "images": [b"GIF89a"]}, "picture 1: a picture cannot be read"),
        ({"prompt": "x", "image": "missing.png"}, "picture 1: .*missing.png"),
    ],
)
def test_broken_pictures_name_the_row(row, reason):
    with pytest.raises(DataError, match=rf"row 1: .*{reason}"):
        opened(row)


def test_portable_rows_have_absolute_paths_and_leave_addresses():
    folder = Path("/data")
    texts = ["a.png", "16:9.png", "file://b.jpg", "/c.webp", "https://example.org/d.png", "a word"]
    row = portable_row({"images": texts, "title": "a.png"}, folder)
    paths = ["/data/a.png", "/data/16:9.png", "/data/b.jpg", "/c.webp"]
    assert row == {"images": [*paths, *texts[4:]], "title": "a.png"}
