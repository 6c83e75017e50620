"""Checkpoints are written beside everything else."""

import asyncio
import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from areal_gym.agents.chat import ChatAgent
from areal_gym.config import RolloutConfig, TrainerConfig
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.errors import TrainError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint
from areal_gym.rollout.episode_runners import EpisodeSetup
from areal_gym.rollout.runner import RolloutRunner
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.saving import Saver
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.checkpoint import (
    keep_checkpoints,
    latest_checkpoint,
    require_whole,
    restore_trainer,
)
from areal_gym.trainer.parallel.rank_group import ALONE
from areal_gym.trainer.states import StateFiles
from areal_gym.trainer.trainer import Trainer
from tests._support.paths import ROOT
from tests._support.sums_env import Sums
from tests._support.tiny_training import batch


class SlowDisk(StateFiles):
    """Writing takes until somebody says so."""

    def __init__(self) -> None:
        super().__init__(ALONE)
        self.began, self.may_end = threading.Event(), threading.Event()

    def write(self, *arguments):
        self.began.set()
        assert self.may_end.wait(20)
        super().write(*arguments)


class FullDisk(StateFiles):
    def write(self, *arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def learner_on(files: StateFiles, policy: Path) -> Trainer:
    learner = Trainer(load_checkpoint(policy), TrainerConfig(), advantage=grpo, loss=ppo_clip)
    learner._files = files
    return learner


def copies(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@contextmanager
def saver_of(learner, run, policy, told):
    state = {"next_group": 2}
    saver = Saver(
        learner,
        run,
        policy,
        lambda: state,
        on_saved=lambda step, saved: told.append(saved),
        delete_old=lambda: keep_checkpoints(run.checkpoints_dir, 2, {}),
    )
    try:
        yield saver
    finally:
        saver.close()


def test_training_continues_while_a_checkpoint_is_written(tiny_policy, tmp_path):  # trap 21
    disk = SlowDisk()
    learner = learner_on(disk, tiny_policy)
    learner.step(batch(), 0)
    weights, states = copies(learner.weights()), copies(learner.states().items())
    config = RolloutConfig(batch_groups=2, group_size=2, max_staleness=3)

    async def save(run):
        told = []
        engine = ScriptedEngine(["10"])
        async with RolloutRunner(
            EpisodeSetup(Sums, ChatAgent(), engine, byte_renderer()), config
        ) as runner:
            with saver_of(learner, run, tiny_policy, told) as saver:
                await saver.save(1)  # returns, though nothing can be written yet
                batches = [await runner.next_batch() for _ in range(3)]
                assert [len(groups) for groups in batches] == [2, 2, 2]
                learner.step(batch(1), 1)
                assert disk.began.wait(20)
                saver.settle()
                assert told == []  # nobody may rely on what is not on the disk
                assert latest_checkpoint(run.checkpoints_dir) is None
                second = asyncio.create_task(saver.save(2))
                for _ in range(20):
                    await asyncio.sleep(0)
                assert not second.done()  # one at a time
                disk.may_end.set()
                await second
                assert told == [{"next_group": 2}]
                saver.save_now(2)  # is on its way already
                assert len(told) == 2

    with RunDir.open(tmp_path / "run") as run:
        asyncio.run(save(run))
        path = run.checkpoints_dir / "step-000001"
        saved = learner_on(StateFiles(ALONE), path)
        assert restore_trainer(saved, path) == {"next_group": 2}
        assert same(copies(saved.weights()), weights)
        assert not same(copies(learner.weights()), weights)
        assert same(saved.states(), states)
        assert latest_checkpoint(run.checkpoints_dir)[0] == 2


def test_full_disk_is_raised_at_the_next_step_and_keeps_checkpoints(tiny_policy, tmp_path):
    learner = learner_on(StateFiles(ALONE), tiny_policy)
    told = []

    async def save(run):
        with saver_of(learner, run, tiny_policy, told) as saver:
            saver.save_now(1)
            learner._files = FullDisk(ALONE)
            await saver.save(2)
            with pytest.raises(TrainError, match="step-000002: No space left on device"):
                await saver.save(3)
            with pytest.raises(TrainError, match="step-000003: No space left on device"):
                saver.save_now(3)
            learner._files = StateFiles(ALONE)
            assert os.listdir(run.checkpoints_dir) == ["step-000001"]
            saver.save_now(3)

    with RunDir.open(tmp_path / "run") as run:
        asyncio.run(save(run))
        assert sorted(os.listdir(run.checkpoints_dir)) == ["step-000001", "step-000003"]
    assert len(told) == 2


def test_file_size_limit_is_a_full_disk(tiny_policy, tmp_path):
    """torch.save says something about positions instead."""
    learner = learner_on(StateFiles(ALONE), tiny_policy)
    learner.step(batch(), 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            learner.save(tmp_path / "states").result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_kill_during_a_save_keeps_the_previous_checkpoint(tiny_policy, tmp_path):
    code = f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(ROOT)!r})
        from areal_gym.trainer.checkpoint import save_trainer
        from tests.runs.test_saving import SlowDisk, batch, learner_on
        disk, policy, home = SlowDisk(), Path({str(tiny_policy)!r}), Path({str(tmp_path)!r})
        learner = learner_on(disk, policy)
        disk.may_end.set()
        save_trainer(learner, home / "run" / "checkpoints", 1, policy)
        disk.may_end.clear()
        learner.step(batch(), 0)
        written = lambda: print("copied", flush=True)
        save_trainer(learner, home / "run" / "checkpoints", 2, policy, on_copied=written)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"copied\n"
        child.send_signal(signal.SIGKILL)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name[:12] for path in checkpoints.iterdir()) == [
        ".step-000002",
        "step-000001",
    ]
    (tmp_path / "run" / "config.yaml").write_text("env: {id: math}\n")
    with RunDir.open(tmp_path / "run", "resume") as run:
        assert os.listdir(run.checkpoints_dir) == ["step-000001"]
    step, path = latest_checkpoint(checkpoints)
    assert step == 1
    require_whole(path)
    restore_trainer(learner_on(StateFiles(ALONE), path), path)
