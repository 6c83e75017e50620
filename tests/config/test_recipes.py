"""Every recipe is taken by `train --dry-run`; those of real models carry their plans."""

import json

import pytest

from areal_gym.cli.app import run
from areal_gym.config import load_config
from areal_gym.plan.plan_lines import summary
from tests._support.paths import ROOT
from tests._support.qwen3_shapes import QWEN3, QWEN3_MIXTURES, SEEING, config_json
from tests._support.recipe_plans import REAL, RECIPES, comments_of, planned

EVERY = sorted(RECIPES.glob("**/*.yaml"))


def named(path):
    return path.stem


def model_of(path):
    return load_config(path).engine.model.removeprefix("Qwen3-")


@pytest.mark.parametrize("path", EVERY, ids=named)
def test_recipe_passes_a_dry_run(path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert run(["train", "-c", str(path), "--dry-run"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "# per step" in out
    if path in REAL:  # the model is not here, and nobody goes to fetch it
        assert (
            f"# memory: is told once there is {load_config(path).engine.model}/config.json" in out
        )


# The plan of a large model takes up to a minute; the smallest is checked always.
SHORT = ("gsm8k_0.6b",)
PLANNED = [
    pytest.param(path, marks=[] if path.stem in SHORT else [pytest.mark.long]) for path in REAL
]


@pytest.mark.slow
@pytest.mark.parametrize("path", PLANNED, ids=lambda path: path.stem)
def test_recipe_carries_its_plan(path):
    """Computed again; `python -m tests._support.recipe_plans` writes it."""
    plan, comments = planned(path), comments_of(path)
    assert plan.fits
    for line in summary(plan):
        assert line in comments
    config = load_config(path)
    # The largest row is trained on in one piece, and episodes find room on their servers.
    assert config.trainer.tokens_per_microbatch >= config.engine.max_context
    assert plan.cache_tokens >= 2 * config.engine.max_context
    serving = {gpu for gpus in config.engine.kwargs.get("gpus", ()) for gpu in gpus.split(",")}
    assert not serving & {str(rank) for rank in range(config.trainer.num_ranks)}


@pytest.mark.long
def test_a_dry_run_simulates_a_small_recipe(tmp_path, capsys):
    (path,) = (path for path in REAL if path.stem == "gsm8k_0.6b")
    (tmp_path / "config.json").write_text(json.dumps(config_json("0.6B")))
    words = (f"engine.model={tmp_path}", "engine.max_context=256", "rollout.max_new_tokens=64")
    small = ("trainer.tokens_per_microbatch=256", "trainer.device=cpu")
    assert run(["train", "-c", str(path), "--dry-run", *words, *small]) == 0
    out = capsys.readouterr().out
    assert "# memory: a policy of 0.60 billion parameters; the rank takes" in out
    assert "4.8 states" in out
    assert "# engine: 1.2 GB weights in bfloat16, 115 kB of cache a token" in out


def test_a_dry_run_leaves_large_models_to_the_plan(tmp_path, capsys):
    (path,) = (path for path in REAL if path.stem == "qwen3_30b_a3b_gspo")
    (tmp_path / "config.json").write_text(json.dumps(config_json("30B-A3B")))
    assert run(["train", "-c", str(path), "--dry-run", f"engine.model={tmp_path}"]) == 0
    assert "# memory: a model of 48 layers takes longer" in capsys.readouterr().out


def test_every_size_has_a_recipe():
    assert {model_of(path) for path in REAL} == {*QWEN3, *QWEN3_MIXTURES, *SEEING}
