"""The starter policy of environments with pictures: warm start and reinforcement."""

import json
import random

import pytest
import torch
from click.testing import CliRunner

import areal_gym
from areal_gym.chat import Renderer
from areal_gym.chat.dialogue import Dialogue
from areal_gym.cli.app import app
from areal_gym.warm_start import starter_policy
from areal_gym.warm_start.demonstration_rows import demonstrated_row
from areal_gym.warm_start.demonstrations import perfect_demonstration
from areal_gym.warm_start.starter_policy import prepare_starter, shows_pictures
from tests._support.small_vision_starter import SmallVisionRecipe

SETTINGS = (
    *("steps=12", "rollout.max_new_tokens=4", "trainer.lr_schedule=constant"),
    *("eval.num_tasks=64", "eval.every=12", "deterministic=true"),
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AREAL_GYM_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)


def test_small_policy_learns_to_count_by_eye(tmp_path, monkeypatch):
    monkeypatch.setattr(starter_policy, "VisionRecipe", SmallVisionRecipe)
    out = tmp_path / "run"
    done = CliRunner().invoke(app, ["train", "--env", "shapes", *SETTINGS, "--out", str(out)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "making a small policy" in done.output
    assert "blind guesses 0.20" in done.output
    assert "best demonstrator" not in done.output  # it has copied none to the end
    summary = json.loads((out / "summary.json").read_text())
    before, after = (
        (summary[f"heldout_{when}"] + summary[f"heldout_greedy_{when}"]) / 2
        for when in ("before", "after")
    )
    assert before > 0.35  # it has begun to see: guesses earn 0.2
    assert after > before + 0.05
    # Of the warm start's pictures, more than 1,000, the run keeps none.
    assert len(list((out / "images").glob("*/*.png"))) < 500
    assert (out / summary["checkpoint"] / "preprocessor_config.json").is_file()


def test_demonstrations_with_pictures_are_the_rows_that_dialogues_record():
    recipe = SmallVisionRecipe(min_steps=1, max_steps=1, num_probes=1, batch_size=1)
    env = areal_gym.make("shapes", level=4)
    starter = prepare_starter(env, env_key="shapes", seed=0, recipe=recipe)
    renderer = Renderer.from_checkpoint(starter.directory)
    shown = perfect_demonstration(env, random.Random(1))
    (row,) = demonstrated_row(renderer, shown)
    dialogue = Dialogue(renderer)
    messages, is_written = shown.first_messages, []
    for text, reply in zip(shown.texts, [*shown.replies, []], strict=True):
        prompt = dialogue.prompt(messages)
        sampled = [*renderer.tokenizer.encode(text), renderer.end_of_turn_id]
        dialogue.answer(prompt, sampled)
        is_written += [False] * len(prompt.added) + [True] * len(sampled)
        messages = reply
    assert row.token_ids == dialogue.token_ids
    assert row.images == prompt.images
    assert len(row.images) == 3
    assert list(row.mask) == is_written


def test_only_environments_with_pictures_get_a_policy_that_sees():
    assert shows_pictures(areal_gym.make("shapes"))
    assert not shows_pictures(areal_gym.make("tir"))
