"""A learner in a process of its own does what a learner does."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import Future

import pytest
import torch

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError, TrainError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.algorithms.token_advantages import gae
from areal_gym.trainer.batch.sequences import sequences_of
from areal_gym.trainer.checkpoint import restore_trainer, save_trainer
from areal_gym.trainer.parallel.worker import ProcessTrainer
from areal_gym.trainer.trainer import Trainer
from tests._support.paths import ROOT
from tests._support.processes import is_running
from tests._support.tiny_training import batch, tiny_checkpoint, tiny_decoder, without_costs

SETTINGS = TrainerConfig(optimizer="muon", lr=1e-2, minibatches=2)


@pytest.fixture
def worker():
    learner = ProcessTrainer(
        Trainer, tiny_checkpoint(), SETTINGS, advantage=grpo, loss=ppo_clip, temperature=1.0
    )
    yield learner
    learner.close()


def here():
    return Trainer(tiny_decoder(), SETTINGS, advantage=grpo, loss=ppo_clip, temperature=1.0)


def weights_of(learner):
    return {name: tensor.clone() for name, tensor in learner.weights()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_worker_trains_bit_for_bit_like_the_local_trainer(worker):
    other = here()
    assert equal(weights_of(worker), weights_of(other))
    start = weights_of(other)
    for step in range(3):
        groups = batch(step, version=max(0, step - 1))  # stale from the third on
        theirs, ours = worker.step(groups, step), other.step(groups, step)
        assert without_costs(theirs) == without_costs(ours)
    assert equal(weights_of(worker), weights_of(other))
    assert not equal(weights_of(worker), start)
    rows = sequences_of(tuple(batch(7)))
    for theirs, ours in zip(worker.score(rows), other.score(rows), strict=True):
        assert torch.equal(theirs, ours)


def test_worker_holds_critic_and_reference(tiny_policy, tmp_path):
    settings = TrainerConfig(algorithm="ppo", kl={"coefficient": 0.1}, minibatches=2)
    arguments = {"advantage": gae, "loss": ppo_clip, "reference": tiny_policy}
    theirs = ProcessTrainer(Trainer, tiny_policy, settings, **arguments)
    ours = Trainer(load_checkpoint(tiny_policy), settings, **arguments)
    try:
        for step in range(2):
            found, expected = theirs.step(batch(step), 1), ours.step(batch(step), 1)
            assert without_costs(found) == without_costs(expected)
        theirs.save(tmp_path / "states").result()
        theirs.load(tmp_path / "states")
        saved = Trainer(load_checkpoint(tiny_policy), settings, **arguments)
        saved.load(tmp_path / "states")
        assert equal(saved.states(), ours.states())
        assert equal(weights_of(theirs), weights_of(ours))
    finally:
        theirs.close()


def test_worker_saves_and_restores_checkpoints(worker, tiny_policy, tmp_path):
    worker.step(batch(0), 0)
    path = save_trainer(worker, tmp_path, 1, tiny_policy, {"next_group": 3})
    other = here()
    other.decoder.load_state_dict(weights_of(worker))
    assert restore_trainer(other, path) == {"next_group": 3}
    worker.step(batch(1), 1)
    other.step(batch(1), 1)
    assert equal(weights_of(worker), weights_of(other))


def test_worker_training_errors_are_raised_here(worker):
    with pytest.raises(TrainError, match="no token that the policy sampled"):
        worker.step([], 0)
    assert worker.step(batch(0), 0)["train/grad_norm"] > 0  # and it goes on


def test_worker_construction_errors_are_raised_here():
    settings = TrainerConfig(loss_kwargs={"colour": "red"})
    with pytest.raises(ConfigError, match="colour"):
        ProcessTrainer(Trainer, tiny_checkpoint(), settings, advantage=grpo, loss=ppo_clip)


def test_worker_death_is_an_error_with_a_resume_hint(worker):
    os.kill(worker._workers[0].process.pid, signal.SIGKILL)
    with pytest.raises(TrainError, match="has died") as caught:
        worker.step(batch(0), 0)
    assert any("--resume" in hint for hint in caught.value.hints)


class NeverSaved(Trainer):
    """A disk that never answers."""

    def save(self, directory):
        return Future()


def test_worker_death_ends_the_wait_for_a_checkpoint(tmp_path):
    learner = ProcessTrainer(NeverSaved, tiny_checkpoint(), SETTINGS, advantage=grpo, loss=ppo_clip)
    try:
        written = learner.save(tmp_path / "states")
        assert learner.step(batch(0), 0)["train/grad_norm"] > 0  # beside it
        assert not written.done()
        os.kill(learner._workers[0].process.pid, signal.SIGKILL)
        with pytest.raises(TrainError, match=r"has died .*SIGKILL"):
            written.result(timeout=20)
    finally:
        learner.close()


class FullDisk(Trainer):
    def save(self, directory):
        written = Future()
        written.set_exception(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        return written


def test_worker_reports_a_full_disk_and_continues(tiny_policy, tmp_path):
    learner = ProcessTrainer(FullDisk, tiny_checkpoint(), SETTINGS, advantage=grpo, loss=ppo_clip)
    try:
        with pytest.raises(TrainError, match="step-000001: No space left on device"):
            save_trainer(learner, tmp_path, 1, tiny_policy)
        assert list(tmp_path.iterdir()) == []
        assert learner.step(batch(0), 0)["train/grad_norm"] > 0
    finally:
        learner.close()


def test_worker_does_not_outlive_its_parent(tmp_path):
    code = f"""
        import os, signal, sys
        sys.path.insert(0, {str(ROOT)!r})
        from pathlib import Path
        from areal_gym.config import TrainerConfig
        from areal_gym.trainer.algorithms.advantages import grpo
        from areal_gym.trainer.trainer import Trainer
        from areal_gym.trainer.algorithms.losses import ppo_clip
        from areal_gym.trainer.parallel.worker import ProcessTrainer
        learner = ProcessTrainer(
            Trainer,
            Path({str(tiny_checkpoint())!r}),
            TrainerConfig(),
            advantage=grpo,
            loss=ppo_clip,
        )
        print(learner._workers[0].process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    pid = int(done.stdout)
    deadline_s = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not is_running(pid)
