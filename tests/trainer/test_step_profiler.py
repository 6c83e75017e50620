import json

import pytest

from areal_gym.config import TrainerConfig, load_config
from areal_gym.errors import ConfigError
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.train import train
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.trainer import Trainer
from tests._support.tiny_training import batch, tiny_decoder


def trainer_of(**profile):
    config = TrainerConfig(profile=profile)
    return Trainer(tiny_decoder(), config, advantage=grpo, loss=ppo_clip)


def events_of(file):
    return json.loads(file.read_text())["traceEvents"]


def test_named_steps_are_traced_and_no_others(tmp_path):
    trainer = trainer_of(steps=[2, 9], directory=str(tmp_path / "profiles"))
    for step in range(3):
        trainer.step(batch(step), step)
    (file,) = (tmp_path / "profiles").iterdir()
    assert file.name == "step-000002-rank-0.trace.json"
    events = events_of(file)
    (span,) = [event for event in events if event.get("name") == "areal_gym.step 2"]
    inside = {
        event["name"]
        for event in events
        if span["ts"] <= event.get("ts", -1) <= span["ts"] + span["dur"]
    }
    assert "Optimizer.step#AdamW.step" in inside
    assert any(name.startswith("aten::") for name in inside)
    assert any("Backward" in name for name in inside)


def test_unwritable_directory_costs_a_profile_and_no_step(tmp_path):
    (tmp_path / "file").write_text("")
    trainer = trainer_of(steps=[1], directory=str(tmp_path / "file" / "profiles"))
    with pytest.warns(UserWarning, match="no profile of step 1"):
        assert trainer.step(batch(0), 0)["train/grad_norm"] > 0
    assert trainer.num_steps == 1


def test_run_profiles_into_its_directory(tiny_policy, tmp_path):
    objective = ["objective=sft", "env.id=math", "data.num_examples=8", "data.batch_size=2"]
    settings = [f"engine.model={tiny_policy}", "engine.max_context=256", "eval.num_tasks=2"]
    profile = ["trainer.profile.steps=[2]", "trainer.num_ranks=2"]
    config = load_config(overrides=[*objective, *settings, *profile, "steps=2"])
    train(config, run_dir=tmp_path / "run")
    for rank in range(2):
        file = RunDir(tmp_path / "run").profiles_dir / f"step-000002-rank-{rank}.trace.json"
        assert "areal_gym.step 2" in {event.get("name") for event in events_of(file)}


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="needs a directory"):
        trainer_of(steps=[1])
    with pytest.raises(ConfigError, match="profile"):
        load_config(overrides=["trainer.profile.steps=[0]"])
