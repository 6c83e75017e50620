"""Ranks that cannot form a group say who is missing, where and for how long they waited."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from areal_gym.config import TrainerConfig
from areal_gym.errors import TrainError
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.parallel import worker
from areal_gym.trainer.parallel.process_group import Meeting
from areal_gym.trainer.parallel.worker import ProcessTrainer
from areal_gym.trainer.trainer import Trainer
from tests._support.rank_processes import forkserver
from tests._support.tiny_training import tiny_checkpoint

HOST = socket.gethostname()


def free_url():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def joined(ranks, size, *, url, timeout_s, environment=None, later_s=None):
    """Return what each rank reports: the sum of all ranks, or its error's text and hints.

    Ranks named in `later_s` join so many seconds after the others.
    """
    context = forkserver()
    answers, start = context.Queue(), context.Barrier(len(ranks))
    processes = [
        context.Process(
            target=join,
            args=(
                answers,
                start,
                (later_s or {}).get(rank, 0.0),
                Meeting(url=url, rank=rank, size=size, timeout_s=timeout_s),
                environment or {},
            ),
            daemon=True,
        )
        for rank in ranks
    ]
    for process in processes:
        process.start()
    try:
        return dict(answers.get(timeout=120) for _ in ranks)
    finally:
        for process in processes:
            process.kill()
            process.join()


def join(answers, start, later_s, meeting, environment):
    os.environ.update(environment)
    start.wait()
    time.sleep(later_s)
    try:
        meeting.join("gloo", ["cpu"])
        total = torch.tensor([float(meeting.rank)])
        # A further group needs the store in which the ranks met.
        torch.distributed.all_reduce(total, group=torch.distributed.new_group())
        answers.put((meeting.rank, total.item()))
    except TrainError as error:
        answers.put((meeting.rank, "\n".join((str(error), *error.hints))))
    time.sleep(60)  # rank 0 has the store; the test ends all


def test_ranks_join_by_address_and_by_file(tmp_path):
    for url in (free_url(), f"file://{tmp_path}/ranks"):
        assert joined([0, 1], 2, url=url, timeout_s=60) == {0: 1.0, 1: 1.0}


@pytest.mark.parametrize("later_s", [0.0, 4.0])
def test_a_rank_that_never_comes_is_named_in_time(later_s):
    """All ranks that came name the same missing ranks, even if rank 0 gives up first."""
    url = free_url()
    answers = joined([0, 2], 4, url=url, timeout_s=8, later_s={2: later_s})
    assert sorted(answers) == [0, 2]
    for rank, answer in answers.items():
        assert answer.startswith(f"rank {rank} of 4, on {HOST}: 2 ranks (1, 3) did not come to")
        assert f"{url} within 8 s" in answer
        assert re.search(rf"present: rank 0 on {HOST}, process \d+; rank 2 on {HOST}", answer)
        assert "NCCL_SOCKET_IFNAME" in answer
        assert "firewall" in answer
        assert "trainer.connect_timeout_s=16" in answer


def test_a_rank_that_does_not_reach_rank_0_says_so():
    url = free_url()
    (answer,) = joined([1], 2, url=url, timeout_s=2).values()
    assert f"does not reach rank 0 at {url} within 2 s" in answer


def test_a_rank_that_comes_but_does_not_connect_is_named():
    """The last one tells where it is, and then nothing: as if data were blocked."""
    url = free_url()
    came = threading.Event()

    def come():
        address, port = url.removeprefix("tcp://").split(":")
        limit = timedelta(seconds=30)  # the store may have ended before this one came
        silent = TCPStore(address, int(port), None, False, limit, wait_for_workers=False)
        PrefixStore("areal-gym", silent).set("rank/2", '{"host": "far", "pid": 7}')
        came.wait()

    thread = threading.Thread(target=come, daemon=True)
    thread.start()
    answers = joined([0, 1], 3, url=url, timeout_s=10)
    came.set()
    thread.join(timeout=60)
    for answer in answers.values():
        assert "found each other, but did not connect within 10 s" in answer
        assert "rank 2 on far, process 7" in answer


def test_an_interface_that_is_not_there_is_named():
    answers = joined(
        [0, 1], 2, url=free_url(), timeout_s=20, environment={"GLOO_SOCKET_IFNAME": "no-such0"}
    )
    for answer in answers.values():
        assert "could not connect to the others" in answer
        assert "GLOO_SOCKET_IFNAME=no-such0" in answer


def test_trainer_whose_rank_hangs_at_its_start_gives_up(monkeypatch):
    """The process of one of two ranks is stopped before it begins."""
    begun = []

    class Stopped(worker._Worker):
        def __init__(self, rank):
            super().__init__(rank)
            begun.append(self.process)
            if rank == 1:
                self.process.send_signal(signal.SIGSTOP)

    monkeypatch.setattr(worker, "_Worker", Stopped)
    config = TrainerConfig(num_ranks=2, connect_timeout_s=3)
    with pytest.raises(TrainError, match=r"1 rank \(1\) did not come .* within 3 s"):
        ProcessTrainer(Trainer, tiny_checkpoint(), config, advantage=grpo, loss=ppo_clip)
    assert [process.poll() is not None for process in begun] == [True, True]
