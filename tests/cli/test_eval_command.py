"""`areal-gym eval` as a command: one directory each, resumed after kill -9, listed and compared."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from areal_gym.run_dir.evaluations import Evaluation
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.measuring import Watch
from tests._support.evaluation_dirs import write_evaluation

SMALL = ("engine.max_context=256", "rollout.max_new_tokens=4", "-n", "3")
PLACES = [(index, attempt) for index in range(4) for attempt in range(2)]
SCORES = {
    **{"pass@1": 0.5, "pass@1_low": 0.2, "pass@1_high": 0.8, "pass@2": 0.75, "pass@2_low": 0.3},
    **{"pass@2_high": 0.9, "num_tasks": 4, "num_samples": 2, "reward": 0.5, "env": "math"},
    **{"num_failed": 0, "stop_reasons": {"completed": 8}},
}


def test_two_environments_in_one_command(cli, tiny_policy, tmp_path):
    envs = ("--env", "countdown", "--env", "math")
    code, out, err = cli("eval", *envs, "--model", str(tiny_policy), *SMALL, "--out", "both")
    assert code == 0, err
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["countdown", "math"]
    for name in ("countdown", "math"):
        evaluation = Evaluation.open(tmp_path / "both" / name)
        assert evaluation.info.status == "finished"
        assert len(evaluation.samples()) == 3
    code, out, _ = cli("eval", "--resume", "--out", "both", "--json")  # nothing is left to do
    assert [row["env"] for row in json.loads(out)] == ["countdown", "math"]
    assert cli("eval", *envs, "--model", str(tiny_policy), *SMALL, "--out", "both")[0] == 2


def test_an_evaluation_waits_for_servers_as_long_as_it_is_told(cli, tiny_policy, monkeypatch):
    monkeypatch.setattr("areal_gym.chat.chat_client.FIRST_WAIT_S", 0.001)
    gone = "eval.fixed_roles.first=http://127.0.0.1:9/v1"  # the discard port: nobody listens
    argv = ("eval", "--env", "nim", "--model", str(tiny_policy), *SMALL, gone)
    code, _, err = cli(*argv, "rollout.outage_patience_s=0.5", "--plain")
    assert code not in (0, 1, 70)
    assert "rollout.outage_patience_s = 0.5" in err


def test_an_outage_is_shown_beside_the_progress():
    shown = []
    watch = Watch(lambda *told: shown.append(told))
    watch.on_progress(2, 9)
    watch.on_outage(3.2, 60)
    assert shown[-1] == (2, "waiting for servers or sandboxes, 3 s of 60 s")


@pytest.mark.slow
def test_an_evaluation_goes_on_after_kill_9(cli, tiny_policy, tmp_path):
    argv = ("eval", "--env", "countdown", "--model", str(tiny_policy), *SMALL[:2])
    argv += ("-n", "60", "-k", "8", "rollout.max_in_flight=8", "--out")
    whole = cli(*argv, "whole", "--json")[1]
    path = tmp_path / "killed"
    samples = path / "samples.jsonl"
    with subprocess.Popen([sys.executable, "-m", "areal_gym", *argv, path]) as process:
        deadline = time.monotonic() + 100
        while not (samples.exists() and samples.stat().st_size > 10_000):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
    before = {line for line in samples.read_text().splitlines() if line.endswith("}")}
    assert 0 < len(before) < 480
    assert Evaluation.open(path).info.status == "died"
    code, resumed, err = cli("eval", "--resume", "--json", "--out", "killed")
    assert code == 0, err
    assert before <= set(samples.read_text().splitlines())  # what was done is kept
    evaluation = Evaluation.open(path)
    assert len(evaluation.samples()) == 480
    assert evaluation.read_trajectory(evaluation.samples()[-1]).id == "eval-000059-7"
    same = ("pass@1", "reward", "num_episodes", "stop_reasons", "mean_policy_tokens")
    a, b = json.loads(whole), json.loads(resumed)
    assert [a[name] for name in same] == [b[name] for name in same]


def test_evaluations_are_listed_shown_compared_and_reported(cli, tmp_path):
    write_evaluation(tmp_path / "runs/a", PLACES, scores=SCORES)
    write_evaluation(tmp_path / "runs/b", PLACES, scores=SCORES, seed=1)
    write_evaluation(tmp_path / "runs/half", PLACES[:3])
    code, out, _ = cli("list", "evals")
    assert code == 0
    assert "0.500 (0.200 to 0.800)" in out
    assert "interrupted, 3/8" in out
    rows = json.loads(cli("list", "evals", "--json")[1])
    assert [row.get("pass@1") for row in rows] == [0.5, 0.5, None]
    code, out, _ = cli("show", "runs/a")
    assert code == 0
    assert "math" in out
    assert [line for line in out.splitlines() if len(line.split()) < 2] == []  # all have a value
    code, out, _ = cli("compare", "runs/a", "runs/b", "--json")
    comparison = json.loads(out)
    assert comparison["settings"] == {"seed": [0, 1]}
    assert comparison["heldout"][0]["differences"] == [None, None]  # four tasks say nothing
    assert len(set(comparison["heldout"][0]["values"])) == 1
    code, out, _ = cli("report", "runs/a", "--json")
    assert json.loads(out)["facts"]["pass@1"] == "0.5 (0.2 to 0.8)"
    assert cli("report", "runs/half", "--out", "half.md")[0] == 0


@pytest.mark.parametrize(
    "argv",
    [
        ("report", "runs/gone"),
        ("compare", "runs/gone", "runs/gone"),
        ("show", "runs/gone"),
        ("eval", "--run", "runs/gone"),
        ("eval", "--resume", "--out", "runs/gone"),
    ],
    ids=lambda argv: argv[0],
)
def test_a_missing_run_is_a_usage_error_everywhere(cli, argv):
    code, _, err = cli(*argv)
    assert code == 2
    assert "runs/gone" in err
    assert "areal-gym list" in err


def test_a_run_names_the_package_of_a_plugin_that_is_gone(cli, tiny_policy, tmp_path):
    run = RunDir(tmp_path / "run")
    run.begin()
    shutil.copytree(tiny_policy, run.checkpoints_dir / "step-000001")
    run.save_config("env: {id: countdown/numbers}\n")
    entry = {"id": "countdown/numbers", "plugin": "countdown", "version": "0.1.0"}
    run.save_provenance([{**entry, "distribution": "areal-gym-countdown"}], "")
    for command in ("eval", "--run", "run"), ("train", "--resume", "--out", "run"):
        code, _, err = cli(*command, *(["--trust"] * (command[0] == "train")))
        assert code == 2, err
        assert "this run had it from plugin countdown: pip install" in err
        assert "'areal-gym-countdown==0.1.0'" in err


def test_printed_commands_quote_paths(cli):
    code, _, err = cli("eval", "--resume", "--env", "math", "--out", "my runs/a")
    assert code == 2
    assert "areal-gym eval --resume --out 'my runs/a'" in err
