"""Checkpoints that ranks write: in the first checkpoint's types, resumed under any layout."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError
from areal_gym.models import streamed_export
from areal_gym.models.backend import ModelLoader
from areal_gym.models.hf.hf_loading import build_policy
from areal_gym.models.lora_weights import is_adapter
from areal_gym.models.stored_types import StoredTypes, read_stored_types
from areal_gym.models.tiny.checkpoint_files import (
    load_checkpoint,
    weight_files,
    write_config,
    write_weights,
)
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.algorithms.token_advantages import gae
from areal_gym.trainer.checkpoint import (
    require_space,
    require_whole,
    restore_trainer,
    save_trainer,
)
from areal_gym.trainer.objectives.supervised import Sft, Supervised
from areal_gym.trainer.parallel.fsdp import full, load_for_training
from areal_gym.trainer.parallel.rank_group import Ranks
from areal_gym.trainer.trainer import Trainer
from tests._support.rank_processes import on_ranks
from tests._support.tiny_architectures import tiny_config
from tests._support.tiny_training import batch, tiny_decoder

LAYOUTS = {
    1: {"alone": {}},
    2: {"shard": {}, "replicate": {"replicate": 2}, "tensor": {"tensor": 2}},
    4: {
        "expert": {"expert": 2},
        "replicate": {"replicate": 2},
        "context": {"context": 4},
        "tensor-context": {"tensor": 2, "context": 2},
    },
}


def trainer_on(rank, num_ranks, policy, **parallel):
    config = TrainerConfig(
        algorithm="ppo",
        lr=1e-3,
        num_ranks=num_ranks,
        parallel=parallel,
        critic={"trunk": "own"},
    )
    ranks = Ranks(rank, config.layout)
    decoder = load_for_training(policy, config, ranks)
    return Trainer(decoder, config, advantage=gae, loss=ppo_clip, ranks=ranks)


def everything(trainer):
    """Return master weights, optimizer and critic, whole; every rank must call this."""
    held = {**trainer.decoder.state_dict(), **trainer.states()}
    return {name: full(tensor.detach()).clone() for name, tensor in held.items()}


def save(trainer, rank, directory):
    """Return what was saved, after the weights have moved on beside the writing."""
    if rank == 0:
        directory.mkdir()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    saved = everything(trainer)
    written = trainer.save_checkpoint(directory)
    trainer.step(batch(1, num_groups=4), 1)
    written.result()
    if rank == 0:
        write_config(trainer.decoder, torch.bfloat16, directory)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    return saved


def begin(rank, num_ranks, home):
    streamed_export._LEAST_BYTES = 100_000  # for several files of a tiny model
    trainer = trainer_on(rank, num_ranks, home / "policy")
    trainer.step(batch(0, num_groups=4), 0)
    saved = save(trainer, rank, home / "first")
    if rank == 0:
        torch.save((saved, everything(trainer)), home / "expected.pt")
    else:
        everything(trainer)


def resume(rank, num_ranks, home):
    """Return, for each layout: are saved tensors equal, and later ones; how far these are apart.

    And whether the next step is the same when the same layout resumes from what it has saved.
    """
    results = {}
    saved, later = torch.load(home / "expected.pt")
    for name, parallel in LAYOUTS[num_ranks].items():
        trainer = trainer_on(rank, num_ranks, home / "first", **parallel)
        trainer.load(home / "first" / "trainer")
        found = save(trainer, rank, home / f"{num_ranks}-{name}")
        assert found.keys() == saved.keys()
        is_equal = all(torch.equal(found[n], saved[n]) for n in saved)
        moved = everything(trainer)
        is_later_equal = all(torch.equal(moved[n], later[n]) for n in later)
        apart, whole = (
            sum(float((a[n] - b[n]).norm()) for n in later if n.startswith("network."))
            for a, b in ((moved, later), (later, saved))
        )
        is_again_equal = None
        if name in ("tensor", "context", "tensor-context"):
            again = trainer_on(rank, num_ranks, home / f"{num_ranks}-{name}", **parallel)
            again.load(home / f"{num_ranks}-{name}" / "trainer")
            again.step(batch(1, num_groups=4), 1)
            held = everything(again)
            is_again_equal = all(torch.equal(held[n], moved[n]) for n in moved)
        results[name] = is_equal, is_later_equal, apart / whole, is_again_equal
    return results


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    path = tmp_path_factory.mktemp("layouts")
    network = build_policy(tiny_config("qwen3_moe", num_hidden_layers=2), seed=0).network
    network.to(torch.bfloat16).save_pretrained(path / "policy")
    on_ranks(2, begin, 2, path)
    return path


def test_export_has_the_types_of_the_first_checkpoint_in_several_files(home):
    files = weight_files(home / "first")
    assert len(files) >= 2
    assert read_stored_types(files) == read_stored_types(weight_files(home / "policy"))
    saved, _ = torch.load(home / "expected.pt")
    index = json.loads((home / "first" / "model.safetensors.index.json").read_text())
    written = {name: t for file in files for name, t in load_file(file).items()}
    assert written.keys() == index["weight_map"].keys()
    norm = "model.norm.weight"
    assert torch.equal(written[norm], saved[f"network.{norm}"].bfloat16())
    assert not torch.equal(written[norm].float(), saved[f"network.{norm}"])


def weights_in(directory):
    return {name: t for file in weight_files(directory) for name, t in load_file(file).items()}


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_run_resumes_under_another_layout(num_ranks, home):
    if num_ranks == 1:
        results = resume(0, 1, home)
    else:
        results = on_ranks(num_ranks, resume, num_ranks, home)[0]
    expected = weights_in(home / "first")
    for name, (is_equal, _, gap, is_again_equal) in results.items():
        assert is_equal, name  # master weights, optimizer and critic, bit for bit
        assert gap < 1e-3, name  # of the next step, whose sums have another order
        assert is_again_equal is not False, name
        written = weights_in(home / f"{num_ranks}-{name}")
        assert all(torch.equal(written[n], expected[n]) for n in expected), name
    if num_ranks == 2:
        assert results["shard"][1]  # the layout that has written: the next step is the same


def export_others(rank, home):
    """Write checkpoints of an adapter and of a reward model, and a file of what they publish."""
    published = {}
    lora = TrainerConfig(num_ranks=2, lr=1e-2, lora={"rank": 4}, dtype="bfloat16")
    plain = TrainerConfig(num_ranks=2, lr=1e-2)
    for name, config in (("adapter", lora), ("reward", plain)):
        ranks = Ranks(rank, config.layout)
        loader = ModelLoader(is_reward_model=name == "reward")
        decoder = load_for_training(home / "policy", config, ranks, loader=loader)
        trainer = Supervised(decoder, config, objective=Sft(), ranks=ranks)
        with torch.no_grad():
            for key, parameter in decoder.named_parameters():
                if is_adapter(key):
                    parameter.fill_(0.1)
        published[name] = {n: t.bfloat16().clone() for n, t in trainer.weights()}
        if rank == 0:
            (home / name).mkdir()
        torch.distributed.barrier()
        trainer.save_checkpoint(home / name).result()
    torch.save(published, home / f"published-{rank}.pt")


def test_adapters_are_merged_and_heads_are_written(home):
    on_ranks(2, export_others, home)
    published = torch.load(home / "published-0.pt")
    start = weights_in(home / "policy")
    for name in ("adapter", "reward"):
        written = weights_in(home / name)
        assert written.keys() == published[name].keys()
        assert all(torch.equal(written[n], published[name][n]) for n in written)
    assert not torch.equal(
        weights_in(home / "adapter")["model.layers.0.self_attn.q_proj.weight"],
        start["model.layers.0.self_attn.q_proj.weight"],
    )
    # The base of an adapter does not change, so that there is nothing to keep but the adapter.
    folders = [home / name / "trainer" / "master_weights" for name in ("adapter", "reward")]
    assert [folder.is_dir() for folder in folders] == [False, True]
    assert "score.weight" in weights_in(home / "reward")


def rounded_trainer(decoder=None):
    decoder = decoder or tiny_decoder()
    decoder.stored_types = StoredTypes(main=torch.bfloat16)
    return Trainer(decoder, TrainerConfig(lr=1e-3), advantage=grpo, loss=ppo_clip)


def test_rounded_checkpoint_resumes_bit_for_bit(tmp_path):
    trainer = rounded_trainer()
    trainer.step(batch(0), 0)
    require_space(trainer, tmp_path / "checkpoints", num_kept=2)
    path = save_trainer(trainer, tmp_path / "checkpoints", 1, tmp_path)
    written = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
    headers = 2500 * (len(trainer.states()) + len(dict(trainer.weights())))
    assert 0 <= written - trainer.checkpoint_bytes() < headers
    require_whole(path)
    trainer.step(batch(1), 1)
    resumed = rounded_trainer(load_checkpoint(path))
    restore_trainer(resumed, path)
    resumed.step(batch(1), 1)
    expected = dict(trainer.weights())
    assert all(torch.equal(t, expected[n]) for n, t in resumed.weights())


def test_rounded_checkpoint_without_master_weights_is_refused(tmp_path):
    path = save_trainer(rounded_trainer(), tmp_path, 1, tmp_path)
    shutil.rmtree(path / "trainer" / "master_weights")
    with pytest.raises(ConfigError, match="master_weights"):
        require_whole(path)


def test_float32_checkpoint_has_one_copy_of_the_weights(tmp_path):
    trainer = Trainer(tiny_decoder(), TrainerConfig(), advantage=grpo, loss=ppo_clip)
    path = save_trainer(trainer, tmp_path, 1, tmp_path)
    assert sorted(file.name for file in path.iterdir()) == [
        *("config.json", "model.safetensors", "trainer", "trainer.json")
    ]
    assert not (path / "trainer" / "master_weights").exists()
    write_weights(trainer.weights(), tmp_path)
    assert (path / "model.safetensors").read_bytes() == (
        tmp_path / "model.safetensors"
    ).read_bytes()
