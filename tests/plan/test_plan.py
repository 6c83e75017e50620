"""`areal-gym plan` shows what ranks, servers and hosts take, and what to change."""

import json
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from areal_gym.cli.app import run
from areal_gym.cli.command_reference import JSON_KEYS
from areal_gym.models.gpus import GPUS
from areal_gym.plan.estimates import LINK_EFFICIENCY, NETWORK_BANDWIDTH, transfer_seconds
from areal_gym.plan.operation_costs import Link
from tests._support.tiny_architectures import tiny_config

SIZES = {
    "vocab_size": 2000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}


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
    assert plan["cache_bytes_per_token"] == 2 * 2 * 2 * 2 * 16
    parts = {"train", "update", "communicate", "publish", "generate", "step"}
    assert set(plan["seconds"]) == parts
    assert plan["limit"] in parts
    assert plan["limited_by"] in ("compute", "memory bandwidth", "network", "disk")
    assert plan["host_bytes_per_node"] == sum(plan["host_bytes"].values())
    room = 0.85 * GPUS["h100-80gb"].memory - plan["server_weight_bytes"]
    assert plan["server_cache_bytes"] == pytest.approx(room, rel=1e-3)
    shown = areal_gym("plan", f"engine.model={model}", *words)
    assert "4 ranks, 3 servers of 1" in shown.out
    assert "takes longest" in shown.out


def test_servers_and_ranks_in_turns_share_gpus(model, areal_gym):
    words = ("engine.id=sglang", "trainer.colocate=true", "trainer.lora={}")
    base = ("plan", f"engine.model={model}", "trainer.num_ranks=2", *words, "--json")
    whole = json.loads(areal_gym(*base).out)
    assert (whole["num_gpus"], whole["num_ranks"], whole["num_servers"]) == (2, 2, 1)
    assert whole["host_bytes"]["offloaded"] > 0
    adapter = json.loads(areal_gym(*base, "trainer.weight_sync=lora").out)
    stays = adapter["server_weight_bytes"]
    assert adapter["server_stays_bytes"] == stays > whole["server_stays_bytes"] == 0
    assert adapter["rank_total"] == stays + sum(adapter["rank_bytes"].values())
    assert adapter["publication_bytes"] < whole["publication_bytes"]
    seconds = whole["seconds"]
    trained = max(seconds["train"], seconds["communicate"]) + seconds["update"]
    in_turn = trained + seconds["publish"] + seconds["offload"] + seconds["generate"]
    assert seconds["step"] == pytest.approx(in_turn)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "h100"), "h100-80gb"),
        (("--gpus", "2", "trainer.num_ranks=4"), "the run takes 4 GPUs"),
        (("engine.model=starter",), "fits anywhere"),
        (("engine.model=nowhere",), "nowhere"),
        (("trainer.num_ranks=4", "trainer.parallel.expert=2"), "expert"),
        (("trainer.num_ranks=4", "trainer.parallel.replicate=3"), "does not divide"),
        (
            (
                *("engine.id=sglang", "engine.kwargs.num_servers=1"),
                'engine.kwargs.server_args=["--tp-size","3"]',
            ),
            "cannot divide the model's 4 heads",
        ),
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


def test_hosts_that_are_too_small_are_said(model, areal_gym):
    words = (f"engine.model={model}", "trainer.num_ranks=4", "rollout.max_staleness=1")
    done = areal_gym("plan", *words, "--node-memory", "8")
    assert done.code == 1
    assert "of its 8.0 GB" in done.err
    assert "adamw_8bit" in done.err
    # Eight ranks would be on the same node.
    assert "num_ranks" not in done.err
    assert areal_gym("plan", *words, "--node-memory", "64").code == 0


def test_more_nodes_are_named_for_hosts_that_are_too_small(model, areal_gym):
    words = (f"engine.model={model}", "trainer.num_ranks=8", "--node-memory", "8")
    done = areal_gym("plan", *words)
    assert done.code == 1
    assert "trainer.num_ranks=16" in done.err


