"""Whole runs with other objectives than a reward: what is learned, saved, resumed, refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import transformers

from areal_gym.config import load_config
from areal_gym.errors import ConfigError, DataError, NothingToDoError, UsageError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint, save_checkpoint
from areal_gym.models.tiny.decoder import build_decoder
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.replay import replay
from areal_gym.runs.run_display import Display
from areal_gym.runs.train import train
from areal_gym.trainer.objectives import reward_model
from areal_gym.trainer.parallel.rank_group import ALONE
from areal_gym.trainer.states import StateFiles, saved_tensors

TEXTS = ["red", "blue", "green", "white"]


def dialogues(num=60):
    """Say the colour that was named."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"Say {TEXTS[i % 4]} {i}."},
                {"role": "assistant", "content": TEXTS[i % 4]},
            ]
        }
        for i in range(num)
    ]


def preferences(num=60):
    """The colour that was named is better than the next one."""
    return [
        {
            "prompt": f"Say {TEXTS[i % 4]} {i}.",
            "chosen": TEXTS[i % 4],
            "rejected": TEXTS[(i + 1) % 4],
        }
        for i in range(num)
    ]


def file_of(directory, rows):
    file = directory / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def config_of(policy, objective, *overrides, steps=30):
    return load_config(
        overrides=[
            f"engine.model={policy}",
            f"objective={objective}",
            f"steps={steps}",
            "engine.max_context=256",
            "data.batch_size=16",
            "trainer.lr=3e-3",
            "trainer.warmup_steps=3",
            "eval.num_tasks=16",
            "data.num_examples=48",
            *overrides,
        ]
    )


def run_of(policy, objective, tmp_path, *overrides, **kwargs):
    rows = dialogues() if objective == "sft" else preferences()
    file = file_of(tmp_path, rows)
    config = config_of(policy, objective, f"data.file={file}", *overrides, **kwargs)
    return train(config, run_dir=tmp_path / "run"), RunDir(tmp_path / "run")


def test_first_evaluation_can_be_left_out(tiny_policy, tmp_path):
    summary, run = run_of(tiny_policy, "sft", tmp_path, "eval.at_start=false", "steps=1")
    assert [row["step"] for row in run.read_evaluations()] == [1]
    assert "heldout_before" not in summary
    assert summary["heldout_loss_after"] > 0


@pytest.mark.parametrize(
    ("objective", "overrides"),
    [
        ("sft", ()),
        ("dpo", ()),
        ("dpo", ("dpo.kind=ipo",)),
        ("kto", ()),
        ("orpo", ()),
        ("rm", ()),
        ("sft", ("trainer.lora.rank=8", "trainer.lr=2e-2")),
        ("dpo", ("trainer.lora.rank=8",)),
        ("rm", ("trainer.lora.rank=8",)),
    ],
    ids=["sft", "dpo", "ipo", "kto", "orpo", "rm", "sft-lora", "dpo-lora", "rm-lora"],
)
def test_objective_run_learns_and_writes_a_complete_directory(
    tiny_policy, tmp_path, objective, overrides
):
    summary, run = run_of(tiny_policy, objective, tmp_path, *overrides)
    assert run.read_summary() == summary
    # Beside an adapter the random vectors of the vocabulary stay: imitation has little room.
    most = 0.95 if objective == "sft" and overrides else 0.8
    assert summary["heldout_loss_after"] < most * summary["heldout_loss_before"]
    assert summary["heldout_after"] > summary["heldout_before"]
    # A pair gives objective kto two labelled answers.
    assert summary["num_heldout_examples"] == (12 if objective == "kto" else 6)
    assert [row["step"] for row in run.read_metrics()] == list(range(1, 31))
    assert [row["step"] for row in run.read_evaluations()] == [0, 30]
    assert run.learning_curve_file.read_bytes().startswith(b"\x89PNG")
    checkpoint = run.path / summary["checkpoint"]
    if objective == "rm":
        transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint)
        grade = reward_model.load(checkpoint)
        ask = {"role": "user", "content": "Say red 4."}
        right, wrong = (
            grade([ask, {"role": "assistant", "content": text}]) for text in ("red", "blue")
        )
        assert right > wrong
    else:
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert load_config(run.config_file).objective == objective


