"""What ranks and their driver hold while checkpoints are written and read."""

import importlib.util

import pytest
import torch

from tests._support.paths import ROOT


@pytest.mark.slow
@pytest.mark.long
def test_ranks_hold_one_copy_of_their_shard_and_the_driver_nothing(tmp_path):
    place = ROOT / "benchmarks" / "checkpoint_memory.py"
    spec = importlib.util.spec_from_file_location("checkpoint_memory", place)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    row = benchmark.measure(tmp_path, 20, 2, torch.bfloat16)
    assert 0.1 < row["rank_saving_shards"] <= 1.2
    assert 0.5 < row["rank_loading_shards"] <= 1.2
    assert max(row["driver_saving_mb"], row["driver_loading_mb"]) < 0.1 * row["shard_mb"]
