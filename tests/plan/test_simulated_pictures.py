"""A simulated step of a model that sees takes what a real one takes."""

import pytest
from transformers import AutoConfig

from areal_gym.images import use_image_store
from areal_gym.plan.run_plan import plan_run
from areal_gym.plan.simulated_pictures import planned_pictures
from areal_gym.plan.simulated_step import simulate_step
from tests._support.measured_steps import assert_alike, peak_of_a_real_step, settings
from tests._support.picture_rows import saved_policy
from tests._support.tiny_architectures import tiny_config
from tests._support.tiny_vision import config as config_of
from tests._support.tiny_vision import tokenizer

SMALL = "images.max_pixels=12000"
"""Less than the tiny processors take, so that a picture has the patches that are planned."""
FULL, PROJECTOR = "trainer.vision=full", "trainer.vision=projector"
SHORT = [("qwen2_5_vl", ()), ("qwen3_vl", (FULL,)), ("gemma3", ())]
LONG = [
    ("qwen2_5_vl", (FULL,)),
    ("gemma3", (FULL,)),
    ("qwen3_vl", (PROJECTOR, "trainer.recompute_layers=true")),
    ("qwen3_vl", ("trainer.lora.rank=4", "trainer.kl.coefficient=0.1")),
    ("qwen2_5_vl", ("objective=dpo", "trainer.tokens_per_microbatch=1024")),
]


@pytest.mark.parametrize(
    ("family", "overrides"),
    [*SHORT, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)],
)
def test_every_part_of_a_step_with_pictures_is_simulated(family, overrides, tmp_path):
    directory = saved_policy(family, tmp_path / "policy")
    config, model = settings(SMALL, *overrides), AutoConfig.from_pretrained(directory)
    pictures = planned_pictures(config, model)
    with use_image_store(tmp_path / "images"):
        real = peak_of_a_real_step(0, directory, SMALL, *overrides, pictures=pictures)
    step = simulate_step(config, model, is_cpu=True)
    assert step.num_patches == pictures.patches_per_microbatch > 0
    assert_alike(step.peak, real)
    assert ("frozen" in step.peak) == (FULL not in overrides)


def planned(family, *overrides):
    words = tokenizer(family)
    return planned_pictures(settings(SMALL, *overrides), config_of(family, words))


def test_a_micro_batch_is_as_full_of_pictures_as_its_limits_allow():
    # Prompts of 191 tokens, in two rows; pictures of 35 placeholders, or of 16.
    qwen = planned("qwen3_vl")
    assert (qwen.length, qwen.num_patches) == (35, 140)
    assert (qwen.num_rows, qwen.num_each) == (2, 5)
    gemma = planned("gemma3")
    assert (gemma.length, gemma.num_patches, gemma.num_each) == (16, 64, 11)
    fewer = planned("qwen3_vl", "trainer.patches_per_microbatch=700")
    assert fewer.patches_per_microbatch <= 700 < fewer.patches_per_microbatch + 2 * 140
    assert planned("qwen3_vl", "trainer.patches_per_microbatch=200").num_rows == 1
    assert planned("qwen3_vl", "images.max_images=3").num_each == 3


def test_texts_show_no_pictures():
    assert planned_pictures(settings(), tiny_config("qwen3")) is None
    assert planned("qwen3_vl", "objective=rm") is None
    assert planned("gemma3", "engine.max_context=16", "rollout.max_new_tokens=8") is None


def test_a_plan_counts_the_tower_by_patches(tmp_path):
    words = tokenizer("qwen3_vl")
    config_of("qwen3_vl", words).save_pretrained(tmp_path)

    def plan(patches):
        config = settings(SMALL, f"engine.model={tmp_path}")
        return plan_run(config, gpu="h100-80gb", patches_per_task=patches)

    texts, few, many = plan(0), plan(100), plan(300)  # a picture has 140
    assert texts.num_active_parameters < texts.num_parameters
    assert texts.step_flops < few.step_flops < many.step_flops
    assert many.step_flops - texts.step_flops == pytest.approx(
        3 * (few.step_flops - texts.step_flops)
    )
