"""docs/metrics.md: runs write what it says, and it says what runs write."""

import dataclasses
import json
import re

import pytest

from areal_gym.config import load_config
from areal_gym.engines.embedded.requests import EngineStats
from areal_gym.engines.servers.server_state import ServerStats
from areal_gym.plugins import PluginManager, Registry, set_registry
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.train import train
from tests._support.paths import ROOT

DESIGN = ROOT.parent / "shared" / "design" / "algorithms.md"

SMALL = [
    "rollout.group_size=4",
    "rollout.batch_groups=2",
    "rollout.max_in_flight=8",
    "rollout.max_new_tokens=12",
    "engine.num_slots=8",
    "engine.max_context=256",
    "eval.num_tasks=2",
    "loggers=[file]",
]
RUNS = {
    "synchronous": ["env.id=tir", "steps=2", "eval.num_tasks=5"],
    "asynchronous": ["env.id=tir", "steps=4", "rollout.max_staleness=2"],
    "mixed": ["env.id=mix", "steps=1", "eval.num_tasks=4", "rollout.batch_groups=8"],
    # Whatever an algorithm can add: corrections, a reference, shaped rewards, a critic, a gate.
    "m2po": [
        "env.id=shaped",
        "steps=3",
        "rollout.max_staleness=2",
        "trainer.algorithm=m2po",
        "trainer.minibatches=2",
        "trainer.kl.coefficient=0.1",
        "trainer.reward.overlong_tail=0.2",
    ],
    "ppo": ["env.id=shaped", "steps=1", "trainer.algorithm=ppo"],
    "sapo": ["env.id=shaped", "steps=1", "trainer.algorithm=sapo"],
    "dppo": ["env.id=shaped", "steps=1", "trainer.algorithm=dppo"],
    "kl_cov": ["env.id=shaped", "steps=1", "trainer.algorithm=kl_cov"],
}
ELSEWHERE = {
    # What none of these runs can show: no GPU, no rejected group, no judging that raised; and
    # SGLang's counters.
    "env/judge_errors",
    "env/forks",  # of programs inside a task's place: tests/agents/test_programs_in_places.py
    "reward/role/<role>",  # of episodes that several roles play: tests/rollout/test_roles.py
    "eval/role/<role>",
    "train/mfu",
    "memory/gpu_peak_mb",
    "memory/gpu_reserved_mb",
    "rollout/rejected/<filter>/<reason>",
    *(f"engine/{field.name}" for field in dataclasses.fields(ServerStats)),
}

# The items of the design's list, in its words, and where each is found in an asynchronous run.
WANTED = {
    "reward (mean, parts, per env)": ["reward/mean", "reward/part/<name>", "reward/env/<env>"],
    "pass@1 and pass@k": ["reward/pass@<k>"],
    "solve-all / solve-none fractions": ["reward/solve_all", "reward/solve_none"],
    "turns": ["rollout/turns"],
    "lengths": ["rollout/policy_tokens_mean", "rollout/sequence_tokens_mean"],
    "truncated fraction": ["rollout/truncated"],
    "tool errors": ["env/tool_errors"],
    "infrastructure failures by boundary": ["rollout/failures/<reason>"],
    "loss": ["train/loss"],
    "ratio": ["train/ratio"],
    "clip fractions": ["train/clip_fraction"],
    "approximate KL by staleness": ["train/approx_kl_stale<lag>"],
    "entropy": ["train/entropy"],
    "gradient norm": ["train/grad_norm"],
    "learning rate": ["train/lr"],
    "masked fraction": ["train/masked_fraction", "train/corrected_fraction"],
    "staleness histogram": ["staleness/<lag>"],
    "dropped groups": ["rollout/failed_groups", "rollout/stale_groups"],
    "acceptance": ["rollout/acceptance"],
    "tokens/s generated and trained": ["rollout/generated_tokens_per_s", "train/tokens_per_s"],
    "time in rollout / train / sync / wait": [
        "time/generation_s",
        "time/train_s",
        "time/publish_s",
        "time/wait_s",
    ],
    "overlap efficiency = best possible step time / measured (best = max(T_gen, T_train))": [
        "time/overlap_efficiency"
    ],
    # The utilisation itself (train/mfu) needs a device whose peak is known.
    "model FLOPs utilisation": ["train/model_tflops_per_s"],
    "padding fraction": ["train/padding_fraction"],
    "queue depths": ["rollout/groups_ready", "rollout/episodes_queued"],
    "memory": ["memory/rss_mb", "memory/trainer_rss_mb"],
}


ASYNCHRONOUS_ONLY = {
    "train/approx_kl_stale<lag>",
    "train/corrected_fraction",
    "memory/trainer_rss_mb",
}

EXPERTS_ONLY = {"train/expert_load_max", "train/experts_idle", "train/router_agreement"}
"""Written by runs of mixtures of experts: tests/runs/test_transformers_runs.py."""


def documented():
    """Names in the first cells of the page's tables of metrics, with a pattern for each."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    names = [
        line.split("`")[1]
        for table in page.split("| name | unit | meaning |")[1:]
        for line in table.split("\n\n")[0].splitlines()
        if line.startswith("| `")
    ]
    assert len(names) == len(set(names))
    return {
        name: re.compile(re.sub(r"<\w+>", r"[^/\\s]+", re.escape(name).replace("\\<", "<")))
        for name in names
    }


@pytest.fixture(scope="module")
def keys(tiny_policy, tmp_path_factory):
    """By run: the names in `metrics.jsonl`, and those that a logger got."""
    set_registry(
        Registry(
            PluginManager.installed(
                modules=["tests._support.shaped_env", "tests._support.loggers_plugin"]
            )
        )
    )
    written, logged = {}, {}
    for run, overrides in RUNS.items():
        out = tmp_path_factory.mktemp("runs") / run
        settings = [f"engine.model={tiny_policy}", *SMALL, *overrides]
        train(load_config(overrides=settings), run_dir=out)
        written[run] = {key for row in RunDir(out).read_metrics() for key in row}
        _, *rows, _ = (out / "loggers" / "file" / "rows.jsonl").read_text().splitlines()
        logged[run] = {key for row in rows for key in json.loads(row)} - {"at"}
    set_registry(None)
    return written, logged


@pytest.mark.parametrize("run", RUNS)
def test_every_written_metric_is_documented(run, keys):
    patterns = documented().values()
    for found in keys:
        unknown = {key for key in found[run] if not any(p.fullmatch(key) for p in patterns)}
        assert not unknown


def test_every_documented_metric_is_written(keys):
    everything = {key for found in keys for names in found.values() for key in names}
    page = documented()
    absent = {name for name, p in page.items() if not any(map(p.fullmatch, everything))}
    assert absent == ELSEWHERE | EXPERTS_ONLY
    assert {f"engine/{field.name}" for field in dataclasses.fields(EngineStats)} <= set(page)


@pytest.mark.parametrize("item", WANTED)
def test_every_item_of_the_design_is_written(item, keys):
    written, _ = keys
    page = documented()
    for name in WANTED[item]:
        assert any(map(page[name].fullmatch, written["asynchronous"])), name
        if name not in ASYNCHRONOUS_ONLY:
            assert any(map(page[name].fullmatch, written["synchronous"])), name


@pytest.mark.skipif(not DESIGN.exists(), reason="no ../shared/design/algorithms.md")
def test_design_items_are_complete():
    text = DESIGN.read_text().partition("## Metrics every step\n")[2].partition("\n## ")[0]
    text = " ".join(text.split()).removesuffix(".")
    assert re.split(r"[,;] (?![^()]*\))", text) == list(WANTED)
