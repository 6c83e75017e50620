"""Weights never pass Ray's object store: ranks read, write and publish them themselves."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'areal-gym[ray]'")

from areal_gym.config import load_config
from areal_gym.distributed.cluster import open_cluster
from areal_gym.distributed.ray_ranks import RayTrainer
from areal_gym.models.tiny.checkpoint_files import save_checkpoint
from areal_gym.models.tiny.decoder import build_decoder
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.policy_trainer import STATES
from areal_gym.trainer.trainer import Trainer
from tests._support.tiny_training import CONFIG, batch

pytestmark = pytest.mark.slow


def stored_bytes():
    """All bytes that were ever put into this Ray's object store, and those that lie there now."""
    import ray
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    stats = get_memory_info_reply(state).store_stats
    return stats.cumulative_created_bytes, stats.object_store_bytes_used


def count_weights(side):
    """As publication does, gather all weights in each rank; none come back."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in side.weights(None))


def test_no_weights_are_in_the_object_store(tmp_path):
    big = build_decoder(replace(CONFIG, hidden_size=512, intermediate_size=2048), seed=0)
    num_bytes = sum(p.numel() * p.element_size() for p in big.parameters())
    assert num_bytes > 20e6
    policy = save_checkpoint(big, tmp_path / "policy")
    config = load_config(overrides=["cluster.address=local", "trainer.num_ranks=2"])

    async def train():
        async with open_cluster(config) as cluster:
            before, _ = stored_bytes()
            trainer = await asyncio.to_thread(
                partial(RayTrainer, cluster, Trainer, policy, config.trainer),
                advantage=grpo,
                loss=ppo_clip,
            )
            try:
                for step in range(2):
                    trainer.step(batch(step), step)
                trainer.save_checkpoint(tmp_path / "saved").result(timeout=120)
                trainer.load(tmp_path / "saved" / STATES)
                assert trainer.run_in_ranks(count_weights) == num_bytes
                after, held = stored_bytes()
                return after - before, held
            finally:
                trainer.close()

    written, held = asyncio.run(train())
    assert written < 1e6
    assert held < 1e6
