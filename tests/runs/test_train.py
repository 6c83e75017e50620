"""Whole runs, small: what is in the directory afterwards, and what happens when they are cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import transformers

from areal_gym.config import load_config
from areal_gym.errors import ConfigError, NothingToDoError, RunExistsError, UsageError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint, save_checkpoint
from areal_gym.models.tiny.decoder import build_decoder
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.run_dir.trajectory_files import TrainedFile
from areal_gym.runs.evaluation import evaluate
from areal_gym.runs.train import train
from areal_gym.warm_start.starter_tokenizer import build_tokenizer, save_tokenizer
from tests._support.display_lines import Lines

SMALL = [
    "rollout.group_size=4",
    "rollout.batch_groups=2",
    "rollout.max_in_flight=8",
    "rollout.max_new_tokens=12",
    "engine.num_slots=8",
    "engine.max_context=256",
    "eval.num_tasks=4",
    "trainer.advantage=reinforce",
]


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    """An untrained policy; nobody needs a warm start to see whether a run works."""
    torch.set_num_threads(1)
    draft = tmp_path_factory.mktemp("tokenizer")
    texts = [f"What is {a}+{b}? \\boxed{{{a + b}}}" for a in range(30) for b in range(30)]
    tokenizer = build_tokenizer(texts, vocab_size=380)
    save_tokenizer(tokenizer, draft, max_context=256)
    config = DecoderConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
    )
    directory = tmp_path_factory.mktemp("policy") / "checkpoint"
    return save_checkpoint(build_decoder(config, seed=0), directory, tokenizer_dir=draft)


def config_of(policy, *overrides, env="tir", steps=2):
    return load_config(
        overrides=[f"engine.model={policy}", f"env.id={env}", f"steps={steps}", *SMALL, *overrides]
    )


@pytest.mark.parametrize("env", ["tir", "math", "countdown"])
def test_run_writes_a_complete_directory(policy, tmp_path, env):
    summary = train(config_of(policy, env=env), run_dir=tmp_path / "run")
    run = RunDir(tmp_path / "run")
    assert run.read_summary() == summary
    assert {
        "heldout_before",
        "heldout_after",
        "heldout_greedy_before",
        "heldout_greedy_after",
        "num_steps",
        "warm_start_s",
        "train_s",
        "seed",
    } <= set(summary)
    assert [row["step"] for row in run.read_metrics()] == [1, 2]
    # Which of them run snippets depends on what the policy writes; tir's sandbox is asked for late.
    assert all(report["level"] for report in run.read_provenance()["sandboxes"])
    assert run.learning_curve_file.read_bytes().startswith(b"\x89PNG")
    assert "</html>" in run.report_file.read_text()
    assert run.tokenizer_file.read_bytes() == (policy / "tokenizer.json").read_bytes()
    for file in sorted(run.trajectories_dir.glob("step-*.jsonl")):
        told = TrainedFile(run.trained_dir / file.name)
        for place, trajectory in enumerate(run.read_trajectories(file.stem)):
            assert len(told.read(place)["logprobs"]) == trajectory.num_policy_tokens
    used = json.loads(run.plugins_file.read_text())["used"]
    assert {"embedded", "chat", env} <= {entry["id"] for entry in used}
    assert all(entry["distribution"] == "areal-gym" for entry in used)
    trajectories = list(run.read_trajectories(2))
    assert len(trajectories) == 8
    assert {v for t in trajectories for v in t.policy_versions} == {1}
    assert len(list(run.read_trajectories("eval-000000"))) == 4
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / summary["checkpoint"]
    )
    ours = load_checkpoint(tmp_path / "run" / summary["checkpoint"]).state_dict()
    assert torch.equal(ours["model.norm.weight"], model.state_dict()["model.norm.weight"])


def test_the_same_seed_gives_the_same_run(policy, tmp_path):
    rows = []
    for name in ("a", "b"):
        train(config_of(policy), run_dir=tmp_path / name)
        run = RunDir(tmp_path / name)
        rows.append(
            [[(t.token_ids, t.reward) for t in run.read_trajectories(step)] for step in (1, 2)]
        )
    assert rows[0] == rows[1]


def test_resumed_run_equals_the_uninterrupted_one(policy, shaped_env, tmp_path):
    train(config_of(policy, env=shaped_env, steps=3), run_dir=tmp_path / "whole")
    train(config_of(policy, env=shaped_env, steps=1), run_dir=tmp_path / "cut")
    train(config_of(policy, env=shaped_env, steps=3), run_dir=tmp_path / "cut", mode="resume")
    played = [
        [t.token_ids for step in (1, 2, 3) for t in RunDir(tmp_path / name).read_trajectories(step)]
        for name in ("whole", "cut")
    ]
    assert played[0] == played[1]
    # Not bit for bit: who shares a product with whom depends on time, and with it the last digit
    # of the recorded log-probabilities.
    weights = [
        load_checkpoint(tmp_path / name / "checkpoints" / "step-000003").state_dict()
        for name in ("whole", "cut")
    ]
    start = load_checkpoint(policy).state_dict()
    for name, tensor in weights[0].items():
        moved = (tensor - start[name]).abs().max()
        assert (tensor - weights[1][name]).abs().max() <= 1e-2 * moved
    assert moved > 0
    assert [row["step"] for row in RunDir(tmp_path / "cut").read_metrics()] == [1, 2, 3]


def test_damaged_checkpoint_is_named_and_the_previous_one_resumes(policy, tmp_path):
    run = RunDir(tmp_path / "run")
    train(config_of(policy, "trainer.save_every=1", steps=3), run_dir=run.path)
    file = run.checkpoints_dir / "step-000003" / "trainer" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:1000])
    longer = config_of(policy, "trainer.save_every=1", steps=4)
    with pytest.raises(ConfigError, match=r"step-000003.*__0_0\.distcp is truncated") as caught:
        train(longer, run_dir=run.path, mode="resume")
    assert "--resume --from-step 2" in caught.value.hints[0]
    assert len(run.read_metrics()) == 3  # nothing was forgotten yet
    with pytest.raises(UsageError, match="no checkpoint of step 1") as missing:
        train(longer, run_dir=run.path, mode="resume", from_step=1)
    assert missing.value.hints == ("available: the steps 2, 3",)
    summary = train(longer, run_dir=run.path, mode="resume", from_step=2)
    assert summary["first_step"] == 3
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3, 4]
    names = {path.name for path in run.checkpoints_dir.iterdir() if not path.is_symlink()}
    assert names == {"step-000003", "step-000004"}


def test_best_checkpoint_is_kept_and_named(policy, shaped_env, tmp_path):
    settings = (
        "eval.every=1",
        "eval.num_tasks=24",
        "trainer.save_every=1",
        "trainer.keep_checkpoints=1",
    )
    config = config_of(policy, *settings, env=shaped_env, steps=4)
    summary = train(config, run_dir=tmp_path / "run")
    run = RunDir(tmp_path / "run")
    scores = {row["step"]: row["sampled"]["pass@1"] for row in run.read_evaluations()}
    del scores[0]
    best = max(scores, key=lambda step: (scores[step], step))
    assert summary["best_checkpoint"] == f"checkpoints/step-{best:06d}"
    assert (run.checkpoints_dir / "best").readlink().name == f"step-{best:06d}"
    names = {path.name for path in run.checkpoints_dir.iterdir()}
    assert names == {"best", f"step-{best:06d}", "step-000004"}
    few = config_of(policy, "eval.num_tasks=4", env=shaped_env)
    report = evaluate(few, checkpoint=run.checkpoints_dir / "best")
    assert report.num_tasks == 4


def test_asynchronous_training_respects_max_staleness(policy, tmp_path):
    train(
        config_of(policy, "rollout.max_staleness=2", steps=4),
        run_dir=tmp_path / "run",
    )
    rows = RunDir(tmp_path / "run").read_metrics()
    assert all(row["rollout/staleness_max"] <= 2 for row in rows)


def test_scheduled_evaluations_measure_exactly_their_step(policy, tmp_path):
    settings = ("eval.every=2", "rollout.max_staleness=1")
    train(config_of(policy, *settings, steps=5), run_dir=tmp_path / "run")
    run = RunDir(tmp_path / "run")
    found = run.read_evaluations()
    assert [row["step"] for row in found] == [0, 2, 4, 5]
    assert [row["sampled"]["policy_versions"] for row in found] == [[0], [2], [4], [5]]
    for step in (0, 2, 4, 5):
        trajectories = list(run.read_trajectories(f"eval-{step:06d}"))
        assert {v for t in trajectories for v in t.policy_versions} == {step}


def test_evaluation_does_not_change_training(policy, shaped_env, tmp_path):
    for name, every in (("plain", 0), ("measured", 1)):
        config = config_of(policy, f"eval.every={every}", env=shaped_env, steps=3)
        train(config, run_dir=tmp_path / name)
    played = [
        [t.token_ids for step in (1, 2, 3) for t in RunDir(tmp_path / name).read_trajectories(step)]
        for name in ("plain", "measured")
    ]
    assert played[0] == played[1]


def test_resumed_run_keeps_the_evaluation_of_step_0(policy, tmp_path):
    train(config_of(policy, steps=1), run_dir=tmp_path / "run")
    before = RunDir(tmp_path / "run").read_evaluations()[0]
    summary = train(config_of(policy, steps=2), run_dir=tmp_path / "run", mode="resume")
    found = RunDir(tmp_path / "run").read_evaluations()
    assert [row["step"] for row in found] == [0, 1, 2]
    assert found[0] == before
    assert summary["heldout_before"] == before["sampled"]["pass@1"]


def test_runs_can_begin_without_an_evaluation(policy, tmp_path):
    display = Lines()
    config = config_of(policy, "eval.at_start=false", steps=1)
    summary = train(config, run_dir=tmp_path / "run", display=display)
    assert "heldout_before" not in summary
    assert [row["step"] for row in RunDir(tmp_path / "run").read_evaluations()] == [1]
    shown = "\n".join(display.lines)
    assert f"held-out, sampled{'-':>11}{summary['heldout_after']:>8.3f}" in shown
    assert "nothing was learned" not in shown
    longer = config_of(policy, "eval.at_start=false", "eval.every=2", steps=3)
    train(longer, run_dir=tmp_path / "run", mode="resume")
    assert [row["step"] for row in RunDir(tmp_path / "run").read_evaluations()] == [1, 2, 3]


def test_checkpoint_of_another_model_is_not_resumed(policy, tiny_policy, tmp_path):
    train(config_of(policy, steps=1), run_dir=tmp_path / "run")
    settings = (tmp_path / "run" / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=f"started with the policy [0-9a-f]+, and {tiny_policy}"):
        train(config_of(tiny_policy, steps=2), run_dir=tmp_path / "run", mode="resume")
    assert (tmp_path / "run" / "config.yaml").read_text() == settings
    summary = train(config_of(policy, steps=2), run_dir=tmp_path / "run", mode="resume")
    assert summary["num_steps"] == 2


@pytest.mark.parametrize("setting", ["rollout.top_p=0.9", "rollout.top_k=5"])
def test_truncated_sampling_is_refused_with_the_reason(policy, tmp_path, setting):
    with pytest.raises(ConfigError, match="importance ratio would be wrong"):
        train(config_of(policy, setting), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_run_directory_in_use_is_refused(policy, tmp_path):
    train(config_of(policy, steps=1), run_dir=tmp_path / "run")
    with pytest.raises(RunExistsError):
        train(config_of(policy, steps=1), run_dir=tmp_path / "run")


def test_evaluation_of_a_checkpoint(policy, tmp_path):
    settings = ("eval.num_tasks=6", "eval.num_samples=4")
    report = evaluate(config_of(policy, *settings, env="math"), out=tmp_path / "out")
    assert report.num_tasks == 6
    assert {1, 4} <= set(report.pass_at_k)
    assert report.pass_at_1.mean <= report.pass_at_k[4].mean
    assert len(list(RunDir(tmp_path / "out").read_trajectories("eval"))) == 24
    assert "pass@4" in report.to_text()


def test_missing_checkpoint_is_refused_before_start(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        train(config_of(tmp_path / "nowhere"), run_dir=tmp_path / "run")


def test_wrong_environment_arguments_are_named(policy, tmp_path):
    with pytest.raises(ConfigError, match="colour"):
        train(config_of(policy, "env.kwargs.colour=red"), run_dir=tmp_path / "run")


def test_environment_without_tasks_is_refused(policy, tmp_path):
    file = tmp_path / "empty.jsonl"
    file.write_text("")
    with pytest.raises((NothingToDoError, ConfigError, ValueError)):
        train(config_of(policy, f"env.kwargs.tasks={file}", env="math"), run_dir=tmp_path / "run")


def test_two_sigterms_lose_nothing_and_the_run_resumes(policy, tmp_path):
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "areal_gym", "train", "--env", "math", "--out", str(run_dir)]
    settings = [f"engine.model={policy}", *SMALL]
    process = subprocess.Popen(
        [*command, "--steps", "100000", *settings],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline_s = time.monotonic() + 60
    while len(RunDir(run_dir).read_metrics()) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)  # in the same moment: no impatience, a wrapper's echo
    _, talk = process.communicate(timeout=60)
    assert process.returncode == 130, talk
    assert "--resume" in talk
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert step >= 2
    done = subprocess.run(
        [*command, "--resume", f"steps={step + 1}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert RunDir(run_dir).read_metrics()[-1]["step"] == step + 1
