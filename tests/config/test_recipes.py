"""Every recipe is taken by `train --dry-run`; what those of real models say of memory is so."""

import json
import re

import pytest
import torch

from areal_gym.cli.app import run
from areal_gym.config import load_config
from areal_gym.models.tiny.hf_config import config_from_hf
from areal_gym.runs.memory_plan import memory_of
from tests._support.paths import ROOT
from tests._support.qwen3_shapes import QWEN3, config_json

RECIPES = sorted((ROOT / "examples" / "recipes").glob("**/*.yaml"))
REAL = [path for path in RECIPES if path.parent.name == "qwen3"]
NUMBER = r"([\d.,]+)"


def named(path):
    return path.stem


def model_of(path):
    return path.stem.rpartition("_")[2].upper()


def comments_of(path):
    """All of its comments at the beginning as one line."""
    lines = path.read_text().splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


@pytest.mark.parametrize("path", RECIPES, ids=named)
def test_recipe_passes_a_dry_run(path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert run(["train", "-c", str(path), "--dry-run"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "# per step" in out
    if path in REAL:  # the model is not here, and nobody goes to fetch it
        assert f"# memory: is told once there is Qwen3-{model_of(path)}/config.json" in out


@pytest.mark.parametrize("path", REAL, ids=named)
def test_recipe_memory_equals_the_dry_runs(path, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config_json(model_of(path))))
    here = [f"engine.model={tmp_path}", "trainer.device=cpu"]
    assert run(["train", "-c", str(path), "--dry-run", *here]) == 0
    said = [
        line.removeprefix("# ")
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("# memory:", "# engine: "))
    ]
    said = [line for line in said if " GB" in line]
    assert len(said) == 2
    for line in said:
        assert line in comments_of(path)


@pytest.mark.parametrize("path", REAL, ids=named)
def test_recipe_fits_its_gpus(path):
    comments, config = comments_of(path), load_config(path)
    found = memory_of(config, config_from_hf(config_json(model_of(path))))
    size = int(re.search(r"GPUs of (\d+) GB", comments)[1])
    assert found.total / 1e9 < 0.85 * size, "a trainer's GPU"
    assert found.served / 1e9 < 0.5 * size, "a server's GPU"
    pattern = rf"\({NUMBER} x (\d+) - {NUMBER}\) GB / (\d+) kB = {NUMBER} tokens"
    share, gpu, weights, cached, tokens = re.search(pattern, comments).groups()
    assert (share, int(gpu)) == ("0.85", size)
    assert "0.85" in config.engine.kwargs["server_args"]
    room = (float(share) * size - float(weights)) * 1e6 / int(cached)
    assert room - 1000 < int(tokens.replace(",", "")) <= room
    assert room >= 2 * config.engine.max_context
    # The largest row is trained on in one piece.
    assert config.trainer.tokens_per_microbatch >= config.engine.max_context
    used = {gpu for gpus in config.engine.kwargs["gpus"] for gpu in gpus.split(",")}
    assert not used & {str(rank) for rank in range(config.trainer.num_ranks)}


def test_every_size_has_a_recipe():
    assert {model_of(path) for path in REAL} == set(QWEN3)


@pytest.mark.parametrize("path", [path for path in RECIPES if "mixtures" in str(path)], ids=named)
def test_recipe_of_a_mixture_says_what_its_ranks_hold(path):
    import transformers

    facts = transformers.Qwen3MoeConfig(
        **{"vocab_size": 151936, "hidden_size": 2048, "moe_intermediate_size": 768},
        **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4},
        **{"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8},
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(facts)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    comments, config = comments_of(path), load_config(path)
    size, num_ranks, share = re.search(
        rf"each of {NUMBER} billion parameters, divided by (\d+): {NUMBER} GB", comments
    ).groups()
    assert float(size) == round(num_parameters / 1e9, 1)
    assert float(share) == round(16 * num_parameters / 1e9 / int(num_ranks), 1)
    assert int(num_ranks) == config.trainer.num_ranks
    num_serving = config.cluster.servers * config.cluster.gpus_per_server
    assert (config.trainer.num_ranks, num_serving) == (12, 4)
    assert facts.num_experts % config.trainer.parallel.expert == 0
    assert config.trainer.tokens_per_microbatch >= config.engine.max_context
