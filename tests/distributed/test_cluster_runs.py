"""Whole runs on a Ray of their own: what is in the directory, and what deaths in the middle do."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'areal-gym[ray]'")

from areal_gym.config import load_config
from areal_gym.run import replay, train
from areal_gym.run.display import SilentDisplay
from areal_gym.rundir import RunDir

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


def children():
    """Processes that descend from this one, Ray's included."""
    rows = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True).stdout
    parents = {}
    for row in rows.splitlines():
        pid, ppid, args = row.split(None, 2)
        parents[int(pid)] = (int(ppid), args)
    mine, found = {os.getpid()}, []
    while new := {p for p, (ppid, _) in parents.items() if ppid in mine} - mine:
        mine |= new
        found += [parents[p][1] for p in new]
    return [args for args in found if "ray" in args and "resource_tracker" not in args]


def test_a_run_whose_episodes_are_played_elsewhere(tiny_policy, tmp_path):
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
    assert not children()


def test_ranks_that_ray_places_train_as_processes_do(tiny_policy, tmp_path):
    """Two ranks, one of which is killed in mid-run: the weights are those of an unbroken run."""
    overrides = ["trainer.num_ranks=2", "trainer.save_every=1", "eval.every=1"]
    config = config_of(tiny_policy, *overrides, steps=3)
    display = Killing()
    summary = train(config, run_dir=tmp_path / "ray", display=display)
    assert summary["num_steps"] == 3
    assert display.has_killed
    assert any("going on from the checkpoint of step" in said for said in display.said)
    run = RunDir(tmp_path / "ray")
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]
    # What was played is trained again by one learner in this process: the same weights.
    assert replay(load_config(run.config_file), run.path).max_difference < 1e-5
    assert not children()


class Killing(SilentDisplay):
    """Kills a trainer's rank once the second step is on record."""

    def __init__(self):
        self.said = []
        self.has_killed = False

    def say(self, line):
        self.said.append(line)

    def step(self, step, num_steps, row):
        if step == 2 and not self.has_killed:
            self.has_killed = True
            os.kill(rank_of(os.getpid()), signal.SIGKILL)


def rank_of(pid):
    rows = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True).stdout
    return next(int(row.split()[0]) for row in rows.splitlines() if "ray::_Rank" in row)
