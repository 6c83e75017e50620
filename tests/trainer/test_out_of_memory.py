"""Memory that runs out, for real: a process that may have little."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from areal_gym.errors import TrainError
from areal_gym.trainer.out_of_memory import out_of_memory, readable_memory_errors

PROGRAM = """
import os, resource, sys
from pathlib import Path

from areal_gym.config import TrainerConfig
from areal_gym.errors import TrainError
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.trainer import Trainer
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.parallel.worker import ProcessTrainer
from tests._support.tiny_training import batch, tiny_checkpoint, tiny_decoder

config = TrainerConfig(tokens_per_microbatch=1_000_000)
arguments = {"advantage": grpo, "loss": ppo_clip}
if sys.argv[1] == "here":
    learner, pid = Trainer(tiny_decoder(), config, **arguments), os.getpid()
else:
    learner = ProcessTrainer(Trainer, tiny_checkpoint(), config, **arguments)
    pid = learner._workers[0].process.pid
learner.step(batch(), 0)  # what the first step loads and keeps is not what is missing later
groups = batch(num_groups=1500)
held = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
# Enough to receive the batch, not to compute on it: 2**30 would be.
resource.prlimit(pid, resource.RLIMIT_AS, (held + 2**28, held + 2**28))
try:
    learner.step(groups, 0)
except TrainError as error:
    print(error, *error.hints, sep="\\n")
"""


@pytest.mark.parametrize("where", ["here", "process"])
def test_out_of_memory_error_names_the_setting_to_lower(where):
    paths = filter(None, sys.path)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, where],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert "the trainer is out of memory" in done.stdout, done.stderr
    assert "lower trainer.tokens_per_microbatch" in done.stdout
    assert "trainer.recompute_layers=true" in done.stdout


def test_gpu_out_of_memory_is_named():
    told = out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert told is not None
    assert "GPU is out of memory" in told.message
    assert "tokens_per_microbatch" in told.hints[0]


def test_allocation_that_fails_outside_of_the_allocator_is_named():
    told = out_of_memory(RuntimeError("std::bad_alloc"))
    assert told is not None
    assert told.message == "the trainer is out of memory"


def test_other_errors_are_not_changed():
    with pytest.raises(RuntimeError, match="size of tensor") as caught, readable_memory_errors():
        torch.ones(2) + torch.ones(3)
    assert not isinstance(caught.value, TrainError)
