"""The on-disk contract of a run: whole files, torn lines, full disks, two writers."""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_gym.errors import (
    DataError,
    InfrastructureError,
    RunExistsError,
    TrainError,
    UsageError,
)
from areal_gym.images import ImageStore
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.run_dir.run_list import new_run_path, run_info, run_paths
from areal_gym.types import FinishReason, Task, TokenSpan, Trajectory, Turn
from areal_gym.utils.files import write_atomic
from tests._support.tiny_vision import picture

CONFIG = "env:\n  id: tir\n"


def trajectory(id="t1", text="caf\u00e9 \ud83d\ude00"):
    return Trajectory(
        id=id,
        group_id="g",
        task=Task(id="gen/1", data={"question": text, "parts": [1, {"a": 2}]}),
        env_id="tir",
        spans=(
            TokenSpan(origin="prompt", token_ids=(1, 2)),
            TokenSpan(origin="policy", token_ids=(3, 4), logprobs=(-0.5, -1e-30), policy_version=7),
        ),
        turns=(Turn(finish_reason=FinishReason.STOP, reward=1.0, reward_parts={"answer": 1.0}),),
        messages=({"role": "user", "content": text},),
        seed=11,
    )


@contextmanager
def small_files(num_bytes):
    """Let the kernel refuse files beyond a size: the nearest thing to a full disk without root."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def run(tmp_path):
    with RunDir.open(tmp_path / "runs" / "one") as run:
        run.save_config(CONFIG)
        yield run


def test_run_is_written_and_read_back(run):
    run.append_metrics({"step": 1, "reward/mean": 0.25})
    run.append_metrics({"step": 2, "reward/mean": 0.5})
    run.save_trajectories([trajectory("a"), trajectory("b")], name=12)
    run.save_provenance([{"id": "tir", "distribution": "areal-gym"}], "0123abcd")
    assert not run.is_finished
    assert run.read_summary() is None
    run.save_summary({"heldout_after": 0.9})
    run.append_log("done")
    assert [row["step"] for row in run.read_metrics()] == [1, 2]
    assert list(run.read_trajectories(12)) == [trajectory("a"), trajectory("b")]
    assert (run.trajectories_dir / "step-000012.jsonl").exists()
    assert run.is_finished
    assert run.read_summary() == {"heldout_after": 0.9}
    facts = json.loads(run.plugins_file.read_text())
    assert facts["used"][0]["distribution"] == "areal-gym"
    assert facts["python"]
    assert run.log_file.read_text().endswith("done\n")


@given(text=st.text(), logprob=st.floats(allow_nan=False, allow_infinity=False))
def test_trajectories_with_any_text_round_trip(tmp_path_factory, text, logprob):
    run = RunDir(tmp_path_factory.mktemp("run"))
    span = TokenSpan(origin="policy", token_ids=(1,), logprobs=(logprob,), policy_version=0)
    made = Trajectory(
        id="x", group_id="g", task=Task(id="t", data={"q": text}), env_id="e", spans=(span,)
    )
    run.save_trajectories([made], name="eval-0")
    assert list(run.read_trajectories("eval-0")) == [made]


def test_lone_surrogates_round_trip(run):
    made = trajectory(text="\ud800")
    run.save_trajectories([made], name=1)
    assert next(run.read_trajectories(1)).messages == made.messages


def test_nonfinite_numbers_are_written_as_null(run):
    run.append_metrics({"step": 1, "a": math.nan, "b": math.inf, "c": np.float32(0.5)})
    assert run.read_metrics() == [{"step": 1, "a": None, "b": None, "c": 0.5}]
    assert "NaN" not in run.metrics_file.read_text()


def test_existing_run_is_refused_with_three_choices(run):
    run.append_metrics({"step": 1})
    run.close()
    with pytest.raises(RunExistsError) as caught:
        RunDir.open(run.path)
    text = "\n".join((str(caught.value), *caught.value.hints))
    assert "1 steps" in text
    for choice in ("--resume", "--clean", "--out"):
        assert choice in text
    assert caught.value.exit_code == 2


def test_clean_replaces_only_the_run(run):
    (run.path / "notes.md").write_text("mine")
    run.append_metrics({"step": 1})
    run.save_trajectories([trajectory()], name=1)
    run.close()
    with RunDir.open(run.path, "clean") as again:
        assert again.read_metrics() == []
        assert not again.trajectories_dir.exists()
    assert (run.path / "notes.md").read_text() == "mine"


@pytest.mark.parametrize("mode", ["new", "clean"])
def test_directory_without_run_is_left_alone(tmp_path, mode):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(UsageError, match="is not a run directory"):
        RunDir.open(tmp_path, mode)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_resume_without_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="nothing to resume"):
        RunDir.open(tmp_path / "none", "resume")
    assert not (tmp_path / "none").exists()


def test_empty_claimed_directory_is_removed(tmp_path):
    RunDir.open(tmp_path / "empty").close()
    assert not (tmp_path / "empty").exists()


def test_failed_open_leaves_no_run(tmp_path):
    path = tmp_path / "run"

    def fail(error, mode="new"):
        with RunDir.open(path, mode) as run:
            run.save_config(CONFIG)
            raise error

    with pytest.raises(UsageError):
        fail(UsageError("no such model"))
    assert not path.exists()
    with pytest.raises(TrainError):
        fail(TrainError("not finite"))
    assert (path / "config.yaml").exists()
    with pytest.raises(UsageError):
        fail(UsageError("no such model"), "resume")
    assert (path / "config.yaml").exists()


def test_two_writers_are_refused(run):
    code = (
        "import sys; from pathlib import Path; from areal_gym.run_dir.run_dir import RunDir\n"
        "RunDir.open(Path(sys.argv[1]), 'resume')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, check=False
    )
    assert "another process is writing" in done.stderr
    run.close()
    RunDir.open(run.path, "resume").close()


def test_torn_line_is_ignored_and_later_cut(run):
    run.append_metrics({"step": 1})
    with run.metrics_file.open("a") as file:
        file.write('{"step": 2, "rew')
    assert run.read_metrics() == [{"step": 1}]
    run.close()
    with RunDir.open(run.path, "resume") as again:
        again.append_metrics({"step": 2})
        assert again.read_metrics() == [{"step": 1}, {"step": 2}]


@given(cut=st.integers(min_value=0, max_value=60))
def test_whole_lines_survive_a_crash_at_any_byte(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("run")
    run = RunDir(path)
    run.save_config(CONFIG)
    for step in range(1, 5):
        run.append_metrics({"step": step})
    raw = run.metrics_file.read_bytes()[:cut]
    run.metrics_file.write_bytes(raw)
    with RunDir.open(path, "resume") as again:
        num_whole = raw.count(b"\n")
        assert [row["step"] for row in again.read_metrics()] == list(range(1, num_whole + 1))
        again.append_metrics({"step": 9})
        assert again.read_metrics()[-1] == {"step": 9}


def test_broken_line_is_named(run):
    run.append_metrics({"step": 1})
    with run.metrics_file.open("a") as file:
        file.write("not json\n")
    run.append_metrics({"step": 3})
    with pytest.raises(DataError, match="line 2"):
        run.read_metrics()


def test_rewind_drops_steps_after_the_checkpoint(run):
    for step in (1, 2, 3):
        run.append_metrics({"step": step})
        run.save_trajectories([trajectory()], name=step)
        (run.checkpoints_dir / f"step-{step:06d}").mkdir(parents=True)
    run.save_trajectories([trajectory()], name="eval-000000")
    run.save_summary({})
    run.rewind(2)
    assert [row["step"] for row in run.read_metrics()] == [1, 2]
    left = sorted(file.name for file in run.trajectories_dir.iterdir())
    assert left == ["eval-000000.jsonl", "step-000001.jsonl", "step-000002.jsonl"]
    checkpoints = sorted(folder.name for folder in run.checkpoints_dir.iterdir())
    assert checkpoints == ["step-000001", "step-000002"]
    assert not run.is_finished


def test_full_disk_keeps_the_old_file(run):
    run.save_summary({"old": True})
    with small_files(20_000), pytest.raises(TrainError, match="disk is full") as caught:
        run.save_summary({"new": "x" * 100_000})
    assert run.read_summary() == {"old": True}
    assert not list(run.path.glob(".*"))
    assert caught.value.exit_code == 3
    assert any("--resume" in hint for hint in caught.value.hints)


def test_full_disk_leaves_no_partial_line(run):
    run.append_metrics({"step": 1})
    with small_files(2_000), pytest.raises(TrainError, match="disk is full"):
        run.append_metrics({"step": 2, "text": "x" * 10_000})
    assert run.metrics_file.read_bytes().endswith(b"\n")
    run.append_metrics({"step": 2})
    assert [row["step"] for row in run.read_metrics()] == [1, 2]


def test_enospc_is_a_full_disk_error(run):
    run.metrics_file.symlink_to("/dev/full")
    with pytest.raises(TrainError, match="No space left"):
        run.append_metrics({"step": 1})


@pytest.mark.parametrize("what", ["deleted", "emptied", "moved"])
def test_deleted_run_directory_is_an_error_at_the_next_step(tmp_path, what):
    with RunDir.open(tmp_path / "run") as run:
        run.save_config("steps: 2\n")
        run.append_metrics({"step": 1})
        assert run.is_intact
        if what == "moved":
            run.path.rename(tmp_path / "elsewhere")
        elif what == "deleted":
            shutil.rmtree(run.path)
        else:
            run.config_file.unlink()
        assert not run.is_intact
        with pytest.raises(TrainError, match="was deleted or moved"):
            run.append_metrics({"step": 2})
        assert run.path.exists() == (what == "emptied")
    if what == "moved":
        assert [row["step"] for row in RunDir(tmp_path / "elsewhere").read_metrics()] == [1]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_directory_without_write_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(TrainError, match="cannot write"):
        RunDir.open(tmp_path / "run")


def test_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match="cannot write"):
        RunDir.open(tmp_path / "file" / "run")
    with pytest.raises(TrainError, match="cannot write"):
        RunDir.open(tmp_path / "file")


def test_atomic_write_survives_a_kill_at_any_moment(tmp_path):
    code = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from areal_gym.utils.files import write_atomic
        number = 0
        while True:
            write_atomic(Path(sys.argv[1]) / "file", f"{number} " * 20_000)
            number += 1
        """
    )
    write_atomic(tmp_path / "file", "-1 " * 20_000)
    for delay_s in (0.2, 0.23, 0.27):
        writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
        time.sleep(delay_s)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        words = (tmp_path / "file").read_text().split()
        assert len(words) == 20_000
        assert len(set(words)) == 1