def test_run_with_generated_demonstrations(tiny_policy, tmp_path):
    for objective in ("sft", "dpo", "rm"):
        config = config_of(tiny_policy, objective, "env.id=math", steps=4)
        summary = train(config, run_dir=tmp_path / objective)
        assert summary["num_heldout_examples"] == 16
        assert summary["heldout_loss_after"] < summary["heldout_loss_before"]


def test_run_with_successful_demonstrations_only(tiny_policy, tmp_path):
    config = config_of(tiny_policy, "sft", "env.id=math", "data.min_reward=1", steps=1)
    assert train(config, run_dir=tmp_path / "run")["num_steps"] == 1
    config = config_of(tiny_policy, "sft", "env.id=math", "data.min_reward=2", steps=1)
    with pytest.raises(NothingToDoError, match=r"data\.min_reward = 2"):
        train(config, run_dir=tmp_path / "other")


def states_in(directory):
    states = {
        name: torch.empty(found.size, dtype=found.properties.dtype)
        for name, found in saved_tensors(directory).items()
    }
    StateFiles(ALONE).load(states, directory)
    return states


@pytest.mark.parametrize(
    "overrides",
    [(), pytest.param(("trainer.lora.rank=2",), marks=pytest.mark.long)],
    ids=["all", "lora"],
)
def test_resumed_objective_run_equals_the_uninterrupted_one(tiny_policy, tmp_path, overrides):
    for objective in ("sft", "dpo", "rm"):
        rows = dialogues() if objective == "sft" else preferences()
        file = file_of(tmp_path, rows)
        whole, parts = tmp_path / f"{objective}-whole", tmp_path / f"{objective}-parts"
        settings = (f"data.file={file}", "trainer.save_every=3", *overrides)
        train(config_of(tiny_policy, objective, *settings, steps=7), run_dir=whole)
        train(config_of(tiny_policy, objective, *settings, steps=3), run_dir=parts)
        train(config_of(tiny_policy, objective, *settings, steps=7), run_dir=parts, mode="resume")
        ours, theirs = (
            states_in(run / "checkpoints/step-000007/trainer") for run in (whole, parts)
        )
        assert ours["num_steps"] == 7
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        weights = [
            (run / "checkpoints/step-000007/model.safetensors").read_bytes()
            for run in (whole, parts)
        ]
        assert weights[0] == weights[1]
        assert [row["step"] for row in RunDir(parts).read_metrics()] == list(range(1, 8))


