"""LoRA on models of transformers: fused experts too, merged by the checkpoint's names."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal_gym.config import LoraConfig, TrainerConfig
from areal_gym.errors import ConfigError
from areal_gym.models.hf.hf_loading import build_policy, load_policy
from areal_gym.models.lora_weights import is_adapter
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.algorithms.token_advantages import gae
from areal_gym.trainer.batch.bins import Row
from areal_gym.trainer.batch.packing import pack
from areal_gym.trainer.lora import adapter_weights, add_adapter
from areal_gym.trainer.parallel.fsdp import load_for_training
from areal_gym.trainer.trainer import Trainer
from tests._support.tiny_architectures import ARCHITECTURES, tiny_config

pytest.importorskip("peft", reason="pip install 'areal-gym[lora]'")
SETTINGS = LoraConfig(rank=4, alpha=8.0)
EXPERTS = {"qwen3_moe", "mixtral", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v3", "minimax_m2"}
EXPERTS |= {"llama4_text", "qwen3_next", "qwen3_5_moe_text"}


def adapted(name, settings=SETTINGS, **config):
    policy = build_policy(tiny_config(name, **config), seed=0)
    add_adapter(policy, settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in policy.named_parameters():
            if is_adapter(parameter_name):
                parameter.normal_(0.0, 0.1, generator=generator)
    return policy


def some_logits(policy):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 100, (n,), generator=generator).tolist() for n in (20, 9)]
    return policy.logits(policy(pack([Row(token_ids=row) for row in rows])))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_published_weights_compute_what_the_adapter_computes(name, tmp_path):
    plain = build_policy(tiny_config(name), seed=0)
    plain.network.save_pretrained(tmp_path)
    policy = adapted(name)
    published = dict(policy.published())
    (file,) = tmp_path.glob("*.safetensors")
    saved = load_file(file)
    assert published.keys() == saved.keys()
    changed = {n for n in saved if not torch.equal(saved[n], published[n])}
    assert any("expert" in n for n in changed) == (name in EXPERTS)
    assert not any(word in n for n in published for word in ("lora_", "base_layer"))
    with torch.no_grad():
        expected = some_logits(policy)
        assert (expected - some_logits(plain)).abs().max() > 0.05
    save_file({n: t.contiguous() for n, t in published.items()}, file, {"format": "pt"})
    with torch.no_grad():
        torch.testing.assert_close(
            some_logits(load_policy(tmp_path)), expected, atol=3e-4, rtol=1e-4
        )


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_next"])
def test_only_adapters_learn_beside_a_frozen_base_in_bfloat16(name):
    policy = build_policy(tiny_config(name), seed=0)
    policy.network.to(torch.bfloat16)
    add_adapter(policy, SETTINGS)
    policy.recomputes_layers = True
    with torch.autocast("cpu", torch.bfloat16):
        some_logits(policy).float().log_softmax(-1)[:, 5].sum().backward()
    for parameter_name, parameter in policy.named_parameters():
        assert (parameter.grad is not None) == is_adapter(parameter_name), parameter_name
        is_kept = parameter.dtype == torch.float32
        assert is_kept or not is_adapter(parameter_name)


def test_targets_are_names_of_matrices():
    policy = adapted("gpt_oss", LoraConfig(targets=("q_proj", "o_proj")))
    names = dict(adapter_weights(policy))
    assert len(names) == 2 * 4 * 2
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    with pytest.raises(ConfigError, match="targets names w_proj") as caught:
        add_adapter(build_policy(tiny_config("gpt_oss"), seed=0), LoraConfig(targets=("w_proj",)))
    assert "gate_up_proj" in caught.value.hints[0]


def test_adapters_of_experts_are_published_merged_only():
    with pytest.raises(ConfigError, match="stacked matrices of experts") as caught:
        dict(adapter_weights(adapted("gpt_oss", LoraConfig(targets=("down_proj",)))))
    assert "weight_sync=disk" in caught.value.hints[0]


def test_a_critic_beside_an_adapter_trains_float32(tmp_path):
    build_policy(tiny_config("qwen3_moe"), seed=0).network.save_pretrained(tmp_path)
    config = TrainerConfig(algorithm="ppo", lora={}, dtype="bfloat16", critic={"trunk": "own"})
    trainer = Trainer(load_for_training(tmp_path, config), config, advantage=gae, loss=ppo_clip)
    assert next(trainer.decoder.parameters()).dtype == torch.bfloat16
    dtypes = {t.dtype for name, t in trainer.states().items() if "critic.weights" in name}
    assert dtypes == {torch.float32}
