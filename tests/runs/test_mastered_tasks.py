"""A run whose filters leave nothing to train on: it ends well if its tasks are solved."""

import json
from collections import Counter

import pytest

from areal_gym.config import load_config
from areal_gym.errors import MasteredError, TrainError
from areal_gym.plugins import PluginManager, Registry, set_registry
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.train import train
from tests._support import mastered_env
from tests._support.display_lines import Lines


@pytest.fixture
def mastered(monkeypatch):
    monkeypatch.setattr(mastered_env.Mastered, "num_played", Counter())
    set_registry(Registry(PluginManager.installed(modules=["tests._support.mastered_env"])))
    yield
    set_registry(None)


def config_of(policy, *overrides):
    return load_config(
        overrides=[
            f"engine.model={policy}",
            "env.id=mastered",
            "rollout.filters=[success-rate]",
            "rollout.group_size=2",
            "rollout.batch_groups=4",
            "rollout.max_in_flight=2",
            "rollout.max_new_tokens=4",
            "engine.num_slots=8",
            "engine.max_context=256",
            "eval.num_tasks=2",
            "trainer.save_every=0",
            "steps=20",
            *overrides,
        ]
    )


def test_run_ends_well_when_its_tasks_are_solved(mastered, tiny_policy, tmp_path):
    display, out = Lines(), tmp_path / "run"
    # Two steps' worth of groups are half right.
    summary = train(config_of(tiny_policy, "env.kwargs.num_mixed=8"), run_dir=out, display=display)
    assert 1 <= summary["num_steps"] <= 2
    assert "64 groups in a row" in summary["stopped"]
    assert "success-rate/too-easy" in summary["stopped"]
    assert summary["heldout_after"] == 1.0
    run = RunDir(out)
    assert run.status == "finished"
    assert run.checkpoint(summary["num_steps"]).is_dir()
    assert json.loads((out / "summary.json").read_text())["stopped"] == summary["stopped"]
    assert any(f"ended after step {summary['num_steps']} of 20" in line for line in display.lines)

    again = train(config_of(tiny_policy), run_dir=out, mode="resume")
    assert again["num_steps"] == summary["num_steps"]
    assert again["stopped"]


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["env.kwargs.then=0", "env.kwargs.num_mixed=8"], TrainError),
        ([], MasteredError),
    ],
    ids=["too hard", "solved before the first step"],
)
def test_run_that_cannot_learn_fails(overrides, error, mastered, tiny_policy, tmp_path):
    with pytest.raises(error, match="the filters rejected 64 groups in a row") as caught:
        train(config_of(tiny_policy, *overrides), run_dir=tmp_path / "run")
    assert type(caught.value) is error
    assert any("rollout.filters=" in hint for hint in caught.value.hints)
