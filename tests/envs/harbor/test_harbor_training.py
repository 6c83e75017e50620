"""The small policy learns a generated family of task folders, in real places."""

import functools
import json

import pytest
from click.testing import CliRunner

from areal_gym.cli.app import app
from areal_gym.envs.harbor.number_tasks import write_number_tasks
from areal_gym.warm_start import starter_policy
from tests._support.harbor_play import backend

RECIPE = {
    **{"num_tokenizer_texts": 100, "batch_size": 16, "num_probes": 8, "max_context": 512},
    **{"warmup_steps": 10, "min_hold_steps": 60, "max_hold_steps": 90, "decay_steps": 60},
}
SETTINGS = (
    *("steps=6", "rollout.group_size=8", "rollout.batch_groups=3", "rollout.max_in_flight=8"),
    *("rollout.max_new_tokens=48", "eval.num_tasks=0", "env.kwargs.max_turns=2"),
    *("trainer.lr=0.002", "engine.num_slots=8"),
    *("deterministic=true", "rollout.max_staleness=0"),
)


@pytest.mark.long
def test_the_small_policy_learns_to_use_the_shell(tmp_path, monkeypatch):
    backend("local")
    monkeypatch.setenv("AREAL_GYM_CACHE", str(tmp_path / "cache"))
    recipe = functools.partial(starter_policy.Recipe, **RECIPE)
    monkeypatch.setattr(starter_policy, "Recipe", recipe)
    write_number_tasks(tmp_path / "tasks", 1, num_tasks=10)
    # The verifier of one gives no reward: it is dropped.
    (tmp_path / "tasks" / "number-1-005" / "tests" / "test.sh").write_text("#!/bin/sh\nexit 3\n")
    out = tmp_path / "run"
    words = ["train", "--env", f"harbor:{tmp_path / 'tasks'}", *SETTINGS, "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (done.output, done.exception)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert len(rewards) == 6
    assert "images: 10/10" in done.output
    assert "dropped from this run: the task" in done.output
    assert "number-1-005, reward: test.sh wrote neither" in done.output
    assert rows[-1]["rollout/dropped_tasks"] == 1
    assert sum(rewards[:2]) / 2 < 0.75  # half of what it imitates gives up
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards
    reports = [
        message["content"]
        for file in (out / "trajectories").glob("*.jsonl")
        for line in file.read_text().splitlines()
        for message in json.loads(line)["messages"]
        if message.get("name") == "verifier"
    ]
    assert any("+++ /app/answer" in report for report in reports)  # what the viewer shows
