"""A simulated step takes what a real one takes, and what arithmetic says; the command shows it."""

import json
from types import SimpleNamespace

import pytest
import torch

from areal_gym.cli.app import run
from areal_gym.cli.command_reference import JSON_KEYS
from areal_gym.config import Layout, load_config
from areal_gym.models.hf.hf_loading import Sharding, build_policy, load_policy
from areal_gym.plan.memory_tracker import MemoryTracker, labelled_training
from areal_gym.plan.operation_costs import Link
from areal_gym.plan.simulated_step import full_group, simulate_step
from areal_gym.plugins import registry
from areal_gym.trainer.parallel.rank_group import ALONE, Ranks
from areal_gym.trainer.trainer import Trainer
from tests._support.rank_processes import on_ranks
from tests._support.tiny_architectures import tiny_config

SIZES = {
    "vocab_size": 2000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
}


def settings(*overrides):
    return load_config(
        overrides=[
            *("engine.model=none", "engine.max_context=256", "rollout.max_new_tokens=64"),
            *("trainer.tokens_per_microbatch=512", "trainer.optimizer=adamw", *overrides),
        ]
    )


def config_of(name):
    if name == "tied":
        return tiny_config("qwen3", **SIZES | {"tie_word_embeddings": True})
    return tiny_config(name, **SIZES)


def simulated(name, *overrides, is_cpu=False):
    return simulate_step(settings(*overrides), config_of(name), is_cpu=is_cpu)


class RowsOfItsOwn(Ranks):
    """Gives every rank as many rows as the simulated one has."""

    def share(self, members, costs):
        return list(members)


def peak_of_a_real_step(rank, directory, overrides, num_ranks):
    config = settings(*overrides)
    torch.set_num_threads(1)
    layout = Layout(shard=num_ranks)
    sharding = Sharding(layout=layout) if num_ranks > 1 else None
    policy = load_policy(directory, sharding=sharding)
    trainer = Trainer(
        policy,
        config.trainer,
        advantage=registry().load("advantages", config.trainer.advantage),
        loss=registry().load("losses", config.trainer.loss),
        max_new_tokens=config.rollout.max_new_tokens,
        reference=directory if config.trainer.kl.coefficient else None,
        ranks=RowsOfItsOwn(rank, layout) if num_ranks > 1 else ALONE,
    )
    groups = [full_group(config, 2)]
    trainer.step(groups, 0)
    tracker = MemoryTracker(policy.shape.vocab_size)
    if trainer._reference is not None:
        tracker.label(trainer._reference.parameters(), "frozen")
    with labelled_training(tracker, policy, trainer._optimizer.parts), tracker:
        trainer.step(groups, 1)
    return tracker.peak


TWO_RANKS = {
    "all layers kept": ("qwen3", ()),
    "recomputed": ("qwen3", ("trainer.recompute_layers=true",)),
    "with a reference": ("qwen3", ("trainer.kl.coefficient=0.1",)),
    "tied": ("tied", ()),
    "experts": ("qwen3_moe", ("trainer.recompute_layers=true",)),
}


def peaks_of_two_ranks(rank, directory):
    return {
        case: peak_of_a_real_step(rank, directory / name, overrides, 2)
        for case, (name, overrides) in TWO_RANKS.items()
    }


def checkpoint(directory, name):
    build_policy(config_of(name), seed=0).network.save_pretrained(directory / name)
    return directory


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    for name in {name for name, _ in TWO_RANKS.values()}:
        checkpoint(directory, name)
    return on_ranks(2, peaks_of_two_ranks, directory)[0]


def assert_alike(ours, real):
    assert sum(ours.values()) == pytest.approx(sum(real.values()), rel=0.1)
    for kind in ("weights", "states", "frozen", "gradients", "activations", "logits"):
        allowed = pytest.approx(real.get(kind, 0), rel=0.1, abs=0.01 * sum(real.values()))
        assert ours.get(kind, 0) == allowed, kind


def test_every_part_of_a_real_step_is_simulated(tmp_path):
    directory = checkpoint(tmp_path, "qwen3") / "qwen3"
    assert_alike(simulated("qwen3", is_cpu=True).peak, peak_of_a_real_step(0, directory, (), 1))


