"""`deterministic = true`: the same weights to the last bit, after kill -9, too."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from areal_gym.config import load_config
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.errors import ConfigError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint
from areal_gym.rollout.episode_runners import EpisodeSetup
from areal_gym.rollout.runner import RolloutRunner
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.train import train
from tests._support.paths import ROOT

SMALL = [
    "env.id=shaped",
    "deterministic=true",
    "rollout.group_size=4",
    "rollout.batch_groups=3",
    "rollout.max_in_flight=7",  # episodes wait for slots, too
    "rollout.max_new_tokens=12",
    "engine.num_slots=8",
    "engine.max_context=256",
    "eval.num_tasks=4",
    "trainer.advantage=reinforce",
    "trainer.save_every=1",
]


def config_of(policy, *overrides, steps=3):
    return load_config(overrides=[f"engine.model={policy}", f"steps={steps}", *SMALL, *overrides])


def weights_of(run: Path, step: int):
    return load_checkpoint(run / "checkpoints" / f"step-{step:06d}").state_dict()


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_deterministic_runs_are_equal_under_any_timing(
    tiny_policy, shaped_env, tmp_path, monkeypatch
):
    import asyncio

    from tests._support import shaped_env as plugin

    answer = plugin.Shaped.respond

    def dawdling(clock):
        async def respond(self, message):
            await asyncio.sleep(clock.choice([0, 0, 0.001, 0.02]))
            return await answer(self, message)

        return respond

    for name in ("a", "b"):
        monkeypatch.setattr(plugin.Shaped, "respond", dawdling(random.Random(name)))
        train(config_of(tiny_policy), run_dir=tmp_path / name)
    a, b = (
        [
            t.spans
            for step in (1, 2, 3)
            for t in sorted(RunDir(tmp_path / n).read_trajectories(step), key=lambda t: t.id)
        ]
        for n in "ab"
    )
    assert a == b  # log-probabilities and all
    assert same(weights_of(tmp_path / "a", 3), weights_of(tmp_path / "b", 3))
    assert not same(weights_of(tmp_path / "a", 2), weights_of(tmp_path / "a", 3))


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from areal_gym.plugins import PluginManager, Registry, set_registry
set_registry(Registry(PluginManager.installed(modules=["tests._support.shaped_env"])))
from areal_gym.runs.train import train
from tests.runs.test_deterministic import config_of
train(config_of({policy!r}, steps=6), run_dir=Path({run!r}), mode=sys.argv[1])
"""


def test_killed_deterministic_run_equals_the_uninterrupted_one(tiny_policy, shaped_env, tmp_path):
    train(config_of(tiny_policy, steps=6), run_dir=tmp_path / "whole")
    run = tmp_path / "cut"
    code = textwrap.dedent(CHILD).format(root=str(ROOT), policy=str(tiny_policy), run=str(run))
    mode = "new"
    for after_step in (1, 3):
        child = subprocess.Popen(
            [sys.executable, "-c", code, mode], env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        deadline_s = time.monotonic() + 60
        while not (run / "checkpoints" / f"step-{after_step:06d}").exists():
            assert child.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.002)
        child.send_signal(signal.SIGKILL)
        child.wait()
        mode = "resume"
    train(config_of(tiny_policy, steps=6), run_dir=run, mode="resume")
    assert same(weights_of(run, 6), weights_of(tmp_path / "whole", 6))
    assert [row["step"] for row in RunDir(run).read_metrics()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "setting", ["rollout.max_staleness=1", "engine.id=sglang", "trainer.device=cuda"]
)
def test_nondeterministic_settings_are_refused(setting):
    with pytest.raises(ConfigError, match="deterministic = true needs"):
        load_config(overrides=["deterministic=true", setting])


def test_engine_without_deterministic_batches_is_refused():
    from areal_gym.agents.chat import ChatAgent
    from tests._support.shaped_env import Shaped

    with pytest.raises(ConfigError, match="ScriptedEngine decides its batches"):
        RolloutRunner(
            EpisodeSetup(Shaped, ChatAgent(), ScriptedEngine(["x"]), byte_renderer()),
            load_config().rollout,
            is_deterministic=True,
        )
