"""Runs on own prompts, rewards and environments, from Python; what a run keeps of them."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys

import pytest

import areal_gym
from areal_gym.config import load_config
from areal_gym.errors import ConfigError, UsageError
from areal_gym.report.chart_table import charts_of, evaluations_of
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.components import Components
from tests._support.paths import ROOT

ROWS = [{"prompt": f"What is {n}+1?", "answer": str(n + 1)} for n in range(13)]
REWARD = """
import areal_gym

def exact(completion, answer):
    from helper_of_rewards import strip

    return float(strip(completion) == answer)

if TRAINS:
    areal_gym.train(data=[{"prompt": "a", "answer": "b"}], reward=exact, model="starter")
"""


@pytest.fixture
def settings(tiny_policy, tmp_path, monkeypatch):
    monkeypatch.setenv("AREAL_GYM_CACHE", str(tmp_path / "cache"))
    rollout = {"group_size": 2, "batch_groups": 2, "max_in_flight": 4, "max_new_tokens": 4}
    return {
        "model": tiny_policy,
        "rollout": {**rollout, "filters": []},
        "engine": {"num_slots": 4, "max_context": 128},
        "steps": 1,
        "out": tmp_path / "run",
    }


def brevity(completion):
    return {"short": -len(completion) / 100}


def test_trls_quickstart_is_not_shorter(settings, tmp_path):
    """Both stand in docs/migration.md; ours runs with a small model and conversational rows."""
    page = (ROOT / "docs" / "migration.md").read_text()
    theirs, ours = re.findall(r"```(?:text|python)\n(.*?)```", page, re.DOTALL)[:2]
    assert "GRPOTrainer" in theirs
    assert len(ours.splitlines()) <= len(theirs.splitlines())
    data = tmp_path / "deep_math.jsonl"
    rows = (
        {"prompt": [{"role": "user", "content": f"{n}+1?"}], "solution": "x"} for n in range(13)
    )
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = settings.pop("model")
    small = ours.replace('"Qwen/Qwen2.5-0.5B-Instruct"', f"{str(model)!r}, **settings")
    small = small.replace("trl-lib/DeepMath-103K", str(data))
    small = small.replace("areal_gym.train(", "result = areal_gym.train(")
    names = {"settings": settings}
    exec(small, names)
    assert names["result"].metrics["reward/part/math"] == 0
    assert names["result"].summary["num_heldout_tasks"] == 0  # 13 rows: all are trained on


def test_reward_functions_of_trl(settings):
    def accuracy_reward(completions, answer, **kwargs):
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    report = areal_gym.evaluate(
        lambda messages: "2", data=ROWS, reward=accuracy_reward, split="train", n=2
    )
    assert report.to_dict()["reward"] == 0.5


def test_a_run_goes_on_when_the_users_files_are_gone(settings, tmp_path):
    data, code = tmp_path / "prompts.jsonl", tmp_path / "rewards.py"
    helper = tmp_path / "helper_of_rewards.py"
    helper.write_text("strip = str.strip")
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    code.write_text(REWARD.replace("TRAINS", "False"))
    run = areal_gym.train(data=data, reward=[f"{code}:exact", brevity], **settings).run
    assert run.read_config()["env"]["kwargs"]["reward"][0] == f"{code}:exact"
    kept = {row["file"]: run.path / row["copy"] for row in run.read_provenance()["inputs"]}
    assert {str(data), str(code), str(helper), __file__} <= set(kept)
    assert kept[str(helper)] == kept[str(code)].with_name(helper.name)
    assert kept[str(code)].read_text() == code.read_text()
    data.unlink()
    helper.unlink()  # code and its modules stay together: both copies are used
    out = settings["out"]
    with pytest.raises(UsageError, match="you have not run with them before"):
        areal_gym.train(mode="resume", out=out, steps=2)
    copies = [f"{kept[str(code)]}:exact", brevity]
    result = areal_gym.train(mode="resume", out=out, steps=2, data=kept[str(data)], reward=copies)
    assert result.summary["num_steps"] == 2
    assert set(kept) <= {row["file"] for row in RunDir(out).read_provenance()["inputs"]}


def test_graded_rewards_are_measured_by_their_mean(settings, capsys):
    settings |= {"data": {"data": ROWS, "heldout": 0.5}, "reward": brevity, "progress": True}
    run = areal_gym.train(**settings).run
    captured = capsys.readouterr()
    summary, log = run.read_summary(), captured.out + captured.err
    row = run.read_evaluations()[-1]["sampled"]
    assert row["pass@1"] == 0 > row["reward"] == summary["heldout_reward_after"]
    low, high = row["reward_low"], row["reward_high"]
    assert f"; reward {row['reward']:.3f} ({low:.3f} to {high:.3f})" in log
    assert "held-out, reward" in log
    (evaluation, *_) = evaluations_of(run.read_evaluations())
    assert evaluation["reward"] < 0
    lines = next(chart for chart in charts_of(run.read_metrics(), [evaluation])).lines
    assert [line.name for line in lines if line.are_dots] == ["held out", "solved"]


def test_functions_without_a_file_are_said(settings, capsys):
    run = areal_gym.train(data=iter(ROWS), reward=lambda completion: 1.0, **settings).run
    kwargs = run.read_config()["env"]["kwargs"]
    assert kwargs["reward"] == "python:function"
    (row,) = run.read_provenance()["inputs"]  # rows in memory are in a file now
    assert (row["file"], (run.path / row["copy"]).exists()) == (kwargs["tasks"], True)
    assert "cannot resume or evaluate" in run.log_file.read_text()


def test_a_class_is_an_environment(settings):
    from tests._support.shaped_env import Shaped

    run = areal_gym.train(env=Shaped, **settings, eval={"num_tasks": 1}).run
    assert run.read_config()["env"]["id"] == "tests._support.shaped_env:Shaped"


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({}, "train on what", "data="),
        ({"data": ROWS, "reward": brevity, "model": None}, "which model answers", "--model"),
        ({"data": ROWS}, "which reward", "reward=exact"),
        ({"env": 3}, "env is a int", "FILE.py:CLASS"),
        ({"data": ROWS, "reward": "exakt"}, "no reward 'exakt'", "did you mean 'exact'"),
        ({"objective": "sft", "data": ROWS, "reward": brevity}, "has no use for reward", ""),
    ],
)
def test_what_is_missing_is_said_at_once(settings, given, message, hint):
    with pytest.raises(UsageError, match=message) as raised:
        areal_gym.train(**{**settings, **given})
    assert hint in " ".join(raised.value.hints)
    assert not settings["out"].exists()


def test_a_script_that_trains_is_not_trained_by_its_own_run(settings, tmp_path):
    code = tmp_path / "script.py"
    code.write_text(REWARD.replace("TRAINS", "True"))
    with pytest.raises(ConfigError, match=r"script\.py trains when it is loaded"):
        areal_gym.train(data=ROWS, reward=f"{code}:exact", **settings)


def test_evaluate_takes_rows_and_rewards():
    policy = {row["prompt"]: row["answer"] for row in ROWS}
    report = areal_gym.evaluate(
        lambda messages: policy[messages[-1]["content"]],
        data=(row for row in ROWS),
        reward={"exact": 1, brevity: 0},
        split="train",
        n=13,
    )
    assert report.to_dict()["pass@1"] == 1
    with pytest.raises(UsageError, match="which environment"):
        areal_gym.evaluate(lambda messages: "")


def test_other_processes_load_rewards_with_the_modules_beside_them(tmp_path):
    (tmp_path / "helper_of_rewards.py").write_text("strip = str.strip")
    code, data = tmp_path / "rewards.py", tmp_path / "prompts.jsonl"
    code.write_text(REWARD.replace("TRAINS", "False"))
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    kwargs = {"tasks": str(data), "reward": f"{code}:exact"}
    overrides = ["env.id=prompts", f"env.kwargs={json.dumps(kwargs)}"]
    make_env = Components.of(load_config(overrides=overrides)).make_env
    program = (
        "import pickle, sys; env = pickle.load(sys.stdin.buffer)(); "
        "env.reset(options={'index': 3}); print(env.step(' 4 ')[1])"
    )
    command = [sys.executable, "-c", program]
    played = subprocess.run(command, input=pickle.dumps(make_env), capture_output=True, check=True)
    assert played.stdout.strip() == b"1.0"
