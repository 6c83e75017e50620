"""Every layout of ranks trains what one rank trains: gradients, their norm, metrics, two steps."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal_gym.config import Layout, TrainerConfig
from areal_gym.errors import ConfigError
from areal_gym.models.backend import ModelLoader
from areal_gym.models.hf.hf_loading import build_policy
from areal_gym.models.hf.layout_plans import require_layout
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.algorithms.token_advantages import gae
from areal_gym.trainer.parallel.fsdp import full, load_for_training, prepare_decoder
from areal_gym.trainer.parallel.rank_group import ALONE, Ranks
from areal_gym.trainer.trainer import Trainer
from tests._support.long_tests import short
from tests._support.rank_processes import each_made_once, on_ranks
from tests._support.tiny_architectures import tiny_config
from tests._support.tiny_training import batch, tiny_decoder, without_costs

TRANSFORMERS = ModelLoader(backend="transformers")
NUM_LAYERS = 2  # one with a window and one without, where an architecture has both
LATE = {"reduce": "auto"}  # which is once per update for models that are small
SETTINGS = {"lr": 1e-3, "tokens_per_microbatch": 64, "max_grad_norm": 1e9}
PPO = {"algorithm": "ppo", "kl": {"coefficient": 0.1}, "critic": {"trunk": "own"}}
LAYOUTS = {
    2: {
        "qwen3": ({"replicate": 2}, {"tensor": 2}, {"reduce": "microbatch"}),
        "qwen3_moe": ({"replicate": 2}, {"expert": 2}, {"tensor": 2}, {"tensor": 2, "expert": 2}),
        "gemma3_text": ({}, {"tensor": 2}),
    },
    4: {
        "qwen3": (
            {},
            {"replicate": 2, "reduce": "microbatch"},
            {"tensor": 2},
            {"replicate": 2, "tensor": 2},
            {"tensor": 2, "context": 2},
        ),
        "qwen3_moe": (
            {"expert": 2},
            {"replicate": 2, "expert": 2},
            {"tensor": 2, "expert": 4},
            {"replicate": 2, "tensor": 2, "expert": 2},
            {"tensor": 2, "context": 2, "expert": 4},
        ),
        "gemma3_text": ({"replicate": 2}, {"tensor": 2}, {"tensor": 2, "context": 2}),
    },
}
CASES = [
    (size, name, layout, settings)
    for size, models in LAYOUTS.items()
    for name, layouts in models.items()
    for layout in layouts
    for settings in ({}, PPO)
    if not settings or (size, name) == (2, "qwen3_moe")
]


def named(case):
    size, name, layout, settings = case
    sizes = "-".join(f"{key}{value}" for key, value in layout.items()) or "shard"
    return f"{size}-{name}-{sizes}{'-ppo' if settings else ''}"


# Each of these is part of a larger layout that always runs.
SHORT = short(
    [named(case) for case in CASES],
    *("2-qwen3_moe-replicate2", "2-qwen3_moe-replicate2-ppo", "2-qwen3_moe-expert2"),
    *("2-qwen3_moe-tensor2", "2-qwen3_moe-tensor2-ppo", "2-qwen3_moe-tensor2-expert2-ppo"),
    *("2-gemma3_text-shard", "4-qwen3-shard", "4-qwen3-replicate2-reducemicrobatch"),
    *("4-qwen3-tensor2", "4-qwen3_moe-expert2", "4-qwen3_moe-replicate2-expert2"),
    *("4-qwen3_moe-tensor2-expert4", "4-gemma3_text-replicate2", "4-gemma3_text-tensor2"),
    *("2-qwen3-replicate2", "2-qwen3-tensor2", "2-qwen3_moe-tensor2-expert2"),
    *("2-gemma3_text-tensor2", "4-qwen3-tensor2-context2"),
)


def alone_name(case):
    _, name, _, settings = case
    return f"{name}{'-ppo' if settings else ''}-alone"


def trained(directory, config, ranks):
    """The gradients of each update, the metrics of each step, and the weights after two."""
    model = load_for_training(directory, config, ranks, loader=TRANSFORMERS)
    advantage = gae if config.algorithm == "ppo" else grpo
    trainer = Trainer(
        model, config, advantage=advantage, loss=ppo_clip, reference=directory, ranks=ranks
    )
    names = {parameter: name for name, parameter in trainer.decoder.named_parameters()}
    gradients = []

    def keep(*_):
        gradients.append({names[p]: full(p.grad).clone() for p in names if p.grad is not None})

    trainer._optimizer.parts[0].register_step_pre_hook(keep)
    metrics = [without_costs(trainer.step(batch(i, num_groups=4), i)) for i in range(2)]
    return gradients, metrics, {name: tensor.clone() for name, tensor in trainer.weights()}


class Reductions(TorchDispatchMode):
    """Counts the collectives that reduce gradients."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func.namespace == "c10d" and "reduce_scatter" in func.name()
        return func(*args, **(kwargs or {}))


def reductions_of(rank, directory, **settings):
    """(the micro-batches of all ranks, reductions of this one) in one update."""
    config = TrainerConfig(num_ranks=2, **settings)
    ranks = Ranks(rank, config.layout)
    model = load_for_training(directory, config, ranks, loader=TRANSFORMERS)
    trainer = Trainer(model, config, advantage=grpo, loss=ppo_clip, ranks=ranks)
    with Reductions() as counted:
        metrics = trainer.step(batch(0, num_groups=8), 0)
    return metrics["train/micro_batches"], counted.number


