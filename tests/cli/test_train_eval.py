"""`train` and `eval` from end to end, with a tiny policy and as real processes."""

import json
import os
import signal
import subprocess
import sys

import pytest

from areal_gym.cli.command_reference import JSON_KEYS

pytestmark = pytest.mark.slow

SMALL = (
    *("engine.max_context=256", "rollout.max_new_tokens=8", "rollout.batch_groups=2"),
    *("rollout.group_size=2", "eval.num_tasks=4"),
)


@pytest.fixture
def areal_gym(tmp_path):
    def call(*argv):
        return subprocess.run(
            [sys.executable, "-m", "areal_gym", *argv],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return call


def test_train_then_eval_then_resume(areal_gym, cli, tiny_policy, tmp_path):
    train = ("train", "--env", "countdown", "--steps", "1", "--out", "run", *SMALL)
    done = areal_gym(*train, f"engine.model={tiny_policy}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert done.stderr.rstrip().endswith("areal-gym eval --env countdown --run run -k 4")
    run = tmp_path / "run"
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((run / "summary.json").read_text())["num_steps"] == 1

    code, _, err = cli(*train, f"engine.model={tiny_policy}")
    assert code == 2
    assert "run already holds a run of 1 steps" in err

    found = areal_gym("eval", "--run", "run", "-k", "2", "--json")
    assert found.returncode == 0, found.stderr
    numbers = json.loads(found.stdout)
    assert numbers["num_tasks"] == 4
    assert {"pass@2", *JSON_KEYS["eval"][1].split()} <= set(numbers)
    assert "evaluate (sampled): 8/8 reward 0." in found.stderr
    assert found.stderr.splitlines()[-1] == "view the episodes: areal-gym view run"
    assert list((run / "trajectories").glob("eval*.jsonl"))
    code, _, err = cli("eval", "--run", "run", "--fail-under", "pass@1=1.1")
    assert code == 1
    assert "below 1.1" in err
    assert cli("eval", "--run", "run", "--fail-under", "pas@1=0")[0] == 2

    resumed = areal_gym("train", "--resume", "--out", "run", "--steps", "2")
    assert resumed.returncode == 0, resumed.stderr
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_ctrl_c_saves_a_checkpoint(areal_gym, tiny_policy, tmp_path):
    training = subprocess.Popen(
        [
            *(sys.executable, "-m", "areal_gym", "train", "--env", "countdown", "--out", "run"),
            *("--steps", "100000", "--plain", f"engine.model={tiny_policy}", *SMALL),
        ],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with training:
        for line in training.stderr:
            if line.startswith("step"):
                training.send_signal(signal.SIGINT)
                break
        rest = training.stderr.read()
        assert training.wait(60) == 130
    assert "Traceback" not in rest
    assert "areal-gym train --resume --out run" in rest
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    last = int(checkpoint.name.removeprefix("step-"))
    assert last >= 1
    resumed = areal_gym("train", "--resume", "--out", "run", "--steps", str(last + 1))
    assert resumed.returncode == 0, resumed.stderr
