"""Limits of pictures are settings: what is scaled, what is refused, and where they hold."""

import asyncio
import io

import pytest
from PIL import Image
from pydantic import ValidationError

from areal_gym.chat import Renderer
from areal_gym.chat.dialogue import Dialogue
from areal_gym.config import RunConfig
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.envs.prompts import PromptsEnv
from areal_gym.errors import DataError, UsageError
from areal_gym.images import (
    ImageLimits,
    image_limits,
    image_store,
    read_image,
    set_image_limits,
    use_image_store,
)
from areal_gym.recording import ContextFullError, Recorder
from areal_gym.runs.components import Components
from areal_gym.types import images_of
from tests._support import tiny_vision
from tests._support.tiny_vision import picture


@pytest.fixture(autouse=True)
def store(tmp_path):
    before = image_limits()
    with use_image_store(tmp_path / "images") as own:
        yield own
    set_image_limits(before)


def png(width, height):
    out = io.BytesIO()
    picture(1, width, height).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(
    ("limits", "size", "fitted"),
    [
        ({}, (640, 480), (640, 480)),
        ({"max_pixels": 76_800}, (640, 480), (320, 240)),
        ({"max_pixels": 76_800}, (300, 200), (300, 200)),
        ({"min_pixels": 4096}, (16, 16), (64, 64)),
        ({"min_pixels": 4096}, (64, 64), (64, 64)),
        ({"max_pixels": 100, "min_pixels": 50}, (2000, 1), (100, 1)),
        ({"max_pixels": 100}, (1, 2000), (1, 100)),
        ({"max_pixels": 1}, (640, 480), (1, 1)),
    ],
)
def test_pictures_are_scaled_in_proportion(limits, size, fitted):
    limits = ImageLimits(**limits)
    assert limits.fitted(*size) == fitted
    made, *read_size = read_image(png(*size), limits)
    assert tuple(read_size) == Image.open(io.BytesIO(made)).size == fitted
    assert read_image(made, limits)[0] == made  # sent again, it is the same


@pytest.mark.parametrize("side", range(1, 60, 7))
def test_no_scaled_picture_is_beyond_its_limit(side):
    limits = ImageLimits(max_pixels=777, min_pixels=300)
    for other in (1, 5, 19, 37, 400):
        width, height = limits.fitted(side, other)
        assert width * height <= 777
        assert width * height >= 300 or side * other > 777


def width_of(env):
    env.reset(options={"split": "train", "index": 0})
    (image,) = images_of(env.messages[0]["content"])
    return image["width"]


def settings(tmp_path, **images):
    picture(1, 96, 96).save(tmp_path / "a.png")
    rows = [{"prompt": "Red?", "image": str(tmp_path / "a.png"), "answer": "1"}]
    kwargs = {"tasks": rows, "reward": "exact"}
    return RunConfig.model_validate({"env": {"id": "prompts", "kwargs": kwargs}, "images": images})


def test_a_run_reads_its_data_within_its_limits(tmp_path):
    assert width_of(Components.of(settings(tmp_path)).make_env()) == 96
    scaled = Components.of(settings(tmp_path, max_pixels=48 * 48)).make_env()
    assert width_of(scaled) == 48  # rows that were read before are read anew
    assert image_store().add(picture(2, 96, 96))["width"] == 48  # as those of environments
    assert width_of(Components.of(settings(tmp_path, min_pixels=192 * 192)).make_env()) == 192
    with pytest.raises(DataError, match=r"row 1: .*96 x 96 pixels is too large; at most 9,000 "):
        Components.of(settings(tmp_path, max_source_pixels=9_000))
    with pytest.raises(DataError, match=r"row 1: .*bytes is too large; at most 100 "):
        Components.of(settings(tmp_path, max_bytes=100))


def test_file_data_is_read_anew_with_other_limits(tmp_path):
    picture(1, 96, 96).save(tmp_path / "a.png")
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "Red?", "image": "a.png", "answer": "1"}')
    assert width_of(PromptsEnv(str(file), "exact")) == 96
    set_image_limits(ImageLimits(max_pixels=48 * 48))
    assert width_of(PromptsEnv(str(file), "exact")) == 48


def test_limits_that_exclude_each_other_are_refused():
    with pytest.raises(ValidationError, match="no picture would do"):
        RunConfig.model_validate({"images": {"min_pixels": 100, "max_pixels": 50}})


def test_pillow_images_have_limits_too():
    with pytest.raises(UsageError, match="3,000 x 3,000 pixels is too large"):
        image_store().add(Image.new("RGB", (3000, 3000)))


def test_prompts_with_too_many_pictures_are_not_sampled(tmp_path):
    tiny_vision.save_files("qwen3_vl", tmp_path / "policy")
    renderer = Renderer.from_checkpoint(tmp_path / "policy")
    end = {"end_of_turn_id": renderer.end_of_turn_id, "tokenizer": renderer.tokenizer}
    recorder = Recorder(ScriptedEngine(lambda question: "2", **end), renderer, SamplingParams())
    images = [image_store().add(picture(seed)) for seed in range(3)]

    def ask(number):
        content = [*images[:number], {"type": "text", "text": "Red?"}]
        dialogue = Dialogue(renderer)
        prompt = dialogue.prompt([{"role": "user", "content": content}])
        return asyncio.run(recorder.sample(dialogue, prompt))

    set_image_limits(ImageLimits(max_images=2))
    assert ask(2)[0]["content"] == "2"
    with pytest.raises(ContextFullError, match=r"3 images, and images.max_images is 2"):
        ask(3)
