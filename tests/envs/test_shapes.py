"""`shapes`: an environment that needs eyes, and the rule that finds out whether it does."""

import asyncio
import json
from dataclasses import replace

import pytest

from areal_gym.agents.chat import ChatAgent
from areal_gym.chat import Renderer
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.checker import check_env
from areal_gym.envs.shape_puzzles import puzzles_of
from areal_gym.envs.shapes import ShapesEnv
from areal_gym.errors import UsageError
from areal_gym.images import (
    hashes_of,
    image_limits,
    image_store,
    set_image_limits,
    use_image_store,
)
from areal_gym.rollout.episode import play_episode
from areal_gym.rollout.group_json import dump_row, pack_group, unpack_group
from areal_gym.types import Group, Task, images_of, text_of
from tests._support.tiny_vision import save_files


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_every_level_keeps_the_contract_and_needs_eyes(level):
    results = check_env(ShapesEnv, kwargs={"level": level}, num_tasks=8, num_concurrent=16)
    assert [result for result in results if not result.is_ok] == []
    assert "guessing earns" in {result.rule: result for result in results}["blind"].measured


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_answers_are_equally_often_right_whatever_the_text_says(level):
    counts = {}
    for seed in range(3000):
        for puzzle in puzzles_of(level, seed):
            if len(puzzle.answers) < 20:
                counts.setdefault(puzzle.answers[0], {}).setdefault(puzzle.answer, 0)
                counts[puzzle.answers[0]][puzzle.answer] += 1
    for per_answer in counts.values():
        expected = sum(per_answer.values()) / len(per_answer)
        assert all(abs(n - expected) < 5 * expected**0.5 for n in per_answer.values())


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_equal_seeds_draw_equal_pictures_and_others_others(level, tmp_path):
    with use_image_store(tmp_path) as store:
        hashes = [store.add(puzzles_of(level, seed)[0].draw())["sha256"] for seed in (5, 5, 6)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_siblings_share_a_drawing_while_it_is_in_the_store_and_has_the_right_size(tmp_path):
    def picture():
        env = ShapesEnv()
        _, info = env.reset(seed=0)
        return info["messages"][-1]["content"][0]

    with use_image_store(tmp_path) as store:
        first = picture()
        assert picture() == first
        assert store.remove_all_but([]) == 1
        assert picture() == first
        assert first["sha256"] in store
        before = image_limits()
        set_image_limits(replace(before, max_pixels=32 * 32))
        try:
            assert picture()["width"] == 32
        finally:
            set_image_limits(before)


def test_red_squares_are_where_the_answer_says():
    red = (220, 40, 40)
    for seed in range(50):
        (puzzle,) = puzzles_of(1, seed)
        canvas = puzzle.draw()
        cells = [
            canvas.crop((x, y, x + 16, y + 16)) for x in range(0, 64, 16) for y in range(0, 64, 16)
        ]
        has_red = [red in {color for _, color in cell.getcolors()} for cell in cells]
        assert sum(has_red) == int(puzzle.answer)


@pytest.mark.parametrize(
    ("said", "reward"),
    [("{}", 1.0), ("I see {} of them.", 1.0), ("0 1 2 3 4 9", 0.0), ("", 0.0), ("{}, or 7", 0.0)],
)
def test_the_last_number_is_the_answer(said, reward):
    env = ShapesEnv()
    env.reset(seed=0)
    assert env.step(said.format(env.gold_action())).reward == reward


def test_unknown_levels_are_refused():
    with pytest.raises(UsageError, match="no level 5"):
        ShapesEnv(level=5)


class Leaking(TextEnv):
    """Shows a picture, and says what is on it in a file's name."""

    blind_reward = 0.5

    def sample_task(self, rng, options):
        index = options.get("index", int(rng.integers(1000)))
        split = options.get("split", "train")
        return Task(id=f"{split}/{index}", data={"index": index}, split=split)

    def first_messages(self, task):
        picture = image_store().add(puzzles_of(1, task.data["index"])[0].draw())
        text = {"type": "text", "text": f"picture{task.data['index']}_{self.gold_action()}.png?"}
        return [{"role": "user", "content": [picture, text]}]

    async def respond(self, message):
        is_right = text_of(message["content"]) == self.gold_action()
        return Response(reward=float(is_right), is_terminated=True)

    def gold_action(self):
        return "yes" if (self.task.data["index"] * 7919) % 100 < 50 else "no"


def test_an_answer_in_the_text_is_found():
    (blind,) = [r for r in check_env(Leaking, num_tasks=4) if r.rule == "blind"]
    assert not blind.is_ok
    assert "earns 1.000; guessing earns 0.500" in blind.reason


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    root = tmp_path_factory.mktemp("qwen3_vl")
    save_files("qwen3_vl", root)
    return Renderer.from_checkpoint(root)


def play(renderer, *, level, seed, replies):
    engine = ScriptedEngine(
        replies, tokenizer=renderer.tokenizer, end_of_turn_id=renderer.end_of_turn_id
    )
    env = ShapesEnv(level=level)
    return asyncio.run(play_episode(env, ChatAgent(), engine, renderer, seed=seed))


def gold(level, seed):
    env = ShapesEnv(level=level)
    env.reset(seed=seed)
    data = env.task.data
    return [puzzle.answer for puzzle in puzzles_of(data["level"], data["seed"])]


def test_several_turns_with_a_picture_each_are_recorded(renderer, tmp_path):
    with use_image_store(tmp_path):
        played = play(renderer, level=4, seed=3, replies=gold(4, 3))
        assert (played.reward, len(played.turns), played.num_forks) == (1.0, 3, 0)
        origins = [(span.origin, len(span.images)) for span in played.spans]
        sampled, shown_next = ("policy", 0), ("env", 1)
        assert origins == [("prompt", 1), sampled, shown_next, sampled, shown_next, sampled]
        shown = [p["sha256"] for m in played.messages for p in images_of(m["content"])]
        assert [i.sha256 for span in played.spans for i in span.images] == shown
        pad = renderer.vision.placeholder_id
        for span in played.spans:
            for image in span.images:
                # 96 x 96 pixels are 6 x 6 placeholders of 16 pixels.
                assert (image.length, image.grid) == (36, (1, 12, 12))
                ids = span.token_ids[image.start : image.start + image.length]
                assert list(ids) == [pad] * 36
        assert hashes_of(played) == set(shown) == set(image_store())


def test_the_journal_keeps_pictures_by_hash(renderer, tmp_path):
    with use_image_store(tmp_path):
        played = play(renderer, level=4, seed=4, replies=gold(4, 4))
        group = Group(id="g", task=played.task, trajectories=(played,))
        row = dump_row(pack_group(group))
        assert unpack_group(json.loads(row)) == group
        assert b'"images"' in row
        assert len(row) < 6000, "no pixels"


def test_a_policy_without_eyes_is_told_so(tmp_path):
    with (
        use_image_store(tmp_path),
        pytest.raises(UsageError, match="has pictures, and this policy cannot see"),
    ):
        play(byte_renderer(), level=1, seed=0, replies=["3"])


def test_an_engine_of_texts_is_told_so(renderer, tmp_path):
    class Blind(ScriptedEngine):
        takes_images = False

    engine = Blind(["3"], tokenizer=renderer.tokenizer)
    with (
        use_image_store(tmp_path),
        pytest.raises(UsageError, match="Blind takes only text"),
    ):
        asyncio.run(play_episode(ShapesEnv(), ChatAgent(), engine, renderer))
