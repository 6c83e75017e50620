"""Data with pictures, from a file to an update: every form of a picture, and what is refused."""

import base64
import io
import json
from pathlib import Path

import datasets
import pandas
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from areal_gym.cli.app import app
from areal_gym.envs.prompts import PromptsEnv
from areal_gym.errors import DataError
from areal_gym.images import ImageStore, image_store, use_image_store
from areal_gym.runs.interactive.train_arguments import own_settings
from areal_gym.types import images_of
from tests._support.picture_rows import saved_policy
from tests._support.tiny_vision import picture

ROW = {"prompt": "Red?", "answer": "4"}


@pytest.fixture(autouse=True)
def store(tmp_path):
    with use_image_store(tmp_path / "images") as own:
        yield own


def raw(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def seen(data):
    """Return the pictures of the first task."""
    env = PromptsEnv(data, "exact")
    env.reset(options={"split": "train", "index": 0})
    return [part for message in env.messages for part in images_of(message["content"])]


def written(tmp_path, *rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({**ROW, **row}) for row in rows))
    return str(file)


def base64_of(image):
    return base64.b64encode(raw(image)).decode()


URL = "data:image/png;base64," + base64_of(picture(1))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image", "image": "shots/a.png"},
        {"type": "image", "path": "shots/a.png", "text": None},
        {"type": "image", "base64": base64_of(picture(1))},
        {"type": "input_image", "image_url": URL},
    ],
)
def test_parts_of_messages_may_hold_their_picture(tmp_path, part):
    (tmp_path / "shots").mkdir()
    picture(1).save(tmp_path / "shots" / "a.png")
    content = [{"type": "text", "text": "Red?"}, part]
    row = {"prompt": [{"role": "user", "content": content}]}
    assert seen(written(tmp_path, row)) == [image_store().add(picture(1))]


@pytest.mark.parametrize("value", [base64_of(picture(1)), URL, {"image": URL}, ["a.png"]])
def test_columns_of_lines_may_hold_texts_of_pictures(tmp_path, value):
    picture(1).save(tmp_path / "a.png")
    assert seen(written(tmp_path, {"image": value})) == [image_store().add(picture(1))]
    assert seen([{**ROW, "image": tmp_path / "a.png"}]) == [image_store().add(picture(1))]


@pytest.mark.parametrize("is_list", [False, True])
def test_data_sets_with_image_features_keep_bytes(tmp_path, is_list):
    feature = datasets.List(datasets.Image()) if is_list else datasets.Image()
    features = datasets.Features(
        {"images": feature, **{name: datasets.Value("string") for name in ROW}}
    )
    jpeg = {"bytes": raw(picture(1), "JPEG"), "path": None}
    columns = {"images": [[jpeg] if is_list else jpeg], "prompt": ["Red?"], "answer": ["4"]}
    data = datasets.Dataset.from_dict(columns, features=features)
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "rows.parquet")
    places = (data, str(tmp_path / "saved"), str(tmp_path / "rows.parquet"))
    expected = [image_store().add(jpeg["bytes"])]
    assert [seen(place) for place in places] == [expected] * 3
    assert seen(pandas.DataFrame([{**ROW, "images": [jpeg]}])) == expected


def test_a_data_set_of_pictures_alone_keeps_its_rows():
    from areal_gym.tasks import open_rows

    data = datasets.Dataset.from_dict({"image": [picture(1)]}).cast_column(
        "image", datasets.Image()
    )
    (row,) = open_rows(data)
    assert set(row.data["image"]) == {"bytes", "path"}


def test_broken_pictures_of_a_data_set_name_row_and_column():
    names = {name: datasets.Value("string") for name in ROW}
    features = datasets.Features({"image": datasets.Image(), **names})
    good, junk = ({"bytes": each, "path": None} for each in (raw(picture(1)), b"junk"))
    data = datasets.Dataset.from_dict(
        {"image": [good, junk], "prompt": ["a", "b"], "answer": ["4", "4"]}, features=features
    )
    with pytest.raises(DataError, match=r"row 2: column 'image', picture 1: .*not a picture"):
        PromptsEnv(data, "exact")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("none.png", "none.png does not exist; paths begin at"),
        ("text.png", "not a picture"),
        ("folder.png", "folder.png is not a file"),
        ("empty.png", "not a picture"),
        ("a.gif", "of another format"),
        ("https://example.org/a.png", "is not fetched; download it"),
        ("animated.webp", "2 frames"),
        ("huge.png", "too large"),
        (["a.png", None], "picture 2 is missing"),
        (["a.png", 3], "picture 2 is a int"),
    ],
)
def test_bad_files_name_line_and_column(tmp_path, value, reason):
    (tmp_path / "text.png").write_text("no picture at all")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "empty.png").touch()
    picture(1).save(tmp_path / "a.png")
    picture(1).save(tmp_path / "a.gif")
    frames = {"save_all": True, "append_images": [picture(2)]}
    (tmp_path / "animated.webp").write_bytes(raw(picture(1), "WEBP", **frames))
    Image.new("1", (9000, 9000)).save(tmp_path / "huge.png")
    file = written(tmp_path, {"image": "a.png"}, {"image": value})
    with pytest.raises(DataError, match=rf"rows.jsonl, line 2: column 'image', .*{reason}"):
        PromptsEnv(file, "exact")
    # The other rows are not lost: a setting passes over such rows.
    rest = PromptsEnv({"data": file, "skip_broken": True}, "exact")
    assert rest.num_tasks("train") == 1
    assert rest.tasks.num_skipped == 1


