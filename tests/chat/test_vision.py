"""Pictures in dialogues: placeholders by geometry, bridges, probes, and what refuses them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_gym.chat import Dialogue, Renderer
from areal_gym.chat.vision import PatchGrid, Vision
from areal_gym.engines.scripted import byte_renderer
from areal_gym.errors import ConfigError
from areal_gym.message_types import collapsed
from tests._support.tiny_vision import (
    FAMILIES,
    GEMMA_TEMPLATE,
    QWEN_TEMPLATE,
    image_processor,
    save_files,
)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("vision")
    for family in FAMILIES:
        save_files(family, root / family)
    return root


@pytest.fixture(scope="session")
def renderers(checkpoints):
    return {family: Renderer.from_checkpoint(checkpoints / family) for family in FAMILIES}


def image(letter, width=64, height=64):
    sha256 = letter * 64
    return {"type": "image", "sha256": sha256, "width": width, "height": height, "media_type": ""}


def text(said):
    return {"type": "text", "text": said}


def user(*parts):
    return {"role": "user", "content": [text(p) if isinstance(p, str) else p for p in parts]}


@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.sampled_from([(14, 56 * 56, 14 * 14 * 4 * 1280), (16, 65536, 16777216), (8, 256, 16384)]),
)
@settings(max_examples=100, deadline=None)
def test_number_of_placeholders_is_that_of_the_processor(width, height, sizes):
    patch, least, most = sizes
    processor = image_processor("qwen3_vl", patch=patch)
    processor.size = {"shortest_edge": least, "longest_edge": most}
    grid = PatchGrid(patch_size=patch, merge_size=2, min_pixels=least, max_pixels=most)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ConfigError, match="too narrow"):
            grid.size_of(width, height)
        return
    num, (frames, rows, columns) = grid.size_of(width, height)
    assert frames == 1
    assert rows * columns == 4 * num
    assert rows * columns == processor.get_number_of_image_patches(height, width, {})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [(64, 64), (96, 64), (33, 100), (300, 200), (17, 17)])
def test_grids_are_those_of_the_pixels(renderers, family, size):
    from PIL import Image

    num, grid = renderers[family].vision.size_of(image("a", *size))
    made = image_processor(family)(images=[Image.new("RGB", size)], return_tensors="np")
    if family == "gemma3":
        assert (num, grid) == (16, None)
    else:
        assert tuple(made["image_grid_thw"][0].tolist()) == grid
        assert len(made["pixel_values"]) == 4 * num


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_have_all_placeholders_and_the_places_of_pictures(renderers, family):
    renderer = renderers[family]
    messages = [user("Here: ", image("a"), " and ", image("b", 96, 64), " What?")]
    ids, images = renderer.first(messages)
    pad = renderer.vision.placeholder_id
    assert [i.sha256[0] for i in images] == ["a", "b"]
    assert [i.length for i in images] == ([16, 16] if family == "gemma3" else [16, 24])
    for ref in images:
        assert set(ids[ref.start : ref.start + ref.length]) == {pad}
        assert pad not in (ids[ref.start - 1], ids[ref.start + ref.length])
    assert ids.count(pad) == sum(i.length for i in images)
    whole = renderer.tokenizer.decode(collapsed(ids, images))
    assert whole.replace("\n\n", "").count(renderer.vision.placeholder) == 2
    if family == "gemma3":
        begin, end = "<start_of_image>", "<end_of_image>"
        assert f"Here:\n\n{begin}<image_soft_token>{end}\n\nand\n\n{begin}" in whole


@pytest.mark.parametrize("family", FAMILIES)
def test_bridged_turns_with_pictures_equal_the_whole_dialogue(renderers, family):
    renderer = renderers[family]
    dialogue = Dialogue(renderer)
    for turn, letter in enumerate("abc"):
        prompt = dialogue.prompt([user(f"{turn}? ", image(letter, 64, 32 * (turn + 1)))])
        assert prompt.branch == 0
        assert [i.sha256[0] for i in prompt.images] == list("abc"[: turn + 1])
        assert [i.sha256[0] for i in prompt.added_images] == [letter]
        for ref in prompt.added_images:
            span = prompt.added[ref.start : ref.start + ref.length]
            assert set(span) == {renderer.vision.placeholder_id}
        dialogue.answer(prompt, [*renderer.tokenizer.encode("7"), renderer.end_of_turn_id])
    prompt = dialogue.prompt([user("End.")])
    whole = renderer.first([*dialogue.messages, user("End.")])
    assert (prompt.token_ids, prompt.images) == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_marks_of_pictures_in_texts_stay_text(renderers, family):
    renderer = renderers[family]
    vision = renderer.vision
    messages = [
        user(f"{vision.mark}{vision.placeholder}", image("a")),
        {"role": "assistant", "content": f"I see {vision.mark}{vision.placeholder}."},
        user("Again."),
    ]
    ids, images = renderer.first(messages)
    assert len(images) == 1
    assert ids.count(vision.placeholder_id) == images[0].length


def test_equal_ids_with_other_pictures_are_no_continuation(renderers):
    renderer = renderers["qwen3_vl"]
    dialogue = Dialogue(renderer)
    prompt = dialogue.prompt([user("Red? ", image("a"))])
    dialogue.answer(prompt, [*renderer.tokenizer.encode("7"), renderer.end_of_turn_id])
    answer = {"role": "assistant", "content": "7"}
    same = [user("Red? ", image("a")), answer, user("Sure?")]
    other = [user("Red? ", image("b")), answer, user("Sure?")]
    kept = dialogue.prompt(same, replaces_history=True)
    assert (kept.branch, [i.sha256[0] for i in kept.images]) == (0, ["a"])
    forked = dialogue.prompt(other, replaces_history=True)
    assert (forked.branch, [i.sha256[0] for i in forked.images]) == (1, ["b"])
    assert forked.token_ids == kept.token_ids


def result(*parts):
    content = [text(p) if isinstance(p, str) else p for p in parts]
    return {"role": "tool", "content": content, "tool_call_id": "call00000", "name": "crop"}


def test_pictures_of_tool_results_stay_where_the_template_writes_them(renderers):
    renderer = renderers["qwen3_vl"]
    assert renderer.image_roles == {"system", "user", "tool"}
    bridge = renderer.bridge(renderer.end_of_turn_id, [result("cut", image("a"))])
    said = renderer.tokenizer.decode(collapsed(*bridge))
    assert "<|im_start|>tool\ncut<|vision_start|><|image_pad|><|vision_end|><|im_end|>" in said


DROPPING = QWEN_TEMPLATE.replace(
    "{% if p.type == 'image' %}", "{% if m.role == 'user' and p.type == 'image' %}"
)


def test_pictures_that_a_template_drops_follow_in_a_users_message(checkpoints, tmp_path):
    save_files("qwen3_vl", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(DROPPING)
    renderer = Renderer.from_checkpoint(tmp_path)
    assert renderer.image_roles == {"user"}
    reply = [result("cut", image("a")), result("again", image("b", 32, 64))]
    bridge = renderer.bridge(renderer.end_of_turn_id, reply)
    said = renderer.tokenizer.decode(collapsed(*bridge))
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"tool\nagain<|im_end|>\n<|im_start|>user\n{picture * 2}<|im_end|>" in said
    assert [ref.sha256[0] for ref in bridge.images] == ["a", "b"]
    assert renderer.no_bridge_reason([user("x")], (), reply) is None


def test_a_template_that_numbers_pictures_forks(tmp_path):
    save_files("qwen3_vl", tmp_path)
    counting = "{% set n = namespace(value=0) %}" + QWEN_TEMPLATE.replace(
        "<|vision_start|>", "{% set n.value = n.value + 1 %}Picture {{ n.value }}: <|vision_start|>"
    )
    (tmp_path / "chat_template.jinja").write_text(counting)
    renderer = Renderer.from_checkpoint(tmp_path)
    reason = renderer.no_bridge_reason([user("x")], (), [user(image("a"))])
    assert "'3: <|vision_start|>" in reason
    assert renderer.no_bridge_reason([user("x")], (), [user("x")]) is None


def test_a_template_that_drops_all_pictures_refuses_them(tmp_path):
    save_files("gemma3", tmp_path)
    blind = GEMMA_TEMPLATE.replace("<start_of_image>", "")
    (tmp_path / "chat_template.jinja").write_text(blind)
    renderer = Renderer.from_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="drops pictures"):
        renderer.first([user(image("a"))])


def test_a_policy_without_eyes_refuses_pictures():
    with pytest.raises(ConfigError, match="this policy cannot see"):
        byte_renderer().first([user("What?", image("a"))])
    assert byte_renderer().first([user("a", "b")]) == byte_renderer().first([user("ab")])


def test_facts_that_a_checkpoint_lacks_are_named(renderers, tmp_path):
    save_files("qwen3_vl", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="qwen3_vl, and its files do not say 'patch_size'"):
        Renderer.from_checkpoint(tmp_path)


def test_old_and_new_names_of_sizes_are_read(tmp_path):
    import json

    save_files("qwen2_5_vl", tmp_path)
    file = tmp_path / "preprocessor_config.json"
    facts = json.loads(file.read_text())
    size = facts.pop("size")
    old = facts | {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    file.write_text(json.dumps(old))
    one = Renderer.from_checkpoint(tmp_path).vision
    file.unlink()
    new = {"image_processor": facts | {"size": size}}
    (tmp_path / "processor_config.json").write_text(json.dumps(new))
    assert Renderer.from_checkpoint(tmp_path).vision == one
    assert isinstance(one, Vision)
