"""Training and evaluating in an environment that another process serves: as at home."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import areal_gym
from areal_gym.cli.app import run
from areal_gym.errors import UsageError
from areal_gym.images import image_store, use_image_store
from areal_gym.images.reading import ImageLimits, image_limits, set_image_limits
from areal_gym.models.tiny.checkpoint_files import load_checkpoint

SMALL = [
    *("--steps", "2", "--plain", "deterministic=true", "engine.max_context=256"),
    *("rollout.batch_groups=2", "rollout.group_size=2", "rollout.max_new_tokens=8"),
    *("eval.num_tasks=4", "trainer.advantage=reinforce"),
]


@contextmanager
def served(*argv):
    """`areal-gym serve-env`, as people start it; gives what it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "areal_gym", "serve-env", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield {**json.loads(line), "process": process}
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert "Traceback" not in err, err
        assert process.returncode in (0, -signal.SIGKILL)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def trajectories(directory):
    found = [row for path in sorted((directory / "trajectories").iterdir()) for row in rows(path)]
    for row in found:
        row.pop("env_id")
        for turn in row["turns"]:
            del turn["engine_s"], turn["env_s"]
    return sorted(found, key=lambda row: row["id"])


def logprobs(found):
    """Taken out of evaluations, where the last digits depend on who was sampled beside whom."""
    evaluations = [row for row in found if row["id"].startswith("eval-")]
    return [p for row in evaluations for span in row["spans"] for p in span.pop("logprobs") or ()]


def weights(directory):
    (newest,) = sorted((directory / "checkpoints").glob("step-*2"))
    return load_checkpoint(newest).state_dict()


def test_run_over_http_equals_the_local_run(tiny_policy, tmp_path):
    with served("tir", "level=1") as server:
        there, here = tmp_path / "there", tmp_path / "here"
        for out, env in ((there, f"remote:{server['url']}"), (here, "tir")):
            level = [] if "remote" in env else ["env.kwargs.level=1"]
            policy = f"engine.model={tiny_policy}"
            assert run(["train", "--env", env, "--out", str(out), *SMALL, policy, *level]) == 0
        remote, local = trajectories(there), trajectories(here)
        assert logprobs(remote) == pytest.approx(logprobs(local), abs=1e-5)
        assert remote == local
        ours, theirs = weights(here), weights(there)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_evaluation_over_http_equals_the_local_one(tiny_policy, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with served("countdown", "num_numbers=3") as server:
        reports = []
        for env, settings in (
            (f"remote:{server['url']}", []),
            ("countdown", ["env.kwargs.num_numbers=3"]),
        ):
            argv = ["eval", "--env", env, "--checkpoint", str(tiny_policy), "-n", "6", "--json"]
            code = run([*argv, "rollout.max_new_tokens=8", "engine.max_context=256", *settings])
            report = json.loads(capsys.readouterr().out)
            assert code == 0
            assert report.pop("env") == env
            assert Path(report.pop("directory")).is_dir()
            reports.append({k: v for k, v in report.items() if not k.endswith("_s")})
        assert reports[0] == reports[1]
        assert reports[0]["num_tasks"] == 6


def test_dead_env_server_stops_the_run_with_a_reason(tiny_policy, tmp_path, capsys):
    with served("countdown") as server:
        url = server["url"]
        server["process"].kill()
        server["process"].wait()
        argv = ["train", "--env", f"remote:{url}", "--out", str(tmp_path / "run"), *SMALL]
        assert run([*argv, f"engine.model={tiny_policy}"]) == 3
        told = capsys.readouterr().err
        assert f"cannot reach the environment at {url}" in told
        assert "areal-gym serve-env" in told


def test_unservable_environment_is_refused(capsys):
    assert run(["serve-env", "tri"]) == 2
    assert "did you mean 'tir'" in capsys.readouterr().err
    assert run(["serve-env", "tir", "level=9"]) == 2
    assert run(["play", "remote:http://127.0.0.1:1"]) == 3
    assert "cannot reach the environment at http://127.0.0.1:1" in capsys.readouterr().err


def test_public_env_server_generates_a_token():
    with served("countdown", "--host", "0.0.0.0") as server:
        assert len(server["token"]) >= 32
    with served("countdown") as server:
        assert server["token"] is None


pytestmark = pytest.mark.slow


def shown(env):
    (picture, _) = env.messages[-1]["content"]
    return image_store().read(picture["sha256"]), (picture["width"], picture["height"])


def test_pictures_of_a_served_environment_are_read_here(tmp_path):
    local = areal_gym.make("shapes", level=4)
    with use_image_store(tmp_path / "local"):
        local.reset(seed=3)
        expected = [shown(local)]
        first_answer = local.gold_action()
        local.step(first_answer)
        expected.append(shown(local))
    with served("shapes", "level=4") as server, use_image_store(tmp_path / "there") as store:
        env = areal_gym.make(f"remote:{server['url']}")
        env.reset(seed=3)
        received = [shown(env)]
        env.step(first_answer)
        received.append(shown(env))
        assert received == expected
        assert len(list(store)) == 2
        before = image_limits()
        set_image_limits(ImageLimits(max_pixels=32 * 32))
        try:
            with use_image_store(tmp_path / "scaled"):
                env.reset(seed=3)
                assert shown(env)[1] == (32, 32)
        finally:
            set_image_limits(before)
        for name in ("..%2Fconfig.yaml", "0" * 64):
            with pytest.raises(UsageError):
                env._ask_now(f"/v1/images/{name}")
        env.close()
