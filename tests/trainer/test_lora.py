"""Adapters: what is trained, what is merged, what others read."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

from areal_gym.config import LoraConfig, TrainerConfig, load_config
from areal_gym.errors import ConfigError
from areal_gym.models.lora_weights import is_adapter
from areal_gym.models.tiny.checkpoint_files import save_checkpoint
from areal_gym.models.tiny.decoder import Decoder
from areal_gym.trainer.algorithms.advantages import grpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.batch.bins import Row
from areal_gym.trainer.batch.packing import pack
from areal_gym.trainer.batch.sequences import sequences_of
from areal_gym.trainer.chunked_logprobs import score_tokens
from areal_gym.trainer.lora import adapter_weights, add_adapter
from areal_gym.trainer.parallel.worker import ProcessTrainer
from areal_gym.trainer.trainer import Trainer
from areal_gym.trainer.weight_sync.adapters import adapter_config
from tests._support.picture_rows import seeing_policy
from tests._support.plain_attention import causal_attend
from tests._support.tiny_training import CONFIG, batch, tiny_checkpoint, tiny_decoder
from tests._support.tiny_vision import FAMILIES

SETTINGS = LoraConfig(rank=4, alpha=8.0)
pytest.importorskip("peft", reason="pip install 'areal-gym[lora]'")


def adapted(seed=0):
    decoder = tiny_decoder()
    add_adapter(decoder, SETTINGS, seed=seed)
    return decoder


def moved(seed=0):
    """An adapter that changes what is said."""
    decoder = adapted(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if is_adapter(name):
                parameter.normal_(0.0, 0.2, generator=generator)
    return decoder


def logits(decoder):
    ids = torch.arange(2, 30)
    with torch.no_grad():
        hidden = decoder.hidden_states(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
        return hidden @ decoder.lm_head_weight.T


def test_fresh_adapter_is_zero_and_equal_on_every_rank():
    assert torch.equal(logits(adapted()), logits(tiny_decoder()))
    first, second = dict(adapter_weights(adapted())), dict(adapter_weights(adapted()))
    assert all(torch.equal(first[name], second[name]) for name in first)
    state = torch.random.get_rng_state()
    adapted()
    assert torch.equal(state, torch.random.get_rng_state())


def test_only_the_adapter_has_a_gradient():
    decoder = moved()
    rows = sequences_of(tuple(batch()))
    packed = pack([Row(token_ids=r.token_ids) for r in rows])
    score_tokens(decoder, packed, [r.loss_mask for r in rows]).logprobs.sum().backward()
    for name, parameter in decoder.named_parameters():
        assert (parameter.grad is not None) == is_adapter(name), name
        if is_adapter(name):
            assert parameter.grad.abs().sum() > 0


def test_merged_weights_compute_the_same_as_the_adapter():
    decoder = moved()
    merged = Decoder(CONFIG)
    merged.load_state_dict(dict(decoder.published()))
    torch.testing.assert_close(logits(merged), logits(decoder), atol=1e-5, rtol=1e-5)
    assert (logits(merged) - logits(tiny_decoder())).abs().max() > 0.1


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's own
def test_peft_reads_exported_adapters(tmp_path):
    import peft

    decoder = moved()
    base = save_checkpoint(tiny_decoder(), tmp_path / "base")
    weights = dict(adapter_weights(decoder))
    (tmp_path / "adapter").mkdir()
    save_file(weights, tmp_path / "adapter" / "adapter_model.safetensors")
    config = adapter_config(weights, alpha=SETTINGS.alpha)
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    with torch.no_grad():
        found = theirs(torch.arange(2, 30)[None]).logits[0]
    torch.testing.assert_close(found, logits(decoder), atol=1e-4, rtol=1e-4)


def test_unknown_adapter_targets_are_refused():
    with pytest.raises(ConfigError, match="targets names w_proj") as caught:
        add_adapter(tiny_decoder(), LoraConfig(targets=("q_proj", "w_proj")))
    assert "down_proj, gate_proj, k_proj" in caught.value.hints[0]


# ---- trained ---------------------------------------------------------------------------------

TRAINING = {"lora": {"rank": 4, "alpha": 8.0}, "lr": 1e-2}


def weights_of(learner):
    return {name: tensor.clone() for name, tensor in learner.weights()}


def distance(a, b):
    return sum(float((a[name] - b[name]).norm()) for name in a)


def test_trainer_publishes_adapter_or_merged_weights(tmp_path):
    base = dict(tiny_decoder().state_dict())
    one = Trainer(tiny_decoder(), TrainerConfig(**TRAINING), advantage=grpo, loss=ppo_clip)
    assert distance(weights_of(one), base) == 0
    for step in range(2):
        one.step(batch(step), step)
    merged = weights_of(one)
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed
    assert all(name.endswith("_proj.weight") for name in changed)
    assert all("lora" in name for name in one.adapter())
    one.save(tmp_path / "states").result()
    other = Trainer(tiny_decoder(), TrainerConfig(**TRAINING), advantage=grpo, loss=ppo_clip)
    other.load(tmp_path / "states")
    assert distance(weights_of(other), merged) == 0
    one.step(batch(5), 2)
    other.step(batch(5), 2)
    assert distance(weights_of(other), weights_of(one)) == 0
    assert distance(weights_of(one), merged) > 1e-4


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_worker_trains_adapters(num_ranks, tmp_path):
    config = TrainerConfig(**TRAINING, num_ranks=num_ranks)
    theirs = ProcessTrainer(Trainer, tiny_checkpoint(), config, advantage=grpo, loss=ppo_clip)
    ours = Trainer(tiny_decoder(), config, advantage=grpo, loss=ppo_clip)
    try:
        theirs.step(batch(), 0)
        ours.step(batch(), 0)
        moved = distance(weights_of(ours), dict(tiny_decoder().state_dict()))
        assert distance(weights_of(theirs), weights_of(ours)) < 1e-4 * moved
        adapter = ours.adapter()
        assert distance(theirs.adapter(), adapter) < 1e-4 * sum(x.norm() for x in adapter.values())
        ours.step(batch(1), 1)
        ours.save(tmp_path / "states").result()
        theirs.load(tmp_path / "states")
        assert distance(weights_of(theirs), weights_of(ours)) < 1e-4 * moved
    finally:
        theirs.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_leaves_the_parts_that_see_alone(family, tmp_path):
    config = TrainerConfig(lora=SETTINGS)
    with seeing_policy(family, tmp_path) as policy:
        with pytest.raises(ConfigError, match="vision=full is not possible beside it"):
            Trainer(
                policy, config.model_copy(update={"vision": "full"}), advantage=grpo, loss=ppo_clip
            )
        Trainer(policy, config, advantage=grpo, loss=ppo_clip)
    trained = [name for name, p in policy.network.named_parameters() if p.requires_grad]
    assert trained
    assert all("language_model" in name and is_adapter(name) for name in trained)


def test_publishing_a_missing_adapter_is_refused():
    plain = Trainer(tiny_decoder(), TrainerConfig(), advantage=grpo, loss=ppo_clip)
    with pytest.raises(ConfigError, match="no adapter to publish"):
        plain.adapter()
    with pytest.raises(ConfigError, match="two thin ones"):
        load_config(overrides=["trainer.lora={}", "trainer.optimizer=muon"])


def test_an_adapter_of_the_starter_has_an_optimizer_of_its_own():
    trainer = load_config(overrides=["trainer.lora={}"]).trainer
    assert (trainer.optimizer, trainer.lr, trainer.vision) == ("adamw", 3e-3, "frozen")
    assert load_config(overrides=["trainer.lora={}", "trainer.lr=1e-3"]).trainer.lr == 1e-3
    assert load_config().trainer.optimizer == "muon"
