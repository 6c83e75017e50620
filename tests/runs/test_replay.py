"""A run trained again from its record."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from areal_gym.cli import main
from areal_gym.config import load_config
from areal_gym.errors import ConfigError, DataError, NothingToDoError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint, save_checkpoint
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.replay import replay
from areal_gym.runs.train import train
from tests._support.shaped_env import Shaped

SMALL = [
    "env.id=shaped",
    "rollout.group_size=4",
    "rollout.batch_groups=2",
    "rollout.max_in_flight=8",
    "rollout.max_new_tokens=12",
    "engine.num_slots=8",
    "engine.max_context=256",
    "eval.num_tasks=2",
    "trainer.advantage=reinforce",
    "trainer.minibatches=2",
    "trainer.optimizer=muon",
    "steps=4",
]


def config_of(policy, *overrides):
    return load_config(overrides=[f"engine.model={policy}", *SMALL, *overrides])


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return tmp_path_factory.mktemp("replay") / "run"


@pytest.fixture
def recorded(shaped_env, tiny_policy, original, tmp_path):
    """An asynchronous run, so that stale tokens and their corrections are in the record."""
    if not original.exists():
        train(config_of(tiny_policy, "rollout.max_staleness=2"), run_dir=original)
    return shutil.copytree(original, tmp_path / "run", symlinks=True)


def recorded_config(run_dir, *overrides):
    return load_config(run_dir / "config.yaml", overrides)


def test_replay_reproduces_weights_bit_for_bit(recorded):
    report = replay(recorded_config(recorded), recorded)
    assert report.num_steps == 4
    assert report.max_difference == 0.0
    assert report.first_difference is None
    assert report.is_identical
    first, *_, last = (RunDir(recorded).read_metrics()[i] for i in (0, -1))
    assert first["train/grad_norm"] > 0
    assert last["rollout/staleness_max"] > 0


def test_replay_of_states_with_an_empty_name(shaped_env, tiny_policy, tmp_path, monkeypatch):
    respond = Shaped.respond

    async def named(self, message):
        response = await respond(self, message)
        response.state_key = "" if self.num_turns == 1 else None
        return response

    monkeypatch.setattr(Shaped, "respond", named)
    config = config_of(tiny_policy, "trainer.algorithm=gigpo", "trainer.advantage=gigpo", "steps=2")
    train(config, run_dir=tmp_path / "run")
    assert RunDir(tmp_path / "run").read_metrics()[0]["train/anchored_fraction"] > 0
    assert replay(recorded_config(tmp_path / "run"), tmp_path / "run").is_identical


def test_replay_detects_changed_records(recorded, tmp_path):
    run_dir = tmp_path / "tampered"
    shutil.copytree(recorded, run_dir)
    file = run_dir / "trajectories" / "step-000003.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["turns"][0]["reward"] += 1.0
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = replay(recorded_config(run_dir), run_dir)
    assert report.first_difference == 3
    assert report.max_difference > 0
    assert not report.is_identical


def test_replay_with_other_settings(recorded, tmp_path):
    config = recorded_config(recorded, "trainer.lr=1e-2")
    report = replay(config, recorded, out=tmp_path / "other")
    assert not report.is_identical
    made = RunDir(tmp_path / "other")
    assert [row["step"] for row in made.read_metrics()] == [1, 2, 3, 4]
    assert yaml.safe_load(made.config_file.read_text())["trainer"]["lr"] == 1e-2
    assert load_checkpoint(made.checkpoints_dir / "step-000004").state_dict()


def test_replay_of_the_first_steps(recorded):
    report = replay(recorded_config(recorded), recorded, num_steps=2)
    assert report.num_steps == 2
    assert report.first_difference is None
    assert report.checkpoint is None  # nothing was saved at step 2


def test_replay_with_another_initial_policy_is_refused(recorded, tiny_policy, tmp_path):
    decoder = load_checkpoint(tiny_policy)
    next(decoder.parameters()).data.add_(1.0)
    other = save_checkpoint(decoder, tmp_path / "policy", tokenizer_dir=tiny_policy)
    with pytest.raises(ConfigError, match="started with the policy"):
        replay(recorded_config(recorded, f"engine.model={other}"), recorded)


def test_replay_of_a_run_without_steps_is_refused(recorded, tmp_path):
    with RunDir.open(tmp_path / "empty") as run:
        run.save_config((recorded / "config.yaml").read_text())
    with pytest.raises(NothingToDoError, match="no step"):
        replay(recorded_config(recorded), tmp_path / "empty")


def test_replay_names_missing_trajectories(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "lost")
    (tmp_path / "lost" / "trajectories" / "step-000003.jsonl").unlink()
    with pytest.raises(DataError, match="trajectories of step 3") as caught:
        replay(recorded_config(recorded), tmp_path / "lost")
    assert "replay the steps before it: --steps 2" in caught.value.hints


def exit_code(*argv):
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    return ended.value.code


def edit_settings(run_dir, section, **values):
    settings = yaml.safe_load((run_dir / "config.yaml").read_text())
    settings[section] |= values
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))


def test_replay_needs_neither_the_agent_nor_the_environment(recorded):
    edit_settings(recorded, "agent", id="someone_elses")
    edit_settings(recorded, "env", id="gone")
    assert exit_code("replay", str(recorded), "--trust") == 0


def test_plugin_that_a_run_had_is_named(recorded, capsys):
    edit_settings(recorded, "agent", id="someone_elses")
    file = recorded / "plugins.json"
    facts = json.loads(file.read_text())
    entry = {"id": "someone_elses", "plugin": "elses", "distribution": "elses-gym"}
    facts["used"].append(entry | {"version": "1.2"})
    file.write_text(json.dumps(facts))
    assert exit_code("eval", "--run", str(recorded), "--trust") == 2
    told = capsys.readouterr().err
    assert "this run had it from plugin elses: pip install 'elses-gym==1.2'" in told
