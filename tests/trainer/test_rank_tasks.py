"""Tasks of the ranks: each rank takes part, however the ranks are arranged, and all agree."""

import pytest
import torch
from pydantic import ValidationError

from areal_gym.config import TrainerConfig
from areal_gym.engines.servers.fake_tensors import read_weights
from areal_gym.errors import TrainError
from areal_gym.models.hf.hf_loading import build_policy
from areal_gym.models.tiny.checkpoint_files import weight_files
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.parallel.worker import ProcessTrainer
from areal_gym.trainer.trainer import Trainer
from areal_gym.trainer.weight_sync.disk import WriteFiles
from tests._support.tiny_architectures import tiny_config


def fail_in_the_last(side):
    """Fail in one rank, as a full disk of its machine would."""
    for _ in side.weights(None):
        pass
    is_last = side.ranks.rank == side.ranks.size - 1
    side.agree(ValueError("no room here") if is_last else None)


def ranks_by_number(side):
    return side.gather(side.ranks.rank)


@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor": 2},
        *(
            pytest.param({key: 2}, marks=pytest.mark.long)
            for key in ("replicate", "context", "expert")
        ),
    ],
    ids=str,
)
def test_every_rank_writes_and_all_agree(parallel, tmp_path):
    try:
        config = TrainerConfig(num_ranks=2, parallel=parallel)
    except ValidationError as refused:
        if "is not there yet" not in str(refused):
            raise
        pytest.skip("the settings refuse this layout still")
    policy = build_policy(tiny_config("qwen3_moe"), seed=0)
    policy.network.save_pretrained(tmp_path / "policy")
    trainer = ProcessTrainer(Trainer, tmp_path / "policy", config, advantage=grpo, loss=ppo_clip)
    try:
        assert trainer.run_in_ranks(ranks_by_number) == [0, 1]
        # A disk that one rank cannot write to is an error of all, and none waits for another.
        with pytest.raises(TrainError, match="no room here"):
            trainer.run_in_ranks(fail_in_the_last)
        trainer.run_in_ranks(WriteFiles(tmp_path / "written", torch.bfloat16, 20_000))
        expected = dict(trainer.weights())
    finally:
        trainer.close()
    assert len(weight_files(tmp_path / "written")) > 2
    written = read_weights(tmp_path / "written")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(written[name], tensor.bfloat16()), name