def test_servers_without_room_are_said(tmp_path, areal_gym):
    sizes = {"hidden_size": 4096, "intermediate_size": 16384, "vocab_size": 256000}
    config = tiny_config("qwen3", **{**SIZES, **sizes, "num_hidden_layers": 4})
    config.save_pretrained(tmp_path / "model")
    serving = ("engine.id=sglang", "engine.kwargs.num_servers=1")
    share = 'engine.kwargs.server_args=["--mem-fraction-static","0.1"]'
    words = (f"engine.model={tmp_path / 'model'}", "trainer.num_ranks=8", *serving, share)
    done = areal_gym("plan", *words, "trainer.lora={}", "--gpu", "a10-24gb")
    assert done.code == 1
    assert "--tp-size" in done.err


def test_offloaded_states_are_the_hosts(model, areal_gym):
    words = (f"engine.model={model}", "trainer.num_ranks=2", "--json")
    plain, offloaded = (
        json.loads(areal_gym("plan", *words, *more).out)
        for more in ((), ("trainer.cpu_offload=true",))
    )
    moved = sum(plain["rank_bytes"][kind] for kind in ("weights", "gradients", "states"))
    assert offloaded["host_bytes"]["offloaded"] == 2 * moved
    assert plain["rank_total"] - sum(offloaded["rank_bytes"].values()) == moved


def test_buckets_are_what_rank_0_holds(model, areal_gym):
    sync = 'trainer.weight_sync={"id":"distributed","kwargs":{"dtype":"bfloat16","bucket_mb":1}}'
    words = ("engine.id=sglang", "engine.kwargs.num_servers=1", "trainer.num_ranks=2", sync)
    plan = json.loads(areal_gym("plan", f"engine.model={model}", *words, "--json").out)
    assert plan["publishing_bytes"]["buckets"] == 2 * max(1_000_000, 2 * 2000 * 128)
    assert plan["traffic_bytes"]["broadcast"] == plan["publication_bytes"]
    assert plan["publication_bytes"] == 2 * plan["num_parameters"]


def test_picture_has_every_part(model, tmp_path, areal_gym):
    words = ("engine.id=sglang", "engine.kwargs.num_servers=1", "trainer.num_ranks=2")
    file = tmp_path / "plan.svg"
    done = areal_gym("plan", f"engine.model={model}", *words, "--picture", str(file))
    assert done.code == 0, done.err
    assert "2 ranks, 1 server of 1" in file.read_text()
    titles = {element.text for element in ElementTree.parse(file).iter() if "title" in element.tag}
    named = {title.split(" ")[0] for title in titles}
    assert {"weights", "gradients", "states", "activations", "cache"} <= named


def test_rings_over_nodes_use_every_network_card():
    gpu, whole = GPUS["h100-80gb"], 16e9
    within = transfer_seconds(Link("all-gather", tuple(range(8))), whole, gpu)
    assert within == pytest.approx(7 / 8 * whole / (LINK_EFFICIENCY * gpu.link_bandwidth))
    over_nodes = transfer_seconds(Link("all-gather", tuple(range(16))), whole, gpu)
    assert over_nodes == pytest.approx(15 / 16 * whole / (LINK_EFFICIENCY * 8 * NETWORK_BANDWIDTH))
    alone = transfer_seconds(Link("all-reduce", (0, 8)), whole, gpu)
    assert alone == pytest.approx(whole / (LINK_EFFICIENCY * NETWORK_BANDWIDTH))
    exchanged = transfer_seconds(Link("all-to-all", tuple(range(16))), whole, gpu)
    assert exchanged == pytest.approx(whole / 2 / (LINK_EFFICIENCY * NETWORK_BANDWIDTH))


def test_objectives_on_fixed_data_are_planned_by_their_own_step(model, areal_gym):
    plans = {}
    for objective in ("sft", "dpo", "rm"):
        words = (f"engine.model={model}", f"objective={objective}", "data.batch_size=8")
        done = areal_gym("plan", *words, "--tokens", "64", "--json")
        assert done.code == 0, done.err
        plans[objective] = json.loads(done.out)
    tokens = {objective: plan["step_tokens"] for objective, plan in plans.items()}
    assert (tokens["sft"], tokens["dpo"], tokens["rm"]) == (8 * 64, 16 * 64, 16 * 64)
    frozen = {objective: plan["rank_bytes"].get("frozen", 0) for objective, plan in plans.items()}
    assert frozen["dpo"] == 4 * plans["dpo"]["num_parameters"]  # the reference
    assert frozen["sft"] == frozen["rm"] == 0
    assert plans["rm"]["logits_bytes"] == 0 < plans["sft"]["logits_bytes"]
