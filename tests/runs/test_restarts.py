"""A rank of the trainer dies: the run goes on from its newest checkpoint, by itself."""

from __future__ import annotations

import pytest
import torch

from areal_gym.config import load_config
from areal_gym.errors import LostRankError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.incidents import describe_incidents
from areal_gym.runs.restarts import RESTARTED, Restarts
from areal_gym.runs.run_display import Display
from areal_gym.runs.train import train
from tests._support.killing import Killing

RANK = "areal_gym.trainer.parallel.worker import main"


def config_of(policy, *overrides, steps=4):
    return load_config(
        overrides=[
            f"engine.model={policy}",
            f"steps={steps}",
            "env.id=shaped",
            "rollout.group_size=4",
            "rollout.batch_groups=3",
            "rollout.max_new_tokens=12",
            "engine.num_slots=8",
            "engine.max_context=256",
            "eval.num_tasks=4",
            "trainer.advantage=reinforce",
            "trainer.save_every=2",
            *overrides,
        ]
    )


def numbers_of(run):
    """What was trained on, and what came of it."""
    return [
        {name: row[name] for name in row if is_number_of_training(name)}
        for row in RunDir(run).read_metrics()
    ]


def is_number_of_training(name):
    return name.startswith(("train/", "reward/")) and not name.endswith("_per_s")


def weights_of(run, step):
    return load_checkpoint(run / "checkpoints" / f"step-{step:06d}").state_dict()


@pytest.mark.slow
def test_run_with_a_killed_rank_ends_as_one_without(tiny_policy, shaped_env, tmp_path):
    """Bit for bit, in deterministic mode: step 3 is lost with the rank, and taken again."""
    overrides = ["deterministic=true", "trainer.num_ranks=2"]
    saved = tmp_path / "broken" / "checkpoints" / "step-000002"
    display = Killing(RANK, after_step=3, awaits=saved)
    train(config_of(tiny_policy, *overrides), run_dir=tmp_path / "broken", display=display)
    train(config_of(tiny_policy, *overrides), run_dir=tmp_path / "whole")
    assert display.has_killed
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    assert [row["step"] for row in RunDir(broken).read_metrics()] == [1, 2, 3, 4]
    assert len(numbers_of(whole)[0]) > 10
    assert numbers_of(broken) == numbers_of(whole)
    ours, theirs = weights_of(whole, 4), weights_of(broken, 4)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    (line,) = [line for line in display.said if "continuing from" in line]
    assert "of the trainer has died: process" in line
    assert "SIGKILL" in line
    assert "continuing from the checkpoint of step 2 (restart 1 of 3" in line
    assert line in RunDir(broken).log_file.read_text()
    assert [row[RESTARTED] for row in RunDir(broken).read_metrics()] == [0, 0, 1, 0]
    assert "1 trainer restarted" in describe_incidents(RunDir(broken).read_metrics()[2])
    assert not any("go on with: areal-gym train --resume" in line for line in display.said)


@pytest.mark.slow
def test_run_without_a_checkpoint_begins_again_and_gives_up_in_the_end(
    tiny_policy, shaped_env, tmp_path
):
    """The trainer beside asynchronous rollouts is one process, which dies whenever it trained."""
    config = config_of(
        *(tiny_policy, "rollout.max_staleness=1", "trainer.save_every=0"),
        *("guard.action=ignore", "trainer.max_restarts=1"),
        steps=2,
    )
    display = Killing(RANK, after_step=1, how_often=2)
    with pytest.raises(LostRankError, match=r"after 1 restarts? without a new checkpoint") as lost:
        train(config, run_dir=tmp_path / "run", display=display)
    assert display.has_killed
    assert any("continuing from the beginning (restart 1 of 1" in line for line in display.said)
    assert [row[RESTARTED] for row in RunDir(tmp_path / "run").read_metrics()] == [1]
    assert any("--resume" in hint for hint in lost.value.hints)


def test_restarts_are_counted_by_surviving_rows_and_limited_by_checkpoints(tmp_path):
    with RunDir.open(tmp_path / "run", begins=True) as run:
        run.save_config("steps: 9\n")
        error, restarts = LostRankError("a rank has died"), Restarts(limit=2)
        with pytest.raises(LostRankError):  # at its start: nothing was trained
            restarts.begin(error, run, Display())
        assert restarts.count_in(1) == 0
        assert restarts.begin(error, run, Display())
        assert [restarts.count_in(step) for step in (1, 2)] == [1, 0]
        # The row that told of it is forgotten with the second death, and the next tells of both.
        assert restarts.begin(error, run, Display())
        assert [restarts.count_in(step) for step in (1, 2, 3)] == [2, 0, 0]
        with pytest.raises(LostRankError, match=r"after 2 restarts .*trainer.max_restarts"):
            restarts.begin(error, run, Display())
