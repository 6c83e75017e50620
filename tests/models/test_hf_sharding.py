"""Models of transformers on several ranks: each reads its shard, and all compute what one does."""

import gc
import json
import threading
import time

import pytest
import torch
import transformers

from areal_gym.config import Layout, TrainerConfig
from areal_gym.errors import ConfigError
from areal_gym.models.hf.hf_loading import Sharding, build_policy, load_policy
from areal_gym.models.tiny.checkpoint_files import write_weights
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.batch.bins import Row
from areal_gym.trainer.batch.packing import pack
from areal_gym.trainer.chunked_logprobs import score_tokens
from areal_gym.trainer.parallel.fsdp import full
from areal_gym.trainer.parallel.worker import ProcessTrainer
from areal_gym.trainer.trainer import Trainer
from tests._support.long_tests import short
from tests._support.rank_processes import on_ranks
from tests._support.tiny_architectures import tiny_config

NAMES = short(
    ["llama", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_vl"],
    "llama",
)
WITH_EXPERTS = ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next"]
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
    WITH_EXPERTS = []  # refused there


def two_groups(can_share_prompts):
    generator = torch.Generator().manual_seed(1)
    draw = lambda count: tuple(torch.randint(3, 100, (count,), generator=generator).tolist())  # noqa: E731
    for num_prompt in (25, 11):
        prompt = draw(num_prompt)
        num_shared = num_prompt * can_share_prompts
        yield [Row(token_ids=(*prompt, *draw(n)), num_shared=num_shared) for n in (9, 30, 17)]


def loss_of(policy, rows):
    masks = [(False,) * 11 + (True,) * (len(row.token_ids) - 11) for row in rows]
    logprobs = score_tokens(policy, pack(rows), masks).logprobs
    return (logprobs * torch.linspace(-1, 1, len(logprobs))).sum()


def compare_with_one_rank(rank, directory, names, num_expert_ranks):
    """The largest relative difference of a gradient, and whether published tensors are equal."""
    results = {}
    num_ranks = torch.distributed.get_world_size()
    for name in names:
        alone = load_policy(directory / name)
        for rows in two_groups(alone.can_share_prompts):
            loss_of(alone, rows).backward()
        sharding = Sharding(layout=Layout(shard=num_ranks, expert=num_expert_ranks))
        policy = load_policy(directory / name, sharding=sharding)
        mine = list(two_groups(policy.can_share_prompts))[rank]
        (loss_of(policy, mine) * num_ranks).backward()  # gradients are averaged over the ranks
        expected = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
        gap = max(
            float((full(p.grad) - expected[n]).abs().max() / expected[n].abs().max())
            for n, p in policy.named_parameters()
            if n in expected and expected[n].abs().max() > 0
        )
        whole, published = dict(alone.published()), dict(policy.published(full))
        is_equal = whole.keys() == published.keys() and all(
            torch.equal(whole[n], published[n]) for n in whole
        )
        results[name] = gap, is_equal, has_equal_trunk(alone, policy, mine)
    return results


def has_equal_trunk(alone, policy, rows):
    """Whether a critic's trunk has the same names on one rank, and computes the same."""
    whole, sharded = alone.duplicate_trunk(), policy.duplicate_trunk()
    with torch.no_grad():
        is_near = torch.allclose(whole(pack(rows)), sharded(pack(rows)), atol=1e-5)
    names = [set(model.state_dict()) for model in (whole, sharded)]
    return is_near and names[0] == names[1] and "network.lm_head.weight" not in names[0]


def checkpoints(path, names):
    for name in names:
        build_policy(tiny_config(name), seed=0).network.save_pretrained(path / name)
    return path


def compare_layouts(rank, directory):
    return {
        "sharded": compare_with_one_rank(rank, directory, NAMES, 1),
        "divided experts": compare_with_one_rank(rank, directory, WITH_EXPERTS, 2),
    }


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    path = checkpoints(tmp_path_factory.mktemp("models"), NAMES)
    return on_ranks(2, compare_layouts, path)[0]


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *(("sharded", name) for name in NAMES),
        *(("divided experts", name) for name in WITH_EXPERTS),
    ],
)
def test_two_ranks_have_the_gradients_of_one(layout, name, on_two_ranks):
    gap, is_published_equal, is_trunk_equal = on_two_ranks[layout][name]
    assert gap < 1e-4
    assert is_published_equal
    assert is_trunk_equal


def private_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1e3


def peak_while_loading(rank, directory):
    """(10^6 bytes of private memory at the peak, bytes of this rank's shard in float32)."""

    # What is imported, and made once, is not the model's.
    sharding = Sharding(layout=Layout(shard=torch.distributed.get_world_size()))
    load_policy(directory / "small", sharding=sharding)
    gc.collect()
    before, peak, is_over = private_mb(), [0.0], threading.Event()

    def watch():
        while not is_over.is_set():
            peak[0] = max(peak[0], private_mb())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    policy = load_policy(directory / "large", sharding=sharding)
    is_over.set()
    watcher.join()
    shard = sum(4 * p.to_local().numel() for p in policy.parameters())
    return peak[0] - before, shard / 1e6


@pytest.fixture(scope="module")
def a_hundred_million(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory")
    checkpoints(path, ["qwen3"])
    (path / "qwen3").rename(path / "small")
    config = tiny_config(
        "qwen3",
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
    )
    policy = build_policy(config, seed=0)
    assert 95e6 < policy.shape.num_parameters < 115e6
    policy.network.to(torch.bfloat16).save_pretrained(path / "large", max_shard_size="50MB")
    return path


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_no_rank_holds_more_than_its_shard_while_it_reads(num_ranks, a_hundred_million):
    for peak_mb, shard_mb in on_ranks(num_ranks, peak_while_loading, a_hundred_million):
        assert peak_mb <= 1.2 * shard_mb


def test_driver_receives_weights_without_holding_them(a_hundred_million, tmp_path):
    config = TrainerConfig(num_ranks=2)
    trainer = ProcessTrainer(
        Trainer, a_hundred_million / "large", config, advantage=grpo, loss=ppo_clip
    )
    try:
        before, peak = private_mb(), 0.0

        def watched():
            nonlocal peak
            for item in trainer.weights():
                peak = max(peak, private_mb())
                yield item

        write_weights(watched(), tmp_path, max_bytes=30_000_000)
        num_bytes = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
        largest = max(4 * parameter.numel() for parameter in trainer.decoder.parameters())
        allowed = 3 * largest + 60e6  # on its way from the pipe, and with others in a file
        assert peak - before < allowed / 1e6
        assert allowed < 0.9 * num_bytes
        read = load_policy(write_config(trainer.decoder, tmp_path)).published()
        original = dict(load_policy(a_hundred_million / "large").published())
        assert all(torch.equal(original[name], tensor) for name, tensor in read)
    finally:
        trainer.close()


def write_config(decoder, directory):
    (directory / "config.json").write_text(json.dumps(decoder.hf_config()))
    return directory


def load_with_divided_experts(rank, directory):
    try:
        load_policy(directory, sharding=Sharding(layout=Layout(shard=2, expert=2)))
    except ConfigError as error:
        return error.message, error.hints


def test_an_architecture_without_a_plan_for_experts_is_refused(tmp_path):
    checkpoints(tmp_path, ["llama4_text"])
    message, hints = on_ranks(2, load_with_divided_experts, tmp_path / "llama4_text")[0]
    assert "llama4_text" in message
    assert "expert=1" in hints[0]
