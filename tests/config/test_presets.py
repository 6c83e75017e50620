"""Presets: what a name fills in, what a choice of one's own replaces, and what is refused."""

from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from areal_gym.config import RolloutConfig, RunConfig, TrainerConfig, load_config
from areal_gym.config.algorithm_settings import PRESETS
from areal_gym.errors import ConfigError
from areal_gym.plugins import registry
from tests._support.paths import ROOT

NAMES = sorted(PRESETS)


def explain(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return "\n".join((str(caught.value), *caught.value.hints))


def trainer(*overrides: str) -> TrainerConfig:
    return load_config(None, [f"trainer.{override}" for override in overrides]).trainer


@pytest.mark.parametrize("name", NAMES)
def test_presets_name_registered_parts(name):
    config = load_config(None, [f"trainer.algorithm={name}"])
    found = registry()
    assert found.load("advantages", config.trainer.advantage)
    assert found.load("losses", config.trainer.loss)
    for group_filter in config.rollout.filters:
        assert found.load("filters", group_filter.id)
    assert PRESETS[name].summary


def test_preset_expansion():
    assert trainer() == trainer("algorithm=grpo")
    assert trainer("algorithm=dr_grpo").aggregation == "constant_length"
    dapo = load_config(None, ["trainer.algorithm=dapo"])
    assert (dapo.trainer.clip_low, dapo.trainer.clip_high) == (0.2, 0.28)
    assert [f.id for f in dapo.rollout.filters] == ["success-rate"]
    assert dapo.trainer.reward.overlong_tail == 0.2
    assert trainer("algorithm=m2po").correction.second_moment == 0.04
    assert trainer("algorithm=reinforce_pp").kl.place == "reward"


def test_chosen_parts_bring_their_own_settings():
    mixed = trainer("algorithm=dapo", "loss=gspo")
    assert (mixed.advantage, mixed.loss) == ("grpo", "gspo")
    assert mixed.clip_high == "default"  # DAPO's is one for a token's ratio
    assert mixed.reward.overlong_tail == 0.2
    assert trainer("algorithm=ppo", "advantage=grpo").advantage_kwargs == {}
    kept = trainer("algorithm=ppo", "advantage_kwargs.lam=0.9").advantage_kwargs
    assert kept == {"is_normalised": True, "lam": 0.9}
    assert trainer("algorithm=reinforce_pp", "kl.coefficient=0.5").kl.estimator == "k1"
    config = load_config(None, ["trainer.algorithm=dapo", "rollout.filters=[]"])
    assert config.rollout.filters == ()


def test_presets_apply_without_a_file():
    assert TrainerConfig(algorithm="gspo").loss == "gspo"
    config = RunConfig(trainer=TrainerConfig(algorithm="dapo"), rollout=RolloutConfig(group_size=4))
    assert [f.id for f in config.rollout.filters] == ["success-rate"]
    assert config.rollout.group_size == 4
    assert RunConfig.model_validate(config) is config


@pytest.mark.parametrize("name", NAMES)
def test_recorded_settings_load_unchanged(name, tmp_path):
    config = load_config(None, [f"trainer.algorithm={name}"])
    recipe = tmp_path / "config.yaml"
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(recipe) == config
    assert load_config(recipe, ["trainer.lr=0.5"]).trainer.advantage == config.trainer.advantage


@given(before=st.sampled_from(NAMES), after=st.sampled_from(NAMES))
def test_changing_the_algorithm_of_recorded_settings_changes_its_parts(before, after):
    chosen = ["trainer.minibatches=3", "trainer.reward.clip=7.0", "rollout.group_size=5"]
    recorded = load_config(None, [f"trainer.algorithm={before}", *chosen]).model_dump(mode="json")
    found = load_config(None, [f"trainer.algorithm={after}"], recorded)
    assert found == load_config(None, [f"trainer.algorithm={after}", *chosen])


def test_changing_the_loss_of_recorded_settings_changes_its_clips():
    recorded = load_config().model_dump(mode="json")
    assert recorded["trainer"]["clip_low"] == 0.2
    found = load_config(None, ["trainer.loss=gspo"], recorded)
    assert found == load_config(None, ["trainer.loss=gspo"])
    recorded = load_config(None, ["trainer.clip_low=0.1"]).model_dump(mode="json")
    assert load_config(None, ["trainer.loss=gspo"], recorded).trainer.clip_low == 0.1


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["trainer.algorithm=drgrpo"], "did you mean 'dr_grpo'"),
        (["trainer.algorithm=xyz"], "available: grpo, "),
        (
            ["trainer.algorithm=dr_grpo", "trainer.advantage=grpo"],
            "does not divide by the standard deviation",
        ),
        (["trainer.algorithm=rloo", "trainer.advantage=lite_ppo"], "algorithm=lite_ppo"),
        (["trainer.loss_kwargs.clip_high=0.0"], "use null"),
        (["trainer.kl.estimator=k1", "trainer.kl.coefficient=0.1"], "gradient whose mean is zero"),
        (
            ["trainer.correction.proximal=recorded", "trainer.correction.upper=2"],
            "without correction",
        ),
        (
            ["trainer.algorithm=m2po", "trainer.correction.proximal=linear"],
            "compares all tokens of a batch",
        ),
        (["trainer.algorithm=m2po", "trainer.correction.proximal=recorded"], "without correction"),
        (["trainer.correction.measure=k2"], "cannot truncate"),
        (["trainer.correction.lower=9"], "must be below upper"),
        (["trainer.correction.second_moment=0"], "greater than 0"),
        (["trainer.reward.clip=0"], "greater than 0"),
        (["trainer.reward.overlong_tail=2"], "at most 1"),
        (
            [
                "trainer.algorithm=dapo",
                "trainer.advantage=reinforce",
                "rollout.group_size=1",
                "rollout.min_group_size=1",
            ],
            "drops every group of one",
        ),
        *(
            (
                [
                    f"trainer.algorithm={name}",
                    "rollout.group_size=1",
                    "rollout.min_group_size=1",
                ],
                "group of one always has advantage 0",
            )
            for name in ("lite_ppo", "reinforce_pp_baseline", "rloo")
        ),
        (["trainer.advantage=per_turn", "rollout.min_group_size=1"], "none to be compared with"),
    ],
)
def test_conflicting_algorithm_settings_are_refused(overrides, reason):
    assert reason in explain(*overrides)