def count_reductions(rank, directory):
    few = {"tokens_per_microbatch": 64}
    return [
        reductions_of(rank, directory, tokens_per_microbatch=4096, parallel=LATE),
        reductions_of(rank, directory, **few, parallel=LATE),
        reductions_of(rank, directory, **few, parallel={"reduce": "microbatch"}),
    ]


def gap_between(values, expected):
    """The largest difference, relative to the largest number of a tensor; names must be equal."""
    assert values.keys() == expected.keys()
    return max(
        float((values[name] - whole).abs().max() / whole.abs().max())
        for name, whole in expected.items()
        if whole.abs().max() > 0
    )


def compare(rank, directory, cases):
    def alone(name, settings):
        return trained(directory / name, TrainerConfig(**SETTINGS, **settings), ALONE)

    expected = each_made_once(
        rank, directory, {alone_name(case): partial(alone, case[1], case[3]) for case in cases}
    )
    results = {}
    if torch.distributed.get_world_size() == 2:
        results["reductions"] = count_reductions(rank, directory / "qwen3")
    for case in cases:
        size, name, layout, settings = case
        config = TrainerConfig(**SETTINGS, **settings, num_ranks=size, parallel=LATE | layout)
        gradients, metrics, weights = trained(directory / name, config, Ranks(rank, config.layout))
        if rank > 0:
            continue
        expected_gradients, expected_metrics, expected_weights = expected[alone_name(case)]
        moved = sum(float(w.double().square().sum()) for w in expected_weights.values())
        apart = [(weights[n] - w).double().square().sum() for n, w in expected_weights.items()]
        results[named(case)] = (
            [gap_between(*pair) for pair in zip(gradients, expected_gradients, strict=True)],
            list(zip(metrics, expected_metrics, strict=True)),
            (float(sum(apart)) / moved) ** 0.5,
        )
    return results


@pytest.fixture(scope="module")
def trained_by_ranks(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    for name in LAYOUTS[2]:
        model = build_policy(tiny_config(name, num_hidden_layers=NUM_LAYERS), seed=0)
        model.network.save_pretrained(path / name)
    results = {}
    for size in LAYOUTS:
        cases = [case for case in CASES if case[0] == size and named(case) in SHORT]
        results |= on_ranks(size, compare, path, cases)[0]
    return results


@pytest.mark.parametrize("name", SHORT)
def test_layout_trains_what_one_rank_trains(name, trained_by_ranks):
    gaps, metrics, apart = trained_by_ranks[name]
    assert gaps[0] < 1e-5
    assert max(gaps) < 2e-4  # Adam has made whole steps of gradients that are rounding
    for step, (found, expected) in enumerate(metrics):
        assert found.keys() == expected.keys()
        tolerance = 1e-5 if step == 0 else 1e-4
        for metric, value in expected.items():
            # A prompt is counted once in each micro-batch that shares it, and these differ.
            rel = 5e-2 if metric == "train/expert_load_max" else tolerance
            assert found[metric] == pytest.approx(value, rel=rel, abs=tolerance), metric
    assert apart < 1e-5


def test_gradients_are_reduced_once_per_update(trained_by_ranks):
    (one, least), (many, late), (_, early) = trained_by_ranks["reductions"]
    assert one == 2
    assert many >= 8  # four and more on each of two ranks
    assert late == least == NUM_LAYERS + 3  # embeddings, norm, head
    assert early >= 4 * NUM_LAYERS


@pytest.mark.parametrize(
    ("name", "layout", "message", "hint"),
    [
        ("qwen3", Layout(tensor=3), "does not divide num_attention_heads = 4", "tensor=2"),
        ("qwen3", Layout(tensor=4), "does not divide num_key_value_heads = 2", "tensor=2"),
        ("qwen3", Layout(context=3), "= 3 does not divide num_attention_heads = 4", "context=1"),
        ("qwen3", Layout(tensor=2, context=4), "heads = 4 / tensor = 2", "context=2"),
        ("qwen3_moe", Layout(shard=3, expert=3), "does not divide num_experts = 8", "expert=2"),
        ("qwen3", Layout(shard=2, expert=2), "no plan (base_model_ep_plan)", "expert=1"),
        ("gpt_oss", Layout(tensor=2), "no plan (base_model_tp_plan)", "tensor=1"),
        ("llama4_text", Layout(tensor=2), "in place", "tensor=1"),
    ],
)
def test_what_transformers_cannot_divide_is_refused(name, layout, message, hint):
    with pytest.raises(ConfigError) as caught:
        require_layout(tiny_config(name), layout)
    assert message in caught.value.message
    assert hint in caught.value.hints[0]


@pytest.mark.parametrize(
    ("layout", "hint"),
    [
        (Layout(tensor=2), "model.backend=transformers runs any architecture"),
        (Layout(shard=2, expert=2), "trainer.parallel.expert=1"),  # it is dense, as the policy is
    ],
)
def test_what_the_tiny_decoder_cannot_divide_is_refused(layout, hint):
    policy = tiny_decoder()
    with pytest.raises(ConfigError) as caught:
        prepare_decoder(policy, TrainerConfig(), Ranks(layout=layout))
    assert caught.value.hints == (hint, "trainer.parallel.shard=auto")


def test_versions_with_other_plans_are_refused(monkeypatch):
    monkeypatch.setattr("areal_gym.models.hf.layout_plans.transformers_version", "5.22.2")
    require_layout(tiny_config("qwen3"), Layout(shard=2))
    with pytest.raises(ConfigError, match=r"tensor = 2 needs transformers 5\.23"):
        require_layout(tiny_config("qwen3"), Layout(tensor=2))
