"""Settings: precedence, overrides, and errors that say what to type next."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from areal_gym.config import STARTER_DEFAULTS, RunConfig, field_names, load_config, parse_override
from areal_gym.config.setting_errors import _ELSEWHERE
from areal_gym.errors import ConfigError


def explain(*overrides, file=None):
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    assert caught.value.exit_code == 2
    return "\n".join((str(caught.value), *caught.value.hints))


def test_defaults_need_nothing_and_depend_on_the_policy():
    starter = load_config()
    assert starter.trainer.optimizer == "muon"
    assert starter.steps == STARTER_DEFAULTS["steps"]
    # What suits a small policy built from nothing would ruin a pretrained one.
    mine = load_config(overrides=["engine.model=some/dir"])
    assert mine == RunConfig(engine=mine.engine)
    assert mine.trainer.optimizer == "adamw"
    assert load_config(overrides=["trainer.optimizer=adamw"]).trainer.optimizer == "adamw"


def test_shapes_trains_the_starter_on_more_episodes_at_a_falling_rate():
    def chosen(*settings):
        config = load_config(overrides=settings)
        trainer, rollout = config.trainer, config.rollout
        sizes = (rollout.batch_groups, rollout.group_size, rollout.max_in_flight, config.steps)
        rates = (trainer.lr, trainer.muon_lr, trainer.lr_schedule.id)
        return (*sizes, rollout.max_staleness, *rates)

    assert chosen("env.id=shapes") == (12, 16, 192, 90, 1, 6e-4, 6e-3, "linear")
    own = ("env.id=shapes", "steps=7", "trainer.lr_schedule=constant", "rollout.group_size=4")
    assert chosen(*own) == (12, 4, 192, 7, 1, 6e-4, 6e-3, "constant")
    assert chosen("env.id=shapes", "deterministic=true")[4] == 0
    # The defaults of other environments, and of policies that exist already, are unchanged.
    assert chosen("env.id=tir") == chosen() == (16, 8, 128, 60, 0, 3e-4, 3e-3, "constant")
    assert chosen("env.id=shapes", "engine.model=some/dir") == chosen("engine.model=some/dir")


def test_precedence_is_base_file_overrides(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("steps: 7\ntrainer:\n  lr: 0.5\n")
    base = {"steps": 3, "seed": 4, "trainer": {"warmup_steps": 9}}
    config = load_config(recipe, ["trainer.lr=1e-5"], base)
    assert (config.steps, config.seed) == (7, 4)
    assert (config.trainer.lr, config.trainer.warmup_steps) == (1e-5, 9)


def test_resolved_settings_load_unchanged(tmp_path):
    config = load_config(overrides=["env.kwargs.level=3", "trainer.clip_low=null", "steps=2"])
    recipe = tmp_path / "config.yaml"
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(recipe) == config


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a.b=1", 1),
        ("a=1e-5", 1e-5),
        ("a=-2E3", -2000.0),
        ("a=null", None),
        ("a=[1, 2]", [1, 2]),
        ("a={x: y}", {"x": "y"}),
        ("a=x=y", "x=y"),
        ("a=", None),
        ("a=true", True),
        ("a='1'", "1"),
    ],
)
def test_override_values_are_yaml(text, value):
    assert parse_override(text)[1] == value


@pytest.mark.parametrize(
    "text", ["novalue", "=3", " =3", "a=[1", "a={", "a=&x {b: *x}", "a=2026-13-01"]
)
def test_malformed_override_is_explained(text):
    assert text in explain(text) or "override" in explain(text)


@given(st.sampled_from(field_names()), st.data())
def test_mistyped_key_gets_a_suggestion(key, data):
    at = data.draw(st.integers(min_value=1, max_value=len(key) - 1))
    typo = key[:at] + "q" + key[at:]
    text = explain(f"{typo}=1")
    assert "unknown key" in text or "is no" in text or ": it " in text
    assert typo.partition(".")[0] in text


def test_mistyped_leaf_gets_a_suggestion():
    text = explain("rollout.max_stalness=2")
    assert "unknown key 'rollout.max_stalness'" in text
    assert "did you mean 'rollout.max_staleness'" in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.learning_rate=1", "did you mean 'trainer.lr'?"),
        ("rollout.num_generations=4", "did you mean 'rollout.group_size'?"),
        ("env.level=1", "env.kwargs.level=VALUE"),
        ("engine.max_contxt=1", "did you mean 'engine.max_context'"),
        ("engine.url=7", "engine.url = 7: it takes a list"),
        ("trainer.betas=[1]", "trainer.betas.1: it is missing"),
        ("rollout.group_size=0", "rollout.group_size = 0: it must be at least 1"),
        ("rollout.group_size=2.5", "it takes a whole number"),
        ("trainer.dtype=float1", "it is one of 'float32' or 'bfloat16'"),
        ("deterministic=maybe", "it takes true or false"),
        ("trainer.kl=5", "it takes a section of settings"),
    ],
)
def test_errors_say_what_a_setting_takes(override, words):
    assert words in explain(override)


def test_words_of_other_frameworks_stand_for_settings_that_exist():
    known = field_names()
    sections = {name.rpartition(".")[0] for name in known}
    assert set(_ELSEWHERE.values()) <= {*known, *sections}


def test_errors_name_the_settings_file(tmp_path):
    recipe = tmp_path / "gsm8k.yaml"
    recipe.write_text("rollout:\n  group_sise: 3\n")
    text = explain(file=recipe)
    assert "gsm8k.yaml" in text
    assert "rollout.group_size" in text


@pytest.mark.parametrize(
    ("content", "reason"),
    [("- a\n- b\n", "mapping"), ("a: [", "YAML"), ("steps: many\n", "steps = 'many'")],
)
def test_file_without_settings_is_refused(tmp_path, content, reason):
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(content)
    assert reason in explain(file=recipe)


def test_utf_16_files_and_empty_sections_are_read(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_bytes("env: {id: math}\ntrainer:\n  # lr: 1\nrollout:\n".encode("utf-16"))
    assert load_config(file, ["trainer.lr=1e-4"]).trainer.lr == 1e-4
    assert load_config(file).env.id == "math"


@pytest.mark.parametrize("content", [b"env: {id: caf\xe9}", bytes(range(256))])
def test_binary_file_is_refused(tmp_path, content):
    file = tmp_path / "recipe.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"recipe\.yaml is not valid YAML"):
        load_config(file)


@pytest.mark.parametrize("override", ["trainer.lr=.inf", "seed=99999999999999999999"])
def test_nonfinite_and_invalid_numbers_are_refused(override):
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        load_config(overrides=[override])


def test_empty_file_gives_the_defaults(tmp_path):
    recipe = tmp_path / "empty.yaml"
    recipe.write_text("# only a comment\n")
    assert load_config(recipe) == load_config()


def test_missing_file_is_refused(tmp_path):
    assert "cannot read" in explain(file=tmp_path / "none.yaml")
    assert "cannot read" in explain(file=tmp_path)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["rollout.group_size=1", "rollout.min_group_size=1"], "always has advantage 0"),
        (["rollout.group_size=0"], "rollout.group_size"),
        (["rollout.min_group_size=9"], "every group would be dropped"),
        (["rollout.max_new_tokens=512"], "no room for a prompt"),
        (["rollout.batch_groups=2", "trainer.minibatches=3"], "at least one group each"),
        (["trainer.clip_high=0.0"], "use null"),
        (["trainer.clip_low=0.0"], "use null"),
        (["trainer.cpu_offload=true"], "nothing would be offloaded"),
        (["trainer.lr=0"], "trainer.lr"),
        (["seed=-1"], "seed"),
        (["trainer.aggregation=median"], "token_mean"),
        (["steps=3", "steps.more=1"], "holds a value"),
    ],
)
def test_conflicting_settings_are_refused_with_the_reason(overrides, reason):
    assert reason in explain(*overrides)


def test_number_of_settings_is_limited():
    assert len(field_names()) <= 159


def test_overrides_go_below_recorded_nulls(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(load_config(overrides=["env.id=nim"]).model_dump(mode="json")))
    assert load_config(file).eval.fixed_roles is None
    assert load_config(file).trainer.lora is None
    lora = ["trainer.lora.rank=4", "trainer.optimizer=adamw"]
    config = load_config(file, ["eval.fixed_roles.second=gold", *lora])
    assert config.eval.fixed_roles == {"second": "gold"}
    assert config.trainer.lora.rank == 4
    recorded = yaml.safe_load(file.read_text())
    config = load_config(overrides=["eval.fixed_roles.first=noop"], base=recorded)
    assert config.eval.fixed_roles == {"first": "noop"}
    with pytest.raises(ConfigError, match=r"data\.file"):
        load_config(file, ["data.file.name=rows.jsonl"])


def test_every_setting_has_an_override():
    config = RunConfig()
    for key in field_names():
        value = config
        for part in key.split("."):
            value = getattr(value, part)
        assert load_config(overrides=[f"{key}={yaml.safe_dump(value, default_flow_style=True)}"])


def test_settings_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().steps = 3


def test_min_group_size_of_one_needs_an_estimator_without_siblings():
    assert "none to be compared with" in explain("rollout.min_group_size=1")
    load_config(overrides=["rollout.min_group_size=1", "trainer.advantage=reinforce"])
