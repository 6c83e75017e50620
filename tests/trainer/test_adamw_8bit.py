"""8-bit AdamW learns like AdamW with a fraction of its bytes, and resumes under other layouts."""

import importlib.util
import sys
from dataclasses import replace

import pytest
import torch

from areal_gym.config import TrainerConfig, load_config
from areal_gym.errors import ConfigError, TrainError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint, save_checkpoint
from areal_gym.models.tiny.decoder import build_decoder
from areal_gym.plan.simulated_step import simulate_step
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.optimizer import Optimizer
from areal_gym.trainer.parallel.worker import ProcessTrainer
from areal_gym.trainer.trainer import Trainer
from tests._support.tiny_architectures import tiny_config
from tests._support.tiny_training import CONFIG, batch, tiny_decoder

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
WIDE = replace(CONFIG, hidden_size=96, intermediate_size=256, vocab_size=51)
KINDS = ("adamw", "adamw_8bit")


def wide_checkpoint(directory, seed=0):
    return save_checkpoint(build_decoder(WIDE, seed=seed), directory)


def trainer_of(policy, config):
    arguments = {"advantage": grpo, "loss": ppo_clip}
    if config.num_ranks > 1:
        return ProcessTrainer(Trainer, policy, config, **arguments)
    return Trainer(load_checkpoint(policy), config, **arguments)


def weights_of(trainer):
    return torch.cat([tensor.flatten().clone() for _, tensor in trainer.weights()])


def close(trainer):
    if isinstance(trainer, ProcessTrainer):
        trainer.close()


def test_regression_converges_as_with_adamw():
    torch.manual_seed(0)
    inputs, truth = torch.randn(256, 128), torch.randn(64, 128) / 10
    ends = {}
    for kind in KINDS:
        layer = torch.nn.Linear(128, 64, bias=False)
        torch.nn.init.zeros_(layer.weight)
        optimizer = Optimizer(layer, TrainerConfig(optimizer=kind, lr=5e-3, max_grad_norm=1e9))
        for _ in range(150):
            loss = (layer(inputs) - inputs @ truth.T).square().mean()
            loss.backward()
            optimizer.step()
        ends[kind] = float(loss.detach())
    assert float((inputs @ truth.T).square().mean()) > 0.5
    assert max(ends.values()) < 1e-3


def test_states_take_two_bytes_a_weight_and_scales():
    layer = torch.nn.Linear(1024, 512, bias=False)
    sizes = {}
    for kind in KINDS:
        optimizer = Optimizer(layer, TrainerConfig(optimizer=kind))
        layer.weight.grad = torch.randn_like(layer.weight)
        optimizer.step()
        sizes[kind] = sum(tensor.nbytes for tensor in optimizer.states().values())
    num_weights = layer.weight.numel()
    assert sizes["adamw"] == 8 * num_weights + 4
    assert sizes["adamw_8bit"] == 2 * num_weights + 2 * 4 * num_weights // 256 + 4


def test_small_and_odd_weights_keep_float32_moments():
    config = TrainerConfig(optimizer="adamw_8bit")
    for layer in (torch.nn.Linear(64, 63), torch.nn.Linear(1001, 64)):
        for p in layer.parameters():
            p.grad = torch.ones_like(p)
        optimizer = Optimizer(layer, config)
        optimizer.step()
        assert {tensor.dtype for tensor in optimizer.states().values()} == {torch.float32}


def test_schedule_and_groups_reach_the_update():
    layer = torch.nn.Linear(128, 64)
    config = TrainerConfig(optimizer="adamw_8bit", lr=1e-2, lr_groups={"bias": 0.0})
    optimizer = Optimizer(layer, config)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(0.5)
    assert torch.equal(layer.bias.detach(), before["bias"])
    moved = (layer.weight.detach() - before["weight"]).abs()
    assert float(moved.mean()) == pytest.approx(0.5e-2, rel=1e-2)


@pytest.mark.parametrize(
    ("num_ranks", "others"),
    [(1, (3,)), pytest.param(2, (2, 1), marks=pytest.mark.long)],
)
def test_checkpoint_continues_under_any_number_of_ranks(num_ranks, others, tmp_path):
    config = TrainerConfig(optimizer="adamw_8bit", lr=1e-2, num_ranks=num_ranks)
    first = trainer_of(wide_checkpoint(tmp_path / "start"), config)
    try:
        first.step(batch(0), 0)
        weights = {name: tensor.clone() for name, tensor in first.weights()}
        first.save(tmp_path / "states").result()
        first.step(batch(1), 1)
        expected = weights_of(first)
    finally:
        close(first)
    decoder = build_decoder(WIDE, seed=9)
    decoder.load_state_dict(weights)
    policy = save_checkpoint(decoder, tmp_path / "policy")
    for other_ranks in others:
        other = trainer_of(policy, config.model_copy(update={"num_ranks": other_ranks}))
        try:
            other.load(tmp_path / "states")
            other.step(batch(1), 1)
            if other_ranks == num_ranks:
                assert torch.equal(weights_of(other), expected)
            else:
                torch.testing.assert_close(weights_of(other), expected, atol=1e-5, rtol=1e-5)
        finally:
            close(other)


def test_states_of_the_other_adamw_are_refused(tmp_path):
    policy = wide_checkpoint(tmp_path / "policy")
    first = trainer_of(policy, TrainerConfig(optimizer="adamw"))
    first.step(batch(0), 0)
    first.save(tmp_path / "states").result()
    other = trainer_of(policy, TrainerConfig(optimizer="adamw_8bit"))
    with pytest.raises(TrainError, match="other settings"):
        other.load(tmp_path / "states")


def test_plan_counts_the_bytes_of_the_states():
    sizes = {"vocab_size": 2000, "hidden_size": 256, "intermediate_size": 512}
    model = tiny_config("qwen3", **sizes, num_hidden_layers=2, tie_word_embeddings=True)
    states = {}
    for kind in KINDS:
        steps = ("engine.model=none", "engine.max_context=128", f"trainer.optimizer={kind}")
        config = load_config(overrides=[*steps, "trainer.num_ranks=2"])
        states[kind] = simulate_step(config, model).peak["states"]
    # Two codes of a byte and two scales for 256 of them, instead of two numbers of four bytes.
    assert states["adamw_8bit"] / states["adamw"] == pytest.approx(0.254, abs=0.01)


def test_missing_library_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match="needs torchao") as refused:
        Optimizer(tiny_decoder(), TrainerConfig(optimizer="adamw_8bit"))
    assert "pip install 'areal-gym[8bit]'" in refused.value.hints
