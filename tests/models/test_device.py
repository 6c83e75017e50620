"""Devices come from `torch.accelerator`, and one module alone knows a vendor's by name."""

import ast
from dataclasses import replace

import pytest
import torch

from areal_gym.cli.app import run
from areal_gym.errors import ConfigError
from areal_gym.models.accelerator_facts import AcceleratorFacts, accelerator_facts
from areal_gym.models.device import (
    accelerator,
    collectives_of,
    has_bfloat16,
    has_fused_adamw,
    has_varlen_attention,
    peak_memory,
    pick_device,
    process_group_backend,
    profiler_activities,
)
from tests._support.package_source import MODULES, source, tree

CPU = torch.device("cpu")
needs_no_accelerator = pytest.mark.skipif(accelerator() is not None, reason="there is one")


SGLANGS_OWN = {"cuda_graph"}
"""Names in requests to SGLang, whatever the device."""


def vendor_names(module):
    """Return names and texts in a module's code, its docstrings aside, that name CUDA or NCCL."""
    if not any(word in source(module) for word in ("cuda", "nccl")):
        return []
    nodes = list(ast.walk(tree(module)))
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    code = [node for node in nodes if id(node) not in documentation]
    words = [str(node.value) for node in code if isinstance(node, ast.Constant)]
    words += [node.attr for node in code if isinstance(node, ast.Attribute)]
    return [word for word in words if names_vendor(word)]


def names_vendor(word):
    return word not in SGLANGS_OWN and ("cuda" in word or word == "nccl")


def test_one_module_knows_vendors():
    named = {module: names for module in MODULES if (names := vendor_names(module))}
    assert "models.device" in named
    assert set(named) == {"models.device"}, named


# ---- choosing -----------------------------------------------------------------------------------


def test_automatic_device_is_what_torch_sees():
    assert pick_device("auto").type == (accelerator() or "cpu")
    assert pick_device("cpu") == CPU


@needs_no_accelerator
@pytest.mark.parametrize("name", ["cuda", "cuda:7", "xpu", "npu", "meta", "gpu", "", "accelerator"])
def test_device_that_is_not_there_names_what_is(name):
    with pytest.raises(ConfigError) as refused:
        pick_device(name, "trainer.device")
    assert f"trainer.device = {name!r}" in str(refused.value)
    assert any("available: cpu" in hint for hint in refused.value.hints)


@needs_no_accelerator
def test_command_names_the_setting_of_an_absent_device(tmp_path, tiny_policy, capsys):
    settings = ("engine.device=cpu", "trainer.device=cuda", f"engine.model={tiny_policy}")
    assert run(["train", "--env", "math", "--out", str(tmp_path / "run"), *settings]) != 0
    assert "trainer.device = 'cuda'" in capsys.readouterr().err


def test_collectives_are_those_of_the_device():
    assert process_group_backend("cpu") == process_group_backend("cpu", offloads=True) == "gloo"
    assert process_group_backend("cuda") == "nccl"
    assert process_group_backend("cuda", offloads=True) == "cpu:gloo,cuda:nccl"
    assert process_group_backend(torch.device("xpu", 1)) == "xccl"
    assert collectives_of("mps") == "gloo"
    with pytest.raises(ConfigError, match="no collectives for the device 'vulkan'"):
        process_group_backend("vulkan")


def test_cpu_has_what_training_on_it_uses():
    assert has_bfloat16(CPU)
    assert has_fused_adamw(CPU)
    assert not has_varlen_attention(CPU)
    assert peak_memory(CPU) is None
    assert {activity.name for activity in profiler_activities(CPU)} == {"CPU"}


# ---- facts --------------------------------------------------------------------------------------

WHOLE = AcceleratorFacts(
    kind="cuda",
    build="CUDA 13.0",
    devices=("NVIDIA H100 80GB HBM3, 80 GB",),
    collectives="nccl",
    has_bfloat16=True,
    has_fused_adamw=True,
    has_varlen_attention=True,
    counts_memory=True,
    has_memory_history=True,
    servers="SGLang and vLLM",
)


def test_accelerator_with_everything_lacks_nothing():
    assert WHOLE.lacks() == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"collectives": None}, "trainer.num_ranks=1"),
        ({"collectives": "gloo"}, "gloo copies through the host"),
        ({"has_bfloat16": False}, "trainer.dtype=float32"),
        ({"servers": None}, "engine.id=embedded"),
        ({"has_varlen_attention": False}, "attention"),
        ({"has_fused_adamw": False}, "fused AdamW"),
        ({"counts_memory": False}, "memory/gpu_*"),
        ({"has_memory_history": False}, "record of allocations"),
    ],
)
def test_what_is_missing_is_named_with_its_consequence(facts, words):
    (lack,) = replace(WHOLE, **facts).lacks()
    assert words in lack


@needs_no_accelerator
def test_machine_without_accelerator_has_no_facts(capsys):
    assert accelerator_facts() is None
    run(["doctor"])
    assert "training is on CPU" in capsys.readouterr().out
