"""The code that runs a checkpoint: by architecture, by the settings, or its own if trusted."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import dynamic_module_utils

from areal_gym.config import load_config
from areal_gym.config.trust import powerful_settings
from areal_gym.errors import ConfigError
from areal_gym.models.backend import (
    AUTO,
    OLDEST_TRANSFORMERS,
    SMALL_BYTES,
    ModelLoader,
    require_supported,
)
from areal_gym.models.hf.hf_loading import build_policy, load_policy
from areal_gym.models.hf.hf_policy import HFPolicy
from areal_gym.models.tiny.decoder import Decoder
from areal_gym.runs.make_trainer import make_trainer
from areal_gym.trainer.parallel.fsdp import require_exact_packing
from tests._support.tiny_architectures import tiny_config

REPOSITORY = Path(__file__).parents[2]
CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM


class OwnConfig(Qwen3Config):
    model_type = "own_qwen3"


class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig
"""


def saved(path, name):
    build_policy(tiny_config(name), seed=0).network.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("backend", "name", "kind"),
    [
        ("auto", "qwen3", Decoder),
        ("auto", "qwen3_moe", HFPolicy),
        ("tiny", "qwen3", Decoder),
        ("transformers", "qwen3", HFPolicy),
    ],
)
def test_backend_of_the_settings_makes_the_trainers_model(backend, name, kind, tmp_path):
    directory = saved(tmp_path, name)
    config = load_config(overrides=[f"engine.model={directory}", f"model.backend={backend}"])
    trainer = make_trainer(config, directory)
    assert isinstance(trainer.decoder, kind)
    whole = dict(load_policy(directory).published())
    weights = dict(trainer.weights())
    assert weights.keys() == whole.keys()
    assert all(torch.equal(weights[name], whole[name]) for name in whole)
    described = ModelLoader(backend=backend).without_weights(directory)
    assert all(parameter.is_meta for parameter in described.parameters())
    assert described.hf_config()["model_type"] == name


def test_tiny_decoder_names_what_it_knows(tmp_path):
    with pytest.raises(ConfigError, match=r"the tiny decoder runs .*qwen3") as caught:
        ModelLoader(backend="tiny").load(saved(tmp_path, "qwen3_moe"))
    assert "model.backend=auto" in caught.value.hints[0]


@pytest.mark.parametrize("extra", [{"attention_bias": True}, {"mlp_bias": True}])
def test_variants_that_the_tiny_decoder_lacks_are_run_by_transformers(extra, tmp_path):
    directory = saved(tmp_path, "llama")
    facts = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**facts, **extra}))
    assert AUTO.uses_transformers(directory)
    with pytest.raises(ConfigError, match=next(iter(extra))):
        ModelLoader(backend="tiny").load(directory)


def test_large_checkpoints_are_run_by_transformers(tmp_path):
    directory = saved(tmp_path, "qwen3")
    assert not AUTO.uses_transformers(directory)
    with (directory / "model-00002.safetensors").open("wb") as file:
        file.truncate(SMALL_BYTES)
    assert AUTO.uses_transformers(directory)
    assert not ModelLoader(backend="tiny").uses_transformers(directory)


def test_code_of_a_checkpoint_runs_only_if_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = saved(tmp_path / "model", "qwen3")
    facts = json.loads((directory / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    facts |= {"model_type": "own_qwen3", "auto_map": own, "architectures": ["OwnForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(facts))
    (directory / "own.py").write_text(CODE)
    with pytest.raises(ConfigError, match="brings code of its own") as caught:
        AUTO.load(directory)
    assert "model.trust_remote_code=true" in caught.value.hints[0]
    policy = ModelLoader(trusts_code=True).load(directory)
    assert type(policy.network).__name__ == "OwnForCausalLM"
    require_exact_packing(policy, load_config().trainer)
    assert ModelLoader(trusts_code=True).without_weights(directory).shape.vocab_size == 128


def test_trust_in_code_is_not_taken_from_others_settings():
    config = load_config(overrides=["model.trust_remote_code=true"])
    assert powerful_settings(config) == {"model.trust_remote_code": True}


def test_versions_of_transformers_are_those_of_the_package():
    major, minor = OLDEST_TRANSFORMERS
    facts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    wanted = f"transformers>={major}.{minor},<{major + 1}"
    assert wanted in facts["project"]["optional-dependencies"]["train"]
    require_supported(f"{major}.{minor}.0")
    require_supported(f"{major}.{minor + 9}.1rc1")
    for version in ("4.57.6", f"{major}.{minor - 1}.9", f"{major + 1}.0.0"):
        with pytest.raises(ConfigError, match=f"transformers {version} is installed; models"):
            require_supported(version)


def test_loading_the_models_of_transformers_writes_nothing_into_a_terminal():
    """transformers imports torchao where it is installed, and torchao warns of its kernels."""
    pytest.importorskip("torchao")
    code = "import areal_gym.models.hf.hf_loading"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
