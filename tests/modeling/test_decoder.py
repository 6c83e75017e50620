"""Our decoder is the Hugging Face model, number for number, and their files are each other's."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from areal_gym.errors import ConfigError, TrainError
from areal_gym.modeling.checkpoint import load_checkpoint, save_checkpoint
from areal_gym.modeling.config import DecoderConfig
from areal_gym.modeling.decoder import Decoder, build_decoder, causal_attend

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES = {
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2-tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "qwen3-tied": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "llama": (transformers.LlamaConfig, {}),
    "llama3-rope": (transformers.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
}


@pytest.fixture(params=sorted(SHAPES))
def theirs(request):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make_config, extra = SHAPES[request.param]
    model = transformers.AutoModelForCausalLM.from_config(make_config(**SIZES, **extra))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, which start at 1 and 0
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def our_logprobs(decoder: Decoder, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        hidden = decoder(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
        return (hidden @ decoder.lm_head_weight.T).log_softmax(-1)


def their_logprobs(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids[None]).logits[0].log_softmax(-1)


def test_log_probabilities_agree_with_transformers(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(0, 97, (60,))
    ours = our_logprobs(load_checkpoint(tmp_path), ids)
    torch.testing.assert_close(ours, their_logprobs(theirs, ids), atol=1e-4, rtol=0)


def test_what_we_write_transformers_loads(theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "theirs")
    decoder = load_checkpoint(tmp_path / "theirs")
    save_checkpoint(decoder, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    ids = torch.randint(0, 97, (30,))
    torch.testing.assert_close(
        their_logprobs(again, ids), their_logprobs(theirs, ids), atol=1e-5, rtol=0
    )


def test_sharded_checkpoints_load(theirs, tmp_path):
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    ids = torch.randint(0, 97, (20,))
    torch.testing.assert_close(
        our_logprobs(load_checkpoint(tmp_path), ids),
        their_logprobs(theirs, ids),
        atol=1e-4,
        rtol=0,
    )


def tiny(seed: int = 0) -> Decoder:
    config = DecoderConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return build_decoder(config, seed=seed)


def test_fresh_weights_depend_on_the_seed_only():
    torch.manual_seed(1)
    first = tiny(3).state_dict()
    torch.manual_seed(2)
    second = tiny(3).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = tiny(4).state_dict()
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        load_checkpoint(tmp_path / "nowhere")


def test_another_architecture_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ConfigError, match="mamba"):
        load_checkpoint(tmp_path)


def test_a_missing_tensor_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    save_checkpoint(tiny(), tmp_path / "x")
    file = tmp_path / "x" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        load_checkpoint(tmp_path / "x")


def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    path = save_checkpoint(tiny(0), tmp_path / "x")
    before = our_logprobs(load_checkpoint(path), torch.arange(5))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("areal_gym.modeling.checkpoint._sync_directory", full)
    with pytest.raises(TrainError, match="No space left"):
        save_checkpoint(tiny(1), path)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert torch.equal(our_logprobs(load_checkpoint(path), torch.arange(5)), before)
