"""Checkpoints are written beside everything else."""

import asyncio
import sys
import threading
from pathlib import Path

from areal_gym.agents.chat import ChatAgent
from areal_gym.config import RolloutConfig, TrainerConfig
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.modeling.checkpoint import load_checkpoint
from areal_gym.rollout.runner import RolloutRunner
from areal_gym.run.saving import Saver
from areal_gym.rundir import RunDir
from areal_gym.trainer.advantages import grpo
from areal_gym.trainer.checkpoint import latest_checkpoint
from areal_gym.trainer.learner import Learner
from areal_gym.trainer.losses import ppo_clip

sys.path.append(str(Path(__file__).parent / "rollout"))

from small import Sums


class Held(Learner):
    """A disk so slow that saving takes until somebody says so."""

    def state_dict(self):
        self.began.set()
        assert self.may_end.wait(20)
        return super().state_dict()


def test_rollouts_go_on_while_a_checkpoint_is_written(tiny_policy, tmp_path):  # trap 21
    learner = Held(load_checkpoint(tiny_policy), TrainerConfig(), advantage=grpo, loss=ppo_clip)
    learner.began, learner.may_end = threading.Event(), threading.Event()
    config = RolloutConfig(batch_groups=2, group_size=2, max_staleness=3)

    async def save(directory):
        engine = ScriptedEngine(["10"])
        told = []
        saver = Saver(learner, directory, tiny_policy, lambda: {"next_group": 2}, told.append)
        async with RolloutRunner(Sums, ChatAgent(), engine, byte_renderer(), config) as runner:
            saving = asyncio.create_task(saver.save(1))
            while not learner.began.is_set():
                await asyncio.sleep(0.001)
            batches = [await runner.next_batch() for _ in range(3)]
            assert [len(batch) for batch in batches] == [2, 2, 2]
            assert not saving.done()
            assert told == []  # nobody may rely on what is not on the disk
            learner.may_end.set()
            await saving
            assert told == [{"next_group": 2}]
        saver.close()

    with RunDir.open(tmp_path / "run") as directory:
        asyncio.run(save(directory))
        assert latest_checkpoint(directory.checkpoints_dir)[0] == 1
