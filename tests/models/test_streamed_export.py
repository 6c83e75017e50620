"""Weights that are written tensor by tensor are what safetensors and transformers write."""

import json

import pytest
import torch
from safetensors.torch import load_file

from areal_gym.models.hf.hf_loading import build_policy, load_policy
from areal_gym.models.stored_types import StoredTypes, read_stored_types
from areal_gym.models.streamed_export import plan_export, write_planned_file
from areal_gym.models.tiny.checkpoint_files import write_config, write_weights
from tests._support.tiny_architectures import ARCHITECTURES, tiny_config


def export(policy, directory, **options):
    """Write the policy's weights into a directory; return the plan."""
    directory.mkdir()
    state = {name: tensor.detach() for name, tensor in policy.state_dict().items()}
    plan = plan_export(policy, list(policy.network_tensors()), state, **options)
    for file in plan.files:
        write_planned_file(policy, file, directory, state.__getitem__)
    if index := plan.index():
        (directory / "model.safetensors.index.json").write_bytes(index)
    return plan


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_file_has_the_bytes_that_safetensors_writes(name, tmp_path):
    policy = build_policy(tiny_config(name), seed=0)
    plan = export(policy, tmp_path / "ours")
    assert not plan.is_rounded
    (tmp_path / "theirs").mkdir()
    write_weights(policy.published(), tmp_path / "theirs")
    ours, theirs = (tmp_path / w / "model.safetensors" for w in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_several_files_hold_every_tensor_once(name, tmp_path):
    policy = build_policy(tiny_config(name), seed=0)
    expected = dict(policy.published())
    total = sum(tensor.nbytes for tensor in expected.values())
    largest = max(tensor.nbytes for tensor in expected.values())
    most = max(largest, total // 4)
    plan = export(policy, tmp_path / "ours", num_writers=2, max_bytes=most)
    assert len(plan.files) >= 3
    found = {}
    for file in plan.files:
        part = load_file(tmp_path / "ours" / file.name)
        assert not found.keys() & part.keys()
        assert sum(tensor.nbytes for tensor in part.values()) <= most
        found |= part
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in found)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == total
    write_config(policy, torch.float32, tmp_path / "ours")
    read = dict(load_policy(tmp_path / "ours").published())
    assert all(torch.equal(read[n], expected[n]) for n in expected)


def test_tensors_are_stored_in_the_types_of_the_first_checkpoint(tmp_path):
    policy = build_policy(tiny_config("qwen3_moe"), seed=0)
    types = {
        name: torch.float32 if "norm" in name else torch.bfloat16 for name, _ in policy.published()
    }
    policy.stored_types = StoredTypes(by_name=types, main=torch.bfloat16)
    assert export(policy, tmp_path / "mixed").is_rounded
    files = [tmp_path / "mixed" / "model.safetensors"]
    assert read_stored_types(files) == policy.stored_types
    written = load_file(files[0])
    for name, tensor in policy.published():
        assert torch.equal(written[name], tensor.to(types[name])), name


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl"])
def test_config_names_the_type_of_the_weights(name, tmp_path):
    policy = build_policy(tiny_config(name), seed=0)
    policy.stored_types = StoredTypes(main=torch.bfloat16)
    export(policy, tmp_path / "it")
    write_config(policy, torch.bfloat16, tmp_path / "it")
    config = json.loads((tmp_path / "it" / "config.json").read_text())
    assert "float32" not in json.dumps(config)
    assert config["torch_dtype"] == "bfloat16"
    assert load_policy(tmp_path / "it").stored_types.main is torch.bfloat16