def test_too_long_examples_are_reported_and_skipped(tiny_policy, tmp_path):
    said = []

    class Notes(Display):
        def say(self, text):
            said.append(text)

    long = {"role": "assistant", "content": "x" * 400}
    rows = [*dialogues(), *({"messages": [{"role": "user", "content": "?"}, long]},) * 20]
    config = config_of(tiny_policy, "sft", f"data.file={file_of(tmp_path, rows)}", steps=1)
    train(config, run_dir=tmp_path / "run", display=Notes())
    (note,) = [text for text in said if "to learn from are left out" in text]
    assert "longer than engine.max_context = 256 tokens" in note
    config = config_of(tiny_policy, "sft", f"data.file={file_of(tmp_path, rows[-20:])}", steps=1)
    with pytest.raises(NothingToDoError, match="no example to learn from"):
        train(config, run_dir=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_invalid_data_files_are_named(tiny_policy, tmp_path):
    rows = [*dialogues(3), {"messages": [{"role": "user", "content": "?"}]}]
    config = config_of(tiny_policy, "sft", f"data.file={file_of(tmp_path, rows)}")
    with pytest.raises(DataError, match=r"data\.jsonl, line 4: the assistant says nothing"):
        train(config, run_dir=tmp_path / "run")
    config = config_of(tiny_policy, "dpo", f"data.file={file_of(tmp_path, dialogues(3))}")
    with pytest.raises(DataError, match="line 1: no field 'chosen'"):
        train(config, run_dir=tmp_path / "run")
    config = config_of(tiny_policy, "sft", f"data.file={file_of(tmp_path, dialogues(1))}")
    with pytest.raises(NothingToDoError, match="to measure on"):
        train(config, run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["objective=sftt"], "no objective 'sftt': did you mean 'sft'"),
        (["objective=distill"], "needs one teacher"),
        (["objective=distill", "teacher.model=x", "teacher.url=http://y"], "needs one teacher"),
        (["objective=distill", "teacher.model=x", "rollout.temperature=0.7"], "temperature 1"),
        (["teacher.model=x"], "objective=distill only"),
        (["trainer.advantage=distill"], "objective=distill only"),
        (["objective=dpo", "data.min_reward=1"], "data.min_reward"),
        (["objective=dpo", "dpo.beta=0"], "dpo.beta"),
        (["objective=dpo", "dpo.kind=apo"], "dpo.kind"),
    ],
)
def test_conflicting_objective_settings_are_refused(overrides, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load_config(overrides=overrides)


@pytest.mark.parametrize(
    "objective", ["sft", *(pytest.param(each, marks=pytest.mark.long) for each in ("dpo", "rm"))]
)
def test_two_ranks_train_what_one_rank_trains(tiny_policy, tmp_path, objective):
    rows = {}
    for num_ranks in (1, 2):
        home = tmp_path / str(num_ranks)
        home.mkdir()
        settings = (f"trainer.num_ranks={num_ranks}", "trainer.tokens_per_microbatch=256")
        _, found = run_of(tiny_policy, objective, home, *settings, "eval.every=2", steps=3)
        rows[num_ranks] = (found.read_metrics(), found.read_evaluations())
    for ours, theirs in zip(rows[1][0], rows[2][0], strict=True):
        for name in ("train/loss", "train/grad_norm", "train/accuracy", "train/tokens"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-3, abs=1e-5), name
    for ours, theirs in zip(rows[1][1], rows[2][1], strict=True):
        assert theirs["heldout"] == pytest.approx(ours["heldout"], rel=1e-3, abs=1e-4)


def distillation_of(student, teacher, *overrides, steps=3):
    return load_config(
        overrides=[
            "objective=distill",
            f"engine.model={student}",
            f"teacher.model={teacher}",
            f"steps={steps}",
            *("env.id=math", "engine.max_context=256", "rollout.max_new_tokens=8"),
            *("rollout.batch_groups=4", "rollout.group_size=2", "eval.num_tasks=4"),
            *("trainer.lr=3e-3", *overrides),
        ]
    )


@pytest.fixture
def teacher(tiny_policy, tmp_path):
    """Of the same kind, with other weights."""
    decoder = build_decoder(load_checkpoint(tiny_policy).config, seed=9)
    return save_checkpoint(decoder, tmp_path / "teacher", tokenizer_dir=tiny_policy)


def test_distillation_run_is_replayed_without_the_teacher(tiny_policy, teacher, tmp_path):
    config = distillation_of(tiny_policy, teacher, steps=8)
    summary = train(config, run_dir=tmp_path / "run")
    run = RunDir(tmp_path / "run")
    rows = run.read_metrics()
    assert summary["objective"] == "distill"
    assert rows[-1]["train/kl_teacher"] < rows[0]["train/kl_teacher"]
    assert rows[-1]["reward/mean"] >= 0
    for span in next(run.read_trajectories(1)).spans:
        assert (span.teacher_logprobs is not None) == (span.origin == "policy")
    (teacher / "model.safetensors").unlink()
    assert replay(load_config(run.config_file), run.path).is_identical


def test_server_as_teacher(tiny_policy, teacher, tmp_path):
    command = [sys.executable, "-m", "areal_gym.engines.sglang.fake", "--model-path", str(teacher)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([*command, "--port", str(port), "--context-length", "256"])
    try:
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        # The server keeps a few tokens of its context for itself.
        fits, url = "engine.max_context=240", f"teacher.url=http://127.0.0.1:{port}"
        here = distillation_of(tiny_policy, teacher, fits, steps=1)
        there = distillation_of(tiny_policy, "null", url, fits, steps=1)
        for name, config in (("here", here), ("there", there)):
            train(config, run_dir=tmp_path / name)
    finally:
        server.terminate()
        server.wait(30)
    ours, theirs = (RunDir(tmp_path / name).read_metrics()[0] for name in ("here", "there"))
    assert ours["train/kl_teacher"] == pytest.approx(theirs["train/kl_teacher"], abs=1e-4)


def test_run_directory_as_teacher(tiny_policy, tmp_path):
    run_of(tiny_policy, "sft", tmp_path, steps=2)
    train(distillation_of(tiny_policy, tmp_path / "run", steps=1), run_dir=tmp_path / "student")


def test_invalid_teachers_are_refused(tiny_policy, teacher, tmp_path):
    with pytest.raises(ConfigError, match="neither a checkpoint's directory nor a run's"):
        train(distillation_of(tiny_policy, tmp_path / "nowhere"), run_dir=tmp_path / "run")
    facts = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = facts["model"]["vocab"]
    one, other = list(vocabulary)[100:102]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (teacher / "tokenizer.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match="another vocabulary"):
        train(distillation_of(tiny_policy, teacher), run_dir=tmp_path / "run")


def test_replay_of_other_objectives_is_refused(tiny_policy, tmp_path):
    run_of(tiny_policy, "sft", tmp_path, steps=1)
    with pytest.raises(UsageError, match="no episodes"):
        replay(load_config(tmp_path / "run/config.yaml"), tmp_path / "run")


def cli(*argv, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "areal_gym", *argv],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        **kwargs,
    )


@pytest.mark.slow
def test_objective_runs_from_the_command_line(tiny_policy, tmp_path):
    file = file_of(tmp_path, preferences())
    settings = [f"engine.model={tiny_policy}", f"data.file={file}", "engine.max_context=256"]
    dry = cli("train", "--objective", "dpo", "--dry-run", *settings)
    assert dry.returncode == 0, dry.stderr
    assert "prefer the chosen to the rejected dialogue" in dry.stdout
    assert "objective: dpo" in dry.stdout
    done = cli(
        *("train", "--objective", "dpo", "--out", "run", "--steps", "2", *settings), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "held-out at step 0: loss 0.693  accuracy 0.500" in done.stderr
    assert "step 2/2  accuracy" in done.stderr
    assert done.stdout == ""
    wrong = cli("train", "--objective", "dpoo", *settings, cwd=tmp_path)
    assert wrong.returncode == 2
    assert "did you mean 'dpo'" in wrong.stderr
    nothing = cli("train", "--objective", "sft", f"engine.model={tiny_policy}")
    assert nothing.returncode == 2
    assert "which environment?" in nothing.stderr


@pytest.mark.long
@pytest.mark.slow
def test_ctrl_c_saves_an_objective_run(tiny_policy, tmp_path):
    file = file_of(tmp_path, dialogues())
    run = tmp_path / "run"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "areal_gym", "train", "--objective", "sft", "--out", str(run)),
            *("--steps", "100000", f"engine.model={tiny_policy}", f"data.file={file}"),
            "engine.max_context=256",
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline_s = time.monotonic() + 120
    while len(RunDir(run).read_metrics()) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, talk = process.communicate(timeout=120)
    assert process.returncode == 130, talk
    assert "--resume" in talk
    (checkpoint,) = (run / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert step == RunDir(run).read_metrics()[-1]["step"]
    done = cli("train", "--resume", "--out", str(run), f"steps={step + 1}")
    assert done.returncode == 0, done.stderr
    assert RunDir(run).read_metrics()[-1]["step"] == step + 1
