"""What is lost when a process dies, or its disk is full, while a checkpoint is written: nothing."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from areal_gym.config import TrainerConfig
from areal_gym.errors import LostRankError, TrainError
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.checkpoint import (
    latest_checkpoint,
    require_whole,
    restore_trainer,
    save_trainer,
)
from areal_gym.trainer.parallel.worker import ProcessTrainer
from areal_gym.trainer.states import StateFiles
from areal_gym.trainer.trainer import Trainer
from tests._support.paths import ROOT
from tests._support.tiny_training import batch, tiny_checkpoint

WAIT_S = 120


class Troubled(Trainer):
    """A rank that has the trouble which a file beside the checkpoints names, if there is one."""

    def save_checkpoint(self, directory: Path) -> Future[None]:
        trouble = directory.parent.parent / f"trouble-{self._ranks.rank}"
        if not trouble.exists():
            return super().save_checkpoint(directory)
        kind, _, amount = trouble.read_text().partition(" ")
        trouble.unlink()
        if kind == "stuck":
            self._files = Stuck(self._ranks, trouble.with_name("pid"))
            return super().save_checkpoint(directory)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(amount), limits[1]))
        written = super().save_checkpoint(directory)
        written.add_done_callback(lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
        return written


class Stuck(StateFiles):
    """Writes its part of the states, and then nothing more."""

    def __init__(self, ranks, pid_file):
        super().__init__(ranks)
        self._pid_file = pid_file

    def agree(self, error):
        if self.ranks.rank == 1:
            draft = self._pid_file.with_suffix(".new")
            draft.write_text(str(os.getpid()))
            draft.rename(self._pid_file)
            time.sleep(WAIT_S)
        super().agree(error)


def two_ranks(policy=None):
    config = TrainerConfig(num_ranks=2, lr=1e-2)
    return ProcessTrainer(
        Troubled, policy or tiny_checkpoint(), config, advantage=grpo, loss=ppo_clip
    )


def wait_for_pid(file):
    deadline_s = time.monotonic() + WAIT_S
    while not file.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return int(file.read_text())


def weights_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def test_rank_killed_while_writing_loses_nothing(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    trainer = two_ranks()
    try:
        trainer.step(batch(0), 0)
        first = save_trainer(trainer, checkpoints, 1, tiny_checkpoint(), {"next_group": 2})
        saved = weights_of(trainer)
        trainer.step(batch(1), 0)
        for rank in range(2):
            (tmp_path / f"trouble-{rank}").write_text("stuck")
        kill = lambda: os.kill(wait_for_pid(tmp_path / "pid"), signal.SIGKILL)  # noqa: E731
        with pytest.raises(LostRankError, match=r"rank 1 .* has died.*SIGKILL"):
            save_trainer(trainer, checkpoints, 2, tiny_checkpoint(), on_copied=kill)
    finally:
        trainer.close()
    assert os.listdir(checkpoints) == ["step-000001"]
    require_whole(first)
    resumed = two_ranks(first)
    try:
        assert restore_trainer(resumed, first) == {"next_group": 2}
        found = weights_of(resumed)
        assert all(torch.equal(found[name], saved[name]) for name in saved)
    finally:
        resumed.close()


def is_running(pid):
    """Whether a process works; one that has ended and that nobody has waited for has no command."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


@pytest.mark.long
def test_driver_killed_while_ranks_write_loses_nothing(tmp_path):
    code = f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(ROOT)!r})
        from areal_gym.trainer.checkpoint import save_trainer
        from tests.trainer.test_lost_writers import batch, two_ranks
        if __name__ == "__main__":
            home, policy = Path({str(tmp_path)!r}), Path({str(tiny_checkpoint())!r})
            trainer = two_ranks(policy)
            save_trainer(trainer, home / "checkpoints", 1, policy)
            for rank in range(2):
                (home / f"trouble-{{rank}}").write_text("stuck")
            print(*(worker.process.pid for worker in trainer._workers), flush=True)
            save_trainer(trainer, home / "checkpoints", 2, policy)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE
    ) as driver:
        pids = driver.stdout.readline().split()
        assert len(pids) == 2
        wait_for_pid(tmp_path / "pid")
        driver.kill()
    deadline_s = time.monotonic() + WAIT_S
    while any(is_running(int(pid)) for pid in pids):
        assert time.monotonic() < deadline_s, "the ranks outlive their driver"
        time.sleep(0.05)
    checkpoints = tmp_path / "checkpoints"
    names = sorted(path.name[:12] for path in checkpoints.iterdir())
    assert names == [".step-000002", "step-000001"]
    (tmp_path / "config.yaml").write_text("env: {id: math}\n")
    with RunDir.open(tmp_path, "resume") as run:
        assert os.listdir(run.checkpoints_dir) == ["step-000001"]
    require_whole(latest_checkpoint(checkpoints)[1])


def test_full_disk_of_a_rank_is_a_readable_error_and_training_goes_on(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    trainer = two_ranks()
    try:
        trainer.step(batch(0), 0)
        first = save_trainer(trainer, checkpoints, 1, tiny_checkpoint())
        whole = (first / "model.safetensors").stat().st_size
        # A rank's own part does not fit; half of the weights do, and the file of all does not.
        for step, (rank, limit) in enumerate([(1, 2000), (0, 3 * whole // 4)], start=2):
            (tmp_path / f"trouble-{rank}").write_text(f"full {limit}")
            with pytest.raises(TrainError, match=f"step-{step:06d}: File too large") as caught:
                save_trainer(trainer, checkpoints, step, tiny_checkpoint())
            assert "free some space" in caught.value.hints[0]
            assert os.listdir(checkpoints) == ["step-000001"]
            assert trainer.step(batch(step), 0)["train/grad_norm"] > 0
        last = save_trainer(trainer, checkpoints, 4, tiny_checkpoint())
        require_whole(last)
    finally:
        trainer.close()
