"""Whole runs on a Ray of their own: what is in the directory, and what deaths in the middle do."""

from __future__ import annotations

import json
import re
import sys
from socket import gethostname

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'areal-gym[ray]'")

from areal_gym.config import load_config
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.replay import replay
from areal_gym.runs.train import train
from tests._support.killing import Killing, children

pytestmark = pytest.mark.slow


def config_of(policy, *overrides, steps=2):
    return load_config(
        overrides=[
            f"engine.model={policy}",
            f"steps={steps}",
            "env.id=countdown",
            "cluster.address=local",
            "rollout.group_size=4",
            "rollout.batch_groups=2",
            "rollout.max_in_flight=8",
            "rollout.max_new_tokens=12",
            "engine.num_slots=8",
            "engine.max_context=256",
            "eval.num_tasks=4",
            "trainer.advantage=reinforce",
            *overrides,
        ]
    )


def versions_of(run, step):
    return {v for t in run.read_trajectories(step) for v in t.policy_versions}


@pytest.fixture(autouse=True)
def nobody_stays():
    """Nothing that a run has started is left."""
    before = children()
    yield
    assert {pid: args for pid, args in children().items() if pid not in before} == {}


@pytest.mark.long
def test_run_with_remote_rollout_workers(tiny_policy, tmp_path):
    config = config_of(tiny_policy, "cluster.rollout_workers=2", "trainer.runs_in=thread", steps=3)
    train(config, run_dir=tmp_path / "run")
    run = RunDir(tmp_path / "run")
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        # Synchronous: each step is trained on what its own weights sampled.
        assert versions_of(run, row["step"]) == {row["step"] - 1}
        assert row["train/ratio"] == pytest.approx(1, abs=1e-4)
        assert not row["rollout/failures/worker_error"]


def test_ray_ranks_train_what_local_ranks_train(tiny_policy, tmp_path):
    """Two ranks, one of which is killed in mid-run: the weights are those of an unbroken run."""
    overrides = ["trainer.num_ranks=2", "trainer.save_every=1", "eval.every=1"]
    config = config_of(tiny_policy, *overrides, steps=3)
    saved = tmp_path / "ray" / "checkpoints" / "step-000001"
    display = Killing("ray::_Rank", awaits=saved)
    summary = train(config, run_dir=tmp_path / "ray", display=display)
    assert summary["num_steps"] == 3
    (pid,) = display.killed
    (line,) = [said for said in display.said if "continuing from the checkpoint of step" in said]
    assert re.search(rf"rank [01] of the trainer has died: process {pid} on {gethostname()}", line)
    run = RunDir(tmp_path / "ray")
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]
    # What was played is trained again by one learner in this process: the same weights.
    assert replay(load_config(run.config_file), run.path).max_difference < 1e-5


@pytest.mark.long
def test_dpo_on_ray_ranks(tiny_policy, tmp_path):
    """One of two is killed in mid-run; the policy is that of one process."""
    rows = [{"prompt": f"Say {i}.", "chosen": f"{i}", "rejected": "no"} for i in range(40)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"engine.model={tiny_policy}",
        *("objective=dpo", f"data.file={file}", "data.batch_size=8", "engine.max_context=256"),
        *("eval.num_tasks=8", "steps=3", "trainer.save_every=1", "trainer.lr=1e-3"),
    ]
    placed = ["cluster.address=local", "trainer.num_ranks=2"]
    saved = tmp_path / "ray" / "checkpoints" / "step-000001"
    display = Killing("ray::_Rank", awaits=saved)
    train(load_config(overrides=[*overrides, *placed]), run_dir=tmp_path / "ray", display=display)
    assert any("continuing from the checkpoint of step" in said for said in display.said)
    train(load_config(overrides=overrides), run_dir=tmp_path / "here")
    runs = [RunDir(tmp_path / name).read_metrics() for name in ("ray", "here")]
    for theirs, ours in zip(*runs, strict=True):
        assert theirs["step"] == ours["step"]
        for name in ("train/loss", "train/grad_norm"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-3), name


FAKE = "areal_gym.engines.sglang.fake"
LORA = ["trainer.weight_sync=lora", "trainer.lora.rank=4", "trainer.lr=3e-3"]


@pytest.mark.parametrize(
    ("sync", "killed"),
    [
        pytest.param([], [FAKE], id="weights", marks=pytest.mark.long),
        pytest.param(LORA, [FAKE, "ray::_WorkerActor"], id="adapters"),
    ],
)
def test_ray_servers_and_workers_are_restarted(tiny_policy, tmp_path, sync, killed):
    """Everything at once: servers, a worker and a rank; some are killed in mid-run."""
    config = config_of(
        tiny_policy,
        "engine.id=sglang",
        f"engine.kwargs.command={sys.executable} -m {FAKE}",
        "engine.kwargs.server_args=--context-length 256",
        "engine.kwargs.health_interval_s=0.1",
        "cluster.servers=2",
        "cluster.gpus_per_server=0",
        "cluster.rollout_workers=1",
        *sync,
        steps=4,
    )
    display = Killing(*killed)
    train(config, run_dir=tmp_path / "run", display=display)
    run = RunDir(tmp_path / "run")
    rows = run.read_metrics()
    assert display.has_killed
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["engine/num_servers_lost"] == 1
    for row in rows:
        assert versions_of(run, row["step"]) == {row["step"] - 1}
        assert row["train/ratio"] == pytest.approx(1, abs=1e-4)
