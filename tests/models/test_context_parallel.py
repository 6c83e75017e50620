"""Ranks that share the tokens of a pass compute what one rank computes, and its gradients."""

import pytest
import torch
from torch import distributed as dist

from areal_gym.errors import ConfigError
from areal_gym.models.context_parallel import WHOLE, ContextGroup
from areal_gym.models.hf.hf_loading import build_policy
from areal_gym.models.tiny.decoder import build_decoder
from areal_gym.trainer.batch.bins import Row
from areal_gym.trainer.batch.packing import pack
from areal_gym.trainer.chunked_logprobs import score_tokens
from tests._support.long_tests import short
from tests._support.rank_processes import on_ranks
from tests._support.tiny_architectures import tiny_config
from tests._support.tiny_training import CONFIG

NAMES = short(
    [
        "llama",
        "mistral",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "qwen3_moe",
        "gpt_oss",
        "deepseek_v3",
        "llama4_text",
        "qwen3_vl",
        "qwen3_next",
        "lfm2",
        "nemotron_h",
    ],
    *("llama", "mistral", "gemma2"),
)
ROWS = {"two families": ((25, 9), (25, 30), (11, 17), (11, 8)), "few tokens": ((2, 3),)}
"""Lengths of the prompt and of what follows it; 100 tokens, and 5 for four ranks."""


def rows_of(lengths, *, can_share_prompts):
    generator = torch.Generator().manual_seed(1)

    def draw(count):
        return tuple(torch.randint(3, 50, (count,), generator=generator).tolist())

    prompts = {num: draw(num) for num, _ in lengths}
    rows = [(prompts[num], draw(more)) for num, more in lengths]
    return [
        Row(token_ids=(*prompt, *own), num_shared=len(prompt) * can_share_prompts)
        for prompt, own in rows
    ], [(False,) * len(prompt) + (True,) * len(own) for prompt, own in rows]


def passed(policy, lengths, context):
    """What a pass gives: scores, gradients, and the tokens of experts."""
    rows, masks = rows_of(lengths, can_share_prompts=policy.can_share_prompts)
    policy.context = context
    policy.zero_grad()
    scores = score_tokens(policy, pack(rows), masks, 0.7, has_entropy_gradient=True)
    weights = torch.linspace(-1, 1, len(scores.logprobs))
    (scores.logprobs * weights + 0.1 * scores.entropy).sum().backward()
    gradients = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    if context.size > 1:
        for gradient in gradients.values():  # as FSDP does
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
    values = scores.logprobs.detach(), scores.entropy.detach(), scores.is_likeliest.float()
    return values, gradients, policy.take_expert_counts()


def gap(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-9))


def compare(policy, lengths, context):
    """The largest relative difference of a score and of a gradient; whether counts are equal."""
    expected, gradients, counts = passed(policy, lengths, WHOLE)
    scores, their_gradients, their_counts = passed(policy, lengths, context)
    assert gradients.keys() == their_gradients.keys()
    floor = 1e-6 * max(float(g.abs().max()) for g in gradients.values())
    return {
        "scores": max(map(gap, scores, expected)),
        "gradients": max(
            gap(their_gradients[n], g) for n, g in gradients.items() if g.abs().max() > floor
        ),
        "counts": 0.0 if counts is None else float((counts - their_counts).abs().sum()),
    }


def policies(names):
    yield "tiny decoder", build_decoder(CONFIG, seed=0)
    # Three ranks' worth of keys for two ranks' worth of queries.
    more = {"num_attention_heads": 12, "num_key_value_heads": 3}
    yield "twelve and three heads", build_policy(tiny_config("qwen3", **more), seed=0)
    for name in names:
        yield name, build_policy(tiny_config(name), seed=0)


def kept_bytes(context):
    """What a pass over a row of 2,048 tokens keeps for its gradient, besides weights."""
    policy = build_policy(tiny_config("llama", max_position_embeddings=4096), seed=0)
    policy.share_tokens(context)
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # alive, so that no other gets its address
        return tensor

    row = Row(token_ids=[i % 50 for i in range(2048)], num_shared=0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        score_tokens(policy, pack([row]), [(False,) + (True,) * 2047])
    return sum(storage.nbytes() for storage in kept.values())


def compare_all(rank, names):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    contexts = {
        "two ranks": ContextGroup(pairs[rank // 2], rank % 2, 2),
        "four ranks": ContextGroup(dist.group.WORLD, rank, 4),
    }
    gaps = {
        (name, rows, number): compare(policy, lengths, context)
        for name, policy in policies(names)
        for rows, lengths in ROWS.items()
        for number, context in contexts.items()
    }
    return gaps, kept_bytes(contexts["four ranks"]) / kept_bytes(WHOLE)


@pytest.fixture(scope="module")
def on_four_ranks():
    return on_ranks(4, compare_all, NAMES)


@pytest.mark.parametrize("name", ["tiny decoder", "twelve and three heads", *NAMES])
def test_ranks_that_share_tokens_compute_what_one_computes(name, on_four_ranks):
    gaps = [rank for rank, _ in on_four_ranks]
    found = {key: rank[key] for rank in gaps for key in rank if key[0] == name}
    assert len(found) == 4
    for rank in gaps:
        for key, values in rank.items():
            if key[0] == name:
                assert values["scores"] < 1e-5, key
                assert values["gradients"] < 1e-4, key
                assert values["counts"] == 0, key


def test_a_rank_keeps_its_part_of_the_activations(on_four_ranks):
    for _, share in on_four_ranks:
        assert 0.2 < share < 0.35


def test_heads_that_ranks_do_not_divide_are_refused():
    policy = build_policy(tiny_config("llama", num_attention_heads=4), seed=0)
    policy.share_tokens(ContextGroup(None, 0, 6))
    with pytest.raises(ConfigError, match=r"context = 6 divides .* a layer has 4 on") as caught:
        policy(pack([Row(token_ids=range(3, 9), num_shared=0)]))
    assert caught.value.hints == ("a divisor of it: trainer.parallel.context=2",)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_longest_sequence_are_refused(kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"long_factor": [2.0] * 8, "short_factor": [1.0] * 8}
        rope |= {"original_max_position_embeddings": 256}
    policy = build_policy(tiny_config("llama", rope_parameters=rope), seed=0)
    policy.share_tokens(WHOLE)
    with pytest.raises(ConfigError, match=f"rope_type {kind}.*trainer.parallel.context = 2"):
        policy.share_tokens(ContextGroup(None, 0, 2))