@pytest.mark.parametrize("case", TWO_RANKS)
def test_every_part_of_a_rank_is_simulated(case, on_two_ranks):
    name, overrides = TWO_RANKS[case]
    step = simulated(name, "trainer.num_ranks=2", *overrides, is_cpu=True)
    assert_alike(step.peak, on_two_ranks[case])


def test_shards_are_what_arithmetic_gives():
    step = simulated("qwen3", "trainer.num_ranks=8", "trainer.algorithm=ppo")
    count = step.shape.num_parameters
    trunks = 2  # the policy's and the critic's, which has no output projection
    unused = SIZES["vocab_size"] * SIZES["hidden_size"]
    assert step.peak["weights"] == pytest.approx(4 * (trunks * count - unused) / 8, rel=0.05)
    assert step.peak["states"] == pytest.approx(2 * step.peak["weights"], rel=0.05)
    assert step.peak["gradients"] == pytest.approx(step.peak["weights"], rel=0.05)
    # Forward and backward gather each layer; the forward pass of a critic, too.
    gathered = 4 * (trunks * count - unused)
    costs = step.looks + step.microbatch
    sent = costs.bytes_by_link[Link("all-gather", tuple(range(8)))]
    assert gathered < sent < 3 * gathered


def test_an_adapter_has_gradients_of_its_own_only():
    step = simulated("qwen3", "trainer.num_ranks=2", "trainer.lora.rank=2")
    assert step.peak["frozen"] == pytest.approx(4 * step.shape.num_parameters / 2, rel=0.05)
    assert step.peak["states"] < step.peak["frozen"] / 5
    assert step.peak["gradients"] < step.peak["frozen"] / 5


@pytest.fixture
def areal_gym(capsys):
    """Run `areal-gym`; return the exit code, stdout and stderr."""

    def call(*words):
        code = run(words)
        return SimpleNamespace(code=code, **capsys.readouterr()._asdict())

    return call


@pytest.fixture
def model(tmp_path):
    """A checkpoint's directory without weights."""
    tiny_config("qwen3", **SIZES).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_command_plans_ranks_and_servers(model, areal_gym):
    words = ("engine.id=sglang", "engine.kwargs.num_servers=3", "trainer.num_ranks=4")
    done = areal_gym("plan", f"engine.model={model}", *words, "trainer.lora={}", "--json")
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    assert {*JSON_KEYS["plan"][1].split()} <= {*plan}
    assert (plan["num_gpus"], plan["num_ranks"], plan["num_servers"]) == (7, 4, 3)
    assert plan["rank_total"] == sum(plan["rank_bytes"].values())
    assert plan["cache_bytes_per_token"] == 2 * 2 * 4 * 2 * 16
    assert set(plan["seconds"]) == {"train", "communicate", "publish", "generate", "step"}
    shown = areal_gym("plan", f"engine.model={model}", *words)
    assert "4 ranks, 3 servers of 1" in shown.out
    assert "takes longest" in shown.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "h100"), "h100-80gb"),
        (("--gpus", "2", "trainer.num_ranks=4"), "the run takes 4 GPUs"),
        (("engine.model=starter",), "fits anywhere"),
        (("engine.model=nowhere",), "nowhere"),
        (("trainer.num_ranks=4", "trainer.parallel.expert=2"), "expert"),
    ],
)
def test_command_says_what_is_wrong(words, message, model, areal_gym):
    done = areal_gym("plan", f"engine.model={model}", *words)
    assert done.code == 2
    assert message in done.err


def test_what_does_not_fit_is_said_with_what_helps(tmp_path, areal_gym):
    sizes = {"hidden_size": 8192, "intermediate_size": 32768, "num_hidden_layers": 8}
    tiny_config("qwen3", **{**SIZES, **sizes}).save_pretrained(tmp_path / "model")
    done = areal_gym("plan", f"engine.model={tmp_path / 'model'}", "--gpu", "a100-40gb")
    assert done.code == 1
    assert "trainer.num_ranks=2" in done.err
