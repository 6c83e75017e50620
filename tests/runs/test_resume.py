"""Resuming, refusing and failing: what is changed, what is said, and what is left as it was."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_gym.cli.app import run as command_line
from areal_gym.config import load_config
from areal_gym.errors import (
    ConfigError,
    DataError,
    EngineError,
    GymError,
    RunExistsError,
    UsageError,
)
from areal_gym.rollout.journal import Journal
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.run_dir.run_status import StatusFile, StatusRecord
from areal_gym.runs.resume import NEVER, SILENT, changed_settings, require_resumable
from areal_gym.runs.train import train
from tests._support.display_lines import Lines
from tests.run_dir.test_untrusted_runs import SMALL, tree_of


def config_of(policy, *overrides, steps=1):
    return load_config(
        overrides=[f"engine.model={policy}", "env.id=tir", f"steps={steps}", *SMALL, *overrides]
    )


@pytest.fixture(scope="module")
def one_step(tiny_policy, tmp_path_factory):
    path = tmp_path_factory.mktemp("resume") / "run"
    train(config_of(tiny_policy), run_dir=path)
    return path


@pytest.fixture
def run(one_step, tmp_path):
    shutil.copytree(one_step, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def spoil(path, text="spoilt"):
    path.write_text(text)


REFUSALS = {
    "another seed": ("resume", ["seed=7"], lambda run: None),
    "another objective": ("resume", ["objective=sft"], lambda run: None),
    "arguments that do not fit": ("resume", ["env.kwargs.colour=red"], lambda run: None),
    "no such policy": ("resume", ["engine.model=/nowhere"], lambda run: None),
    "no steps left": ("resume", ["steps=1"], lambda run: None),
    "another optimizer": ("resume", ["trainer.optimizer=muon"], lambda run: None),
    "another model": ("resume", ["trainer.lora.rank=4"], lambda run: None),
    "weights too far apart": ("resume", ["engine.max_logprob_gap=1e-30"], lambda run: None),
    "a damaged index": (
        "resume",
        [],
        lambda run: spoil(run / "checkpoints/step-000001/trainer/.metadata"),
    ),
    "damaged counters": (
        "resume",
        [],
        lambda run: spoil(run / "checkpoints/step-000001/trainer.json"),
    ),
    "damaged weights": (
        "resume",
        [],
        lambda run: spoil(run / "checkpoints/step-000001/model.safetensors"),
    ),
    "replaced by what does not fit": ("clean", ["env.kwargs.colour=red"], lambda run: None),
    "replaced by no policy": ("clean", ["engine.model=/nowhere"], lambda run: None),
    "replaced by what disagrees": (
        "clean",
        ["engine.max_logprob_gap=1e-30"],
        lambda run: None,
    ),
    "a taken directory": ("new", [], lambda run: None),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_resume_changes_no_file(run, tiny_policy, case):
    mode, overrides, damage = REFUSALS[case]
    spoil(run / ".metrics.jsonl.1.tmp")
    damage(run)
    before = tree_of(run)
    with pytest.raises(GymError):
        train(
            config_of(tiny_policy, *overrides, steps=2)
            if case != "no steps left"
            else config_of(tiny_policy),
            run_dir=run,
            mode=mode,
        )
    assert tree_of(run) == before


@pytest.mark.parametrize("mode", ["resume", "clean"])
def test_refused_run_creates_no_directory(tiny_policy, tmp_path, mode):
    with pytest.raises(UsageError):
        train(
            config_of(tiny_policy, "env.kwargs.colour=red"),
            run_dir=tmp_path / "a" / "b" / "c",
            mode=mode,
        )
    assert list(tmp_path.iterdir()) == []


def test_directory_without_run_is_not_changed(tiny_policy, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".mine.tmp").write_text("mine")
    before = tree_of(tmp_path)
    for mode in ("new", "clean", "resume"):
        with pytest.raises(UsageError):
            train(config_of(tiny_policy), run_dir=tmp_path, mode=mode)
    assert tree_of(tmp_path) == before


def test_replaced_run_keeps_no_old_files(run, tiny_policy):
    (run / "metrics.jsonl.torn").write_text("old")
    train(config_of(tiny_policy), run_dir=run, mode="clean")
    assert not (run / "metrics.jsonl.torn").exists()
    assert [row["step"] for row in RunDir(run).read_metrics()] == [1]


def test_run_without_checkpoint_resumes_at_step_0(tiny_policy, tmp_path):
    path = tmp_path / "run"
    early = EngineError("gone before the first checkpoint")
    with pytest.raises(EngineError):
        train(config_of(tiny_policy, steps=2), run_dir=path, callbacks=failing(early))
    shutil.rmtree(path / "checkpoints")
    train(config_of(tiny_policy, steps=2), run_dir=path, mode="resume")
    directory = RunDir(path)
    assert [row["step"] for row in directory.read_metrics()] == [1, 2]
    assert directory.read_status().steps == 2
    assert len({row["step"] for row in directory.read_evaluations()}) == 2


# ---- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.group_size=4", "rollout.group_size 2 -> 4"),
        ("trainer.lr=0.5", "trainer.lr 0.0003 -> 0.5"),
        ("env.kwargs.level=1", "env.kwargs"),
        ("rollout.temperature=0.5", "rollout.temperature 1.0 -> 0.5"),
        ("agent.kwargs.x=1", "agent.kwargs"),
    ],
)
def test_changed_settings_are_reported(run, tiny_policy, override, words):
    (remark,) = require_resumable(RunDir(run), config_of(tiny_policy, override))
    assert words in remark


@pytest.mark.parametrize("override", ["seed=7", "deterministic=true", "objective=sft"])
def test_incompatible_settings_are_refused(run, tiny_policy, override):
    with pytest.raises(ConfigError, match="another run") as refused:
        require_resumable(RunDir(run), config_of(tiny_policy, override))
    assert any(override.partition("=")[0] in hint for hint in refused.value.hints)


def test_speed_and_length_settings_change_silently(run, tiny_policy):
    overrides = ("trainer.num_threads=2", "engine.num_slots=2", "trainer.save_every=3")
    assert require_resumable(RunDir(run), config_of(tiny_policy, *overrides, steps=9)) == []


def test_every_listed_setting_exists(tiny_policy):
    keys = set(changed_settings(config_of(tiny_policy), config_of(tiny_policy)))
    assert keys == set()
    tree = config_of(tiny_policy).model_dump()
    for name in (*SILENT, *NEVER):
        node = tree
        for part in name.split("."):
            assert part in node, name
            node = node[part]


# ---- torn ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "torn", [b'{"step": 2, "rew', b"\0" * 64, b"\0\0\n\xff\xfe\n", b'not json\n{"a": 1', b"[]\n7\n"]
)
def test_torn_last_line_is_cut_reported_and_kept_aside(run, tiny_policy, torn):
    for name in ("metrics.jsonl", "evaluations.jsonl", "journal.jsonl"):
        with (run / name).open("ab") as stream:
            stream.write(torn)
    (run / "summary.json").unlink()
    assert [row["step"] for row in RunDir(run).read_metrics()] == [1]
    heard = Lines()
    train(config_of(tiny_policy, steps=2), run_dir=run, mode="resume", display=heard)
    assert [row["step"] for row in RunDir(run).read_metrics()] == [1, 2]
    for name in ("metrics.jsonl", "evaluations.jsonl", "journal.jsonl"):
        assert (run / f"{name}.torn").read_bytes() == torn
        assert any(line.startswith(name) and "torn" in line for line in heard.lines)


def test_broken_line_in_the_middle_is_refused(run):
    file = run / "metrics.jsonl"
    raw = b"not json\n" + file.read_bytes()
    file.write_bytes(raw)
    with RunDir.open(run, "resume") as directory, pytest.raises(DataError, match="line 1"):
        directory.read_metrics()
    assert file.read_bytes() == raw


def test_damaged_journal_is_truncated(tmp_path):
    for row in ({"event": "scored"}, {"event": "scored", "group": 1, "packed": 7}, {"group": []}):
        file = tmp_path / "journal.jsonl"
        file.write_text('{"event": "issued", "group": 1, "options": {}}\n' + json.dumps(row) + "\n")
        with Journal(file) as journal:
            assert list(journal.take_known()) == [1]
            assert journal.num_torn == len(json.dumps(row)) + 1


# ---- status -------------------------------------------------------------------------------------


def status_of(run: Path) -> dict:
    return json.loads((run / "status.json").read_text())


def test_status_of_a_finished_run(run):
    assert status_of(run)["state"] == "finished"
    assert status_of(run)["step"] == status_of(run)["steps"] == 1
    assert RunDir(run).status == "finished"


def failing(error):
    from areal_gym.runs.callbacks import Callback

    class Failing(Callback):
        def on_step(self, step, metrics, groups):
            raise error

    return [Failing()]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (EngineError("the engine is gone", hints=["start it again"]), "failed"),
        (ZeroDivisionError("one of ours"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_status_gives_the_reason_of_an_early_end(tiny_policy, tmp_path, error, state, capsys):
    path = tmp_path / "runs" / "run"
    with pytest.raises(type(error)):
        train(config_of(tiny_policy, steps=3), run_dir=path, callbacks=failing(error))
    assert RunDir(path).status == state
    told = status_of(path)
    assert (told["state"], told["step"], told["steps"]) == (state, 1, 3)
    assert command_line(["list", "runs", "--root", str(path.parent)]) == 0
    assert state in capsys.readouterr().out
    assert command_line(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "--resume" in shown
    if state == "failed":
        assert str(error) in shown
        assert str(error) in told["error"]
    assert all(hint in told["hints"] for hint in getattr(error, "hints", ()))


_KILLED = """
import os, signal, sys
from areal_gym.run_dir.run_dir import RunDir
from pathlib import Path
with RunDir.open(Path(sys.argv[1])) as run:
    run.save_config("env: {id: tir}")
    run.report_start(step=0, steps=9)
    run.append_metrics({"step": 4})
    print("written", flush=True)
    sys.stdin.read()