def test_temporary_files_of_a_killed_writer_are_removed(run):
    (run.path / ".summary.json.1.tmp").write_text("{")
    run.close()
    RunDir.open(run.path, "resume").close()
    assert not (run.path / ".summary.json.1.tmp").exists()


def test_generated_run_names_are_unique(tmp_path):
    paths = [new_run_path("math/gsm8k", tmp_path) for _ in range(20)]
    assert len(set(paths)) == 20
    assert all(path.name.startswith("math-gsm8k-2") for path in paths)
    RunDir.open(paths[0]).close()


def test_runs_are_listed(run, tmp_path):
    root = run.path.parent
    assert run_paths(tmp_path / "nowhere") == []
    run.append_metrics({"step": 1, "reward/mean": 0.25})
    run.append_metrics({"step": 2, "reward/mean": math.nan})
    (root / "not-a-run").mkdir()
    (info,) = map(run_info, run_paths(root))
    assert (info.env_id, info.num_steps, info.is_finished, info.reward) == ("tir", 2, False, 0.25)
    run.save_summary({"heldout_after": 0.5})
    assert run_info(run_paths(root)[0]).summary == {"heldout_after": 0.5}


def test_interrupted_open_releases_the_lock(run):
    run.close()
    with pytest.raises(RunExistsError):
        RunDir.open(run.path)
    RunDir.open(run.path, "resume").close()
    assert issubclass(InfrastructureError, RuntimeError)


def test_rewind_deletes_pictures_that_no_file_names(run):
    store = ImageStore(run.images_dir)
    named, journaled, later, old = (store.add(picture(seed)) for seed in range(4))
    for step, part in ((1, named), (3, later)):
        asked = {"role": "user", "content": [part]}
        run.save_trajectories([replace(trajectory(), messages=(asked,))], name=step)
    run.save_trajectories([replace(trajectory(), messages=())], name=2)
    run.journal_file.write_text(f'{{"task": "{journaled["sha256"]}"}}\n')
    assert set(store) == {part["sha256"] for part in (named, journaled, later, old)}
    run.rewind(2)
    assert set(store) == {named["sha256"], journaled["sha256"]}
    run.trajectories_file(1).unlink()  # as people do to save space
    run.rewind(2)
    assert list(store) == [journaled["sha256"]]


def test_rewind_leaves_runs_without_pictures_alone(run):
    run.rewind(2)
    assert not run.images_dir.exists()
