"""The arithmetic of memory for models of transformers: published sizes, and what processes take."""

import gc
import threading
import time

import pytest
import torch
import transformers

from areal_gym.config import RunConfig
from areal_gym.models.backend import ModelLoader
from areal_gym.models.hf.hf_loading import build_policy, policy_without_weights
from areal_gym.runs.memory_plan import describe_memory, memory_of_policy
from areal_gym.trainer.batch.bins import Row
from areal_gym.trainer.batch.packing import pack
from areal_gym.trainer.chunked_logprobs import score_tokens
from areal_gym.trainer.lora import add_adapter
from areal_gym.trainer.optimizer import Optimizer
from areal_gym.trainer.parallel.fsdp import load_for_training
from areal_gym.trainer.parallel.rank_group import Ranks
from tests._support.qwen3_shapes import config_json
from tests._support.rank_processes import on_ranks
from tests._support.tiny_architectures import tiny_config

NUM_TOKENS = 384
LOADER = ModelLoader(backend="transformers")


def settings(**trainer):
    return RunConfig.model_validate({"trainer": {"device": "cpu", **trainer}})


def on_disk(path, config):
    config.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def qwen3_8b(tmp_path_factory):
    config = transformers.Qwen3Config(**config_json("8B"))
    return on_disk(tmp_path_factory.mktemp("8B"), config)


@pytest.fixture(scope="module")
def qwen3_30b(tmp_path_factory):
    config = transformers.Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    return on_disk(tmp_path_factory.mktemp("30B-A3B"), config)


def plan(path, **trainer):
    return memory_of_policy(settings(**trainer), policy_without_weights(path))


def test_parameters_of_published_models(qwen3_8b, qwen3_30b):
    whole = plan(qwen3_8b)
    assert whole.num_parameters == 8_190_735_360
    assert whole.weights == whole.gradients == whole.states / 2 == 4 * 8_190_735_360
    # 2 for keys and values, 36 layers, 8 heads of 128, 2 bytes.
    assert whole.cached == 2 * 36 * 8 * 128 * 2
    mixture = plan(qwen3_30b, num_ranks=8, dtype="bfloat16", kl={"coefficient": 0.1})
    assert mixture.num_parameters == 30_532_122_624
    assert mixture.weights == 4 * 30_532_122_624 // 8
    assert mixture.frozen == mixture.weights // 2
    divided = plan(qwen3_30b, num_ranks=8, dtype="bfloat16", parallel={"expert": 8})
    experts = 128 * 3 * 768 * 2048  # of a layer; 7 / 8 of them are no longer gathered
    assert mixture.gathered - divided.gathered == (experts - experts // 8) * (3 * 2 + 4)


def test_what_is_frozen_and_what_is_added(qwen3_8b):
    pytest.importorskip("peft", reason="pip install 'areal-gym[lora]'")
    adapted = plan(qwen3_8b, num_ranks=4, dtype="bfloat16", lora={"rank": 16})
    layer = (4096 + 4096) * 2 + (4096 + 1024) * 2 + (4096 + 12288) * 3
    added = 36 * 16 * layer
    assert adapted.weights == 2 * 8_190_735_360 // 4 + 4 * added
    assert (adapted.gradients, adapted.states) == (4 * added, 8 * added)
    plain, with_critic = plan(qwen3_8b), plan(qwen3_8b, algorithm="ppo")
    trunk = 8_190_735_360 - 151936 * 4096  # without the output projection
    assert with_critic.states - plain.states == 8 * trunk


def private_bytes():
    with open("/proc/self/status") as status:
        return 1e3 * next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def peak_while_training(rank, directory, trainer):
    """The private memory of a step of two full micro-batches, beyond that of a tiny model."""
    config = settings(**trainer).trainer
    ranks = Ranks(rank, config.layout)
    for name in ("small", "large"):
        gc.collect()
        before, peak, is_over = private_bytes(), [0.0], threading.Event()
        watcher = threading.Thread(target=watch, args=(peak, is_over))
        watcher.start()
        train(load_for_training(directory / name, config, ranks, loader=LOADER), config, ranks)
        is_over.set()
        watcher.join()
    return peak[0] - before


def watch(peak, is_over):
    while not is_over.is_set():
        peak[0] = max(peak[0], private_bytes())
        time.sleep(0.002)


def train(policy, config, ranks):
    if config.lora is not None:
        add_adapter(policy, config.lora)
    policy.recomputes_layers = config.recompute_layers
    optimizer = Optimizer(policy, config, ranks)
    for num_tokens in (8, NUM_TOKENS, NUM_TOKENS):
        row = Row(token_ids=tuple(range(3, 3 + num_tokens)), num_shared=0)
        mask = (False,) * 4 + (True,) * (num_tokens - 4)
        score_tokens(policy, pack([row]), [mask]).logprobs.sum().backward()
        if num_tokens < NUM_TOKENS:
            optimizer.step()  # whose states are there from now on


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A model of a hundred million parameters, and a small one."""
    path = tmp_path_factory.mktemp("models")
    sizes = {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    for name, more in (("small", {"vocab_size": 512}), ("large", sizes)):
        policy = build_policy(tiny_config("qwen3", **more), seed=0)
        policy.network.to(torch.bfloat16).save_pretrained(path / name)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer",
    [{}, {"num_ranks": 2}, {"lora": {"rank": 8}}],
    ids=["one rank", "two ranks", "adapter"],
)
def test_processes_take_the_plan_and_what_libraries_need(trainer, checkpoints):
    """On a CPU 0.35 to 0.5 GB more than the plan were measured; of what was not looked into."""
    trainer = {**trainer, "tokens_per_microbatch": NUM_TOKENS}
    found = memory_of_policy(settings(**trainer), policy_without_weights(checkpoints / "large"))
    num_ranks = trainer.get("num_ranks", 1)
    for measured in on_ranks(num_ranks, peak_while_training, checkpoints, trainer):
        assert found.total - 0.1e9 <= measured <= found.total + 0.7e9


def test_plan_of_a_mixture_of_experts_is_said(tmp_path):
    build_policy(tiny_config("qwen3_moe"), seed=0).network.save_pretrained(tmp_path)
    config = RunConfig.model_validate({"engine": {"model": str(tmp_path)}})
    policy, engine = describe_memory(config)
    assert "activations of" in policy
    assert "weights in bfloat16" in engine