"""


def test_status_of_a_killed_run(tmp_path, capsys):
    path = tmp_path / "runs" / "run"
    child = subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout.readline() == "written\n"
        assert RunDir(path).status == "running"
        child.send_signal(signal.SIGKILL)
        child.wait(60)
    assert RunDir(path).status == "died"
    assert command_line(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "died" in shown
    assert "--resume" in shown
    assert str(child.pid) in shown


def test_reused_pid_is_not_the_run(tmp_path):
    record = StatusRecord(state="running")
    assert record.current_state == "running"
    again = StatusRecord(state="running", process_start=(record.process_start or 0) + 1)
    assert again.current_state == "died"
    assert StatusRecord(state="running", boot_id="another").current_state == "died"


def test_status_of_another_machine_expires():
    now = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
    there = StatusRecord(state="running", host="elsewhere", boot_id="x", updated_at=now)
    assert there.current_state == "running"
    for silent in ("2001-01-01T00:00:00+00:00", "nonsense"):
        record = StatusRecord(state="running", host="elsewhere", boot_id="x", updated_at=silent)
        assert record.current_state == "died"


@pytest.mark.parametrize("text", ["", "[]", '{"state": "gold"}', '{"state": {}}', "\x80"])
def test_damaged_status_file_is_ignored(tmp_path, text):
    (tmp_path / "status.json").write_bytes(text.encode("latin-1"))
    assert StatusFile(tmp_path / "status.json").read() is None


def test_run_without_status_file_counts_as_stopped(run):
    (run / "status.json").unlink()
    (run / "summary.json").unlink()
    assert RunDir(run).status == "stopped"


def test_existing_run_is_refused_by_name(run, tiny_policy):
    with pytest.raises(RunExistsError, match="1 steps"):
        train(config_of(tiny_policy), run_dir=run)
