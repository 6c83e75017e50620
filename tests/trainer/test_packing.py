"""Micro-batches: how full they are, and attention by the variable-length kernel."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_gym.models.flat_batch import attend_blocks, fits_kernel
from areal_gym.models.tiny.kernels.kernel_library import is_there
from areal_gym.trainer.batch.bins import Row, best_fit, split_by_tokens
from areal_gym.trainer.batch.packing import pack
from tests._support.tiny_training import random_ids, tiny_decoder

# ---- bins ------------------------------------------------------------------------------------


def flat_tokens(rows, part):
    """What the rows of a micro-batch come to, their common prompts once."""
    prompts = {tuple(rows[i].token_ids[: rows[i].num_shared]) for i in part}
    own = sum(len(rows[i].token_ids) - rows[i].num_shared for i in part)
    return own + sum(map(len, prompts))


def groups_of(rng, lengths, *, group_size, prompt):
    """Rows in groups; `lengths` and `prompt` draw a number of tokens."""
    rows = []
    for g in range(len(lengths) // group_size):
        shared = tuple(range(10 * g, 10 * g + prompt(rng)))
        for length in lengths[g * group_size : (g + 1) * group_size]:
            rows.append(Row(token_ids=shared + (0,) * length, num_shared=len(shared)))
    return rows


DISTRIBUTIONS = {
    # tokens of a response, at most 8,192: many short and few long ones; one length; two kinds
    "lognormal": lambda rng: min(8192, int(math.exp(rng.gauss(6.5, 0.9)))),
    "uniform": lambda rng: rng.randint(50, 4000),
    "bimodal": lambda rng: rng.randint(100, 400) if rng.random() < 0.7 else rng.randint(3000, 6000),
    "geometric": lambda rng: 1 + min(8000, int(rng.expovariate(1 / 700))),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("group_size", [1, 8])
@pytest.mark.parametrize("seed", range(3))
def test_ragged_batches_fill_micro_batches(name, group_size, seed):
    rng = random.Random(seed)
    lengths = [DISTRIBUTIONS[name](rng) for _ in range(512)]
    rows = groups_of(rng, lengths, group_size=group_size, prompt=lambda rng: rng.randint(50, 400))
    budget = 16_384
    parts = split_by_tokens(rows, budget)
    used = [flat_tokens(rows, part) for part in parts]
    assert max(used) <= budget
    assert sum(used) / (budget * len(parts)) > 0.95
    assert sum(used) < 1.05 * flat_tokens(rows, range(len(rows)))  # few prompts are repeated


@settings(deadline=None)
@given(costs=st.lists(st.integers(1, 30), max_size=40), budget=st.integers(1, 40))
def test_best_fit_packing_needs_few_bins(costs, budget):
    bins = best_fit(costs, budget)
    assert sorted(i for part in bins for i in part) == list(range(len(costs)))
    sums = [sum(costs[i] for i in part) for part in bins]
    assert all(s <= budget or len(part) == 1 for s, part in zip(sums, bins, strict=True))
    # No two bins could be one.
    smallest = sorted(sums)[:2]
    assert len(smallest) < 2 or sum(smallest) > budget


def test_shared_prompt_is_repeated_only_to_save_a_micro_batch():
    def family(start, prompt, count, own):
        shared = tuple(range(start, start + prompt))
        return [Row(token_ids=shared + (0,) * own, num_shared=prompt) for _ in range(count)]

    # Three families of 60 in budgets of 100: whole, each has one of its own ...
    costly = [row for g in range(3) for row in family(1000 * g, 20, 2, 20)]
    assert sorted(map(len, split_by_tokens(costly, 100))) == [2, 2, 2]
    # ... and with a prompt of 4, the third goes into the rooms of the others.
    cheap = [row for g in range(3) for row in family(1000 * g, 4, 2, 28)]
    assert sorted(map(len, split_by_tokens(cheap, 100))) == [3, 3]


# ---- the variable-length kernel --------------------------------------------------------------


def by_the_book(q, k, v, query_ends, key_ends, most_q, most_k, *, window_size, enable_gqa):
    """What torch.nn.attention.varlen computes, segment by segment: the last query sees all keys."""
    assert enable_gqa
    left, right = window_size
    assert right == 0
    group = q.shape[1] // k.shape[1]
    outputs = []
    for s in range(len(query_ends) - 1):
        queries = q[query_ends[s] : query_ends[s + 1]].transpose(0, 1)
        keys, values = (
            x[key_ends[s] : key_ends[s + 1]].transpose(0, 1).repeat_interleave(group, 0)
            for x in (k, v)
        )
        num_q, num_k = queries.shape[1], keys.shape[1]
        assert num_q <= most_q
        assert num_k <= most_k
        age = torch.arange(num_k - num_q, num_k)[:, None] - torch.arange(num_k)
        is_seen = (age >= 0) & (age <= (num_k if left < 0 else left))
        seen = F.scaled_dot_product_attention(queries, keys, values, attn_mask=is_seen)
        outputs.append(seen.transpose(0, 1))
    return torch.cat(outputs)


def some_rows(seed):
    rng = random.Random(seed)
    prompts = [random_ids(rng, 1, 9) for _ in range(3)]
    rows = []
    for prompt in [*prompts, *prompts, ()]:
        rows.append(Row(token_ids=prompt + random_ids(rng, 1, 12), num_shared=len(prompt)))
    rows.append(Row(token_ids=prompts[0], num_shared=len(prompts[0])))  # nothing of its own
    return rows


def without_groups(q, k, v, query_ends, key_ends, most_q, most_k, *, window_size):
    """The kernel of torch 2.11: as many heads of keys as of queries."""
    assert q.shape[1] == k.shape[1] == v.shape[1]
    bounds = (query_ends, key_ends, most_q, most_k)
    return by_the_book(q, k, v, *bounds, window_size=window_size, enable_gqa=True)


def without_windows(q, k, v, query_ends, key_ends, most_q, most_k, is_causal=False):
    """The kernel of torch 2.9 and 2.10: causal, or not."""
    assert is_causal
    return without_groups(q, k, v, query_ends, key_ends, most_q, most_k, window_size=(-1, 0))


@pytest.mark.parametrize(
    ("window", "kernel"),
    [
        *((window, by_the_book) for window in (None, 3, 100)),
        *((window, without_groups) for window in (None, 3)),
        (None, without_windows),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_varlen_kernel_arguments_match_the_masked_blocks(window, kernel, seed):
    batch = pack(some_rows(seed))
    generator = torch.Generator().manual_seed(seed)
    num_tokens = len(batch.token_ids_N)
    q, k, v = (
        torch.randn(num_tokens, heads, 8, generator=generator, requires_grad=True)
        for heads in (4, 2, 2)
    )
    expected = batch.attend(q, k, v, window, None)
    found = batch.varlen_plan.attend(q, k, v, window=window, kernel=kernel)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    weights = torch.randn(expected.shape, generator=generator)
    gradients = [torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


# ---- the prefix tree on a CPU ----------------------------------------------------------------


def test_siblings_are_adjacent_for_any_row_order():
    rows = [Row(token_ids=(p, p, 10 + i), num_shared=2) for i, p in enumerate((1, 2, 1, 3, 2))]
    batch = pack([*rows, Row(token_ids=(7, 8))])
    assert batch.token_ids_N.tolist() == [1, 1, 2, 2, 3, 3, 10, 12, 11, 14, 13, 7, 8]
    assert [batch.token_ids_N[i].tolist() for i in batch.row_index] == [
        [1, 1, 10],
        [2, 2, 11],
        [1, 1, 12],
        [3, 3, 13],
        [2, 2, 14],
        [7, 8],
    ]


def batch_of(lengths):
    """Rows of these lengths after each of three prompts; queries, keys, values, a gradient."""
    prompts = [tuple(range(20)), (5, 6, 7), ()]
    rows = [
        Row(token_ids=prompt + (1,) * length, num_shared=len(prompt))
        for length in lengths
        for prompt in prompts
    ]
    batch = pack(rows)
    generator = torch.Generator().manual_seed(0)
    return batch, [
        torch.randn(len(batch.token_ids_N), heads, 16, generator=generator, requires_grad=True)
        for heads in (4, 2, 2, 4)
    ]


@pytest.mark.skipif(not is_there(), reason="needs a C compiler")
@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("lengths", [(9, 9, 9, 9), (3, 40, 3, 17), (130, 130, 20), (100, 110)])
def test_segment_attention_equals_masked_blocks(lengths, window):
    batch, (q, k, v, weights) = batch_of(lengths)
    outs = [batch.attend(q, k, v, window, None)]
    assert batch.num_query_slots == len(batch.token_ids_N)  # no rectangle was made
    outs.append(attend_blocks(*batch.rectangles, q, k, v, window=window))
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in outs]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.skipif(not is_there(), reason="needs a C compiler")
@pytest.mark.parametrize("lengths", [(9, 9, 9, 9), (100, 110, 120)])
def test_bfloat16_segment_attention_is_more_accurate_than_torch(lengths):
    batch, inputs = batch_of(lengths)
    rounded = [x.detach().bfloat16().requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in rounded]

    def found(attend, q, k, v, weights):
        out = attend(q, k, v, None, None)
        assert out.dtype == v.dtype
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), (q, k, v))]

    def by_blocks(*qkv):
        return attend_blocks(*batch.rectangles, *qkv)

    ours = found(batch.attend, *rounded)
    theirs, truths = found(by_blocks, *rounded), found(by_blocks, *exact)
    for mine, other, truth in zip(ours, theirs, truths, strict=True):
        errors = [float((x.double() - truth).norm() / truth.norm()) for x in (mine, other)]
        assert errors[0] < 4e-3
        assert errors[0] <= errors[1]


def test_cpu_has_no_varlen_kernel():
    assert not fits_kernel(torch.zeros(3, 2, 8, dtype=torch.bfloat16), None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 3])
def test_gpu_varlen_kernel_equals_masked_blocks(window):
    batch = pack(some_rows(0), "cuda")
    torch.manual_seed(0)
    num_tokens = len(batch.token_ids_N)
    q, k, v = (
        torch.randn(num_tokens, heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )
    assert fits_kernel(v, None)
    found = batch.attend(q, k, v, window, None)
    assert batch.num_query_slots == num_tokens  # no rectangle was made
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    expected = attend_blocks(*batch.rectangles, *exact, window=window)
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)
    ours = torch.autograd.grad(found.float().square().sum(), (q, k, v))
    theirs = torch.autograd.grad(expected.square().sum(), exact)
    for mine, other in zip(ours, theirs, strict=True):
        assert float((mine.float() - other).norm() / other.norm()) < 2e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_bfloat16_decoder_uses_the_varlen_kernel():
    decoder, batch = tiny_decoder().cuda(), pack(some_rows(1), "cuda")
    exact = decoder(batch)
    again = pack(some_rows(1), "cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        found = decoder(again)
    assert again.num_query_slots == len(again.token_ids_N)
    assert float(((found.float() - exact).norm() / exact.norm()).detach()) < 5e-2
