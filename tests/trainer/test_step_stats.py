"""What a step's updates amount to, counted by hand and by torch."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from areal_gym.models.flops import forward_flops, peak_flops, training_flops
from areal_gym.models.tiny.decoder import build_decoder
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.trainer.batch.bins import Row
from areal_gym.trainer.batch.packing import pack
from areal_gym.trainer.chunked_logprobs import score_tokens
from areal_gym.trainer.step_stats import StepStats

SHAPE = DecoderConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
CPU = torch.device("cpu")


def test_matmul_flops_equal_torchs_count():
    batch = pack([Row(token_ids=range(1, 10))])
    mask = (False, False, *([True] * 7))
    decoder = build_decoder(SHAPE, seed=0).double()  # which no kernel of ours takes
    with FlopCounterMode(display=False) as counter:
        score_tokens(decoder, batch, [mask]).logprobs.sum().backward()
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert training_flops(SHAPE, num_tokens=9, num_pairs=0, num_logits=7) == products


def test_attention_flops_by_hand():
    """Once for the score and once for the value; 2 operations per number of each head."""
    empty = forward_flops(SHAPE, num_tokens=4, num_pairs=0, num_logits=0)
    full = forward_flops(SHAPE, num_tokens=4, num_pairs=10, num_logits=0)
    assert full - empty == 10 * 2 * (2 * 4 * 8)


def test_padding_and_sharing_fractions():
    rows = [  # two siblings, whose continuations differ in length; and one of another prompt
        Row(token_ids=(1, 2, 3, 4, 10, 11, 12, 13), num_shared=4),
        Row(token_ids=(1, 2, 3, 4, 20, 21, 22, 23, 24), num_shared=4),
        Row(token_ids=(5, 6, 7, 30, 31, 32, 33, 34), num_shared=3),
    ]
    batch, work = pack(rows), StepStats(SHAPE, CPU, "float32")
    work.add(batch, num_trained=14)
    metrics = work.metrics(2.0)
    assert metrics["train/padding_fraction"] == 0
    assert metrics["train/shared_fraction"] == pytest.approx(1 - 21 / 25)
    assert metrics["train/micro_batches"] == 1
    assert metrics["train/tokens_per_s"] == 21 / 2.0
    # Each token sees itself and what is before it: 1 + ... + 8, the sibling's 5 + ... + 9, ...
    pairs = 3 * (sum(range(1, 9)) + sum(range(5, 10)) + sum(range(1, 9)))
    flops = training_flops(SHAPE, num_tokens=21, num_pairs=pairs, num_logits=14)
    assert metrics["train/model_tflops_per_s"] == pytest.approx(flops / 2.0 / 1e12)
    assert "train/mfu" not in metrics  # nobody knows what this CPU could do
    # Where masks are needed: prompts, 4 and 3 tokens, and continuations, 4, 5 and 5.
    assert batch.rectangles
    again = StepStats(SHAPE, CPU, "float32")
    again.add(batch, num_trained=14)
    assert again.metrics(2.0)["train/padding_fraction"] == pytest.approx(1 - 21 / (2 * 4 + 3 * 5))


def test_sliding_window_lowers_attention_flops():
    kinds = ("sliding_attention", "full_attention", "sliding_attention")
    shape = dataclasses.replace(SHAPE, sliding_window=4, layer_types=kinds)
    work = StepStats(shape, CPU, "float32")
    work.add(pack([Row(token_ids=range(1, 7))]), num_trained=0)
    pairs = 2 * (1 + 2 + 3 + 4 + 4 + 4) + (1 + 2 + 3 + 4 + 5 + 6)
    flops = training_flops(shape, num_tokens=6, num_pairs=pairs, num_logits=0)
    assert work.metrics(1.0)["train/model_tflops_per_s"] == pytest.approx(flops / 1e12)


def test_peak_flops_of_known_devices_only():
    assert peak_flops("NVIDIA H200", "bfloat16") == 989.4e12
    assert peak_flops("NVIDIA H200", "float32") == pytest.approx(66.9e12)
    assert peak_flops("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16") is None
    assert peak_flops("A card of next year", "float32") is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_utilisation_is_a_fraction():
    device = torch.device("cuda")
    work = StepStats(SHAPE, device, "bfloat16")
    numbers = torch.ones(1000, 1000, device=device)
    work.add(pack([Row(token_ids=range(1, 10))], device), num_trained=5)
    metrics = work.metrics(1e-3)
    assert metrics["memory/gpu_peak_mb"] >= numbers.nbytes / 1e6
    if peak_flops(torch.cuda.get_device_name(device), "bfloat16") is not None:
        assert 0 < metrics["train/mfu"] < 1