@pytest.mark.parametrize(
    "content",
    [
        "trainer: 3",
        "rollout: []",
        "trainer: {algorithm: [grpo]}",
        "trainer: {algorithm: null}",
        "trainer: {algorithm: grpo, loss: {}}",
        "trainer: {}\nrollout: {filters: 3}",
        "trainer: {kl: 1}",
        "trainer: {reward: null}",
    ],
)
def test_invalid_settings_files_are_explained(tmp_path, content):
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(content)
    for overrides in ([], ["steps=3"]):
        with pytest.raises(ConfigError):
            load_config(recipe, overrides)


def test_estimators_without_siblings_allow_groups_of_one():
    alone = ["rollout.group_size=1", "rollout.min_group_size=1"]
    for name in ("ppo", "reinforce", "reinforce_pp"):
        load_config(None, [f"trainer.algorithm={name}", *alone])
    load_config(
        None, ["trainer.advantage=per_turn", "trainer.advantage_kwargs.baseline=reinforce", *alone]
    )


# ---- the documentation -----------------------------------------------------------------------


def documented(name: str) -> str:
    """The row of `docs/algorithms.md` that says what a preset fills in."""
    preset = PRESETS[name]
    tree = preset.trainer()
    further = {key: tree[key] for key in tree if key not in ("advantage", "loss", "aggregation")}
    settings = yaml.safe_dump(further, default_flow_style=True, width=1000).strip()[1:-1]
    if preset.filters:
        settings += f"; rollout.filters: [{', '.join(preset.filters)}]"
    parts = [f"`{tree[key]}`" for key in ("advantage", "loss", "aggregation")]
    return f"| `{name}` | {' | '.join(parts)} | {settings} |"


def test_preset_table_in_the_documentation_is_up_to_date():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    table = text.split("<!-- presets -->")[1].split("<!-- /presets -->")[0].strip().splitlines()
    assert table[2:] == [documented(name) for name in PRESETS]
    rows = re.findall(r"^\| `(\w+)`", text, re.MULTILINE)
    for name in PRESETS:
        assert rows.count(name) == 3, name  # among formulas and benchmarks, too