@pytest.mark.parametrize(
    ("mode", "color", "expected"),
    [
        ("CMYK", (0, 255, 255, 0), (254, 0, 0)),
        ("I;16", 32768, (127, 127, 127)),
        ("LA", (0, 0), (255, 255, 255)),
        ("P", 0, (0, 0, 0)),
        ("1", 1, (255, 255, 255)),
    ],
)
def test_other_pixels_become_rgb(mode, color, expected):
    (part,) = seen([{**ROW, "image": Image.new(mode, (8, 8), color)}])
    made = Image.open(io.BytesIO(image_store().read(part["sha256"])))
    assert made.mode == "RGB"
    assert made.getpixel((4, 4)) == pytest.approx(expected, abs=1)


def test_a_picture_without_pixels_is_refused():
    with pytest.raises(DataError, match=r"row 1: column 'image', picture 1: .*0 x 5 pixels"):
        seen([{**ROW, "image": Image.new("RGB", (0, 5))}])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "<image>Red?", "image": None},
        {"prompt": "<image>Red?", "images": []},
        {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
    ],
)
def test_marks_without_pictures_are_refused(row):
    with pytest.raises(DataError, match=r"row 1: .*(marks|places) of pictures"):
        seen([{**ROW, **row}])


def test_command_line_trains_on_a_saved_data_set_with_pictures(tmp_path):
    torch.set_num_threads(1)
    saved_policy("qwen3_vl", tmp_path / "policy")
    features = datasets.Features(
        {"image": datasets.Image(), **{name: datasets.Value("string") for name in ROW}}
    )
    jpegs = [{"bytes": raw(picture(seed), "JPEG"), "path": None} for seed in range(8)]
    texts = {"prompt": ["<image>Red?"] * 8, "answer": [str(seed) for seed in range(8)]}
    data = datasets.Dataset.from_dict({"image": jpegs, **texts}, features=features)
    data.save_to_disk(tmp_path / "saved")
    out = tmp_path / "run"
    words = ["train", "--data", str(tmp_path / "saved"), "--reward", "exact", "--out", str(out)]
    settings = ["steps=1", "rollout.group_size=2", "rollout.batch_groups=2", "guard.action=ignore"]
    settings += ["rollout.max_new_tokens=2", "eval.num_tasks=0", "rollout.filters=[]"]
    model = ["--model", str(tmp_path / "policy")]
    for clean in ([], ["--clean"]):  # pictures that were read before are not cleaned away
        done = CliRunner().invoke(app, [*words, *model, *settings, *clean])
        assert done.exit_code == 0, (done.output, done.exception)
    (line,) = (out / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 1
    names = json.loads((out / "trajectories" / "step-000001.jsonl").read_text().splitlines()[0])
    assert any(part["type"] == "image" for part in names["messages"][0]["content"])
    assert len(list(ImageStore(out / "images"))) >= 2


PILLOW = picture(7)
IN_MEMORY = {
    "Pillow": {"image": PILLOW},
    "bytes": {"images": [raw(PILLOW)]},
    "a relative path": {"image": "here.png"},
    "a Path": {"image": Path("here.png")},
    "an object": {"image": {"bytes": raw(PILLOW), "path": "elsewhere.png"}},
    "a part": {"prompt": [{"role": "user", "content": [{"type": "image", "image": PILLOW}]}]},
    "bytes of a part": {
        "prompt": [{"role": "user", "content": [{"type": "image", "bytes": raw(PILLOW)}]}]
    },
}


@pytest.mark.parametrize("form", IN_MEMORY)
def test_rows_in_memory_are_trained_on_with_their_pictures(form, tmp_path, monkeypatch):
    """`areal_gym.train(data=rows)` writes rows to a file, from which a run can go on."""
    monkeypatch.chdir(tmp_path)
    PILLOW.save("here.png")
    given = {"data": [{**ROW, **IN_MEMORY[form]}], "reward": "exact"}
    tree = own_settings(**given, tools=None, model=None, env=None, settings={})
    monkeypatch.chdir("/")
    (shown,) = seen(tree["env"]["kwargs"]["tasks"])
    assert shown == image_store().add(PILLOW)


def test_rows_whose_other_columns_are_no_text_are_still_refused():
    rows = [{**ROW, "image": PILLOW, "extra": b"1"}]
    with pytest.raises(DataError, match="row 1: a bytes cannot be recorded"):
        own_settings(data=rows, reward="exact", tools=None, model=None, env=None, settings={})
