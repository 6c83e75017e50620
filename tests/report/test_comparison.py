"""Runs side by side: what counts as a difference, and what the command says of it."""

import json
import math
import random

import pytest

from areal_gym.cli.app import run as areal_gym
from areal_gym.errors import UsageError
from areal_gym.report import compare
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.types import Task, Turn
from areal_gym.utils.statistics import difference_interval, mean_interval
from tests._support.run_dirs import make_run, trajectory


@pytest.mark.parametrize(("num", "quantile"), [(5, 2.776), (10, 2.262), (31, 2.042), (500, 1.965)])
def test_confidence_intervals_of_means_use_students_t(num, quantile):
    """Quantiles of t as tables have them."""
    values = [float(i) for i in range(num)]
    found = mean_interval(values)
    deviation = math.sqrt(sum((v - found.mean) ** 2 for v in values) / (num - 1))
    assert found.high - found.mean == pytest.approx(quantile * deviation / num**0.5, rel=4e-3)


def test_welch_interval_of_a_worked_example():
    """Worked by hand: means 10 and 13, variances 2.5 and 10, n = 5 each: 5.88 degrees of freedom,
    t = 2.459 (tables: 2.571 at 5, 2.447 at 6), standard error sqrt(2.5)."""
    a, b = [8.0, 9.0, 10.0, 11.0, 12.0], [9.0, 11.0, 13.0, 15.0, 17.0]
    found = difference_interval(b, a)
    assert found.mean == 3.0
    assert found.high - found.mean == pytest.approx(2.459 * math.sqrt(2.5), rel=2e-3)


def test_too_few_values_have_no_interval():
    assert mean_interval([1.0] * 4) == (1.0, -math.inf, math.inf)
    assert difference_interval([1.0] * 4, [2.0] * 9) == (-1.0, -math.inf, math.inf)


def test_equal_samples_differ_at_the_nominal_rate():
    rng = random.Random(0)
    hits = 0
    for _ in range(2000):
        a, b = ([rng.gauss(0, 1) for _ in range(10)] for _ in range(2))
        found = difference_interval(a, b)
        hits += not found.low <= 0 <= found.high
    assert 0.03 < hits / 2000 < 0.07


def evaluation(path, solved, num_tasks=40):
    """What `areal-gym eval` leaves behind; `solved` says which tasks were."""
    with RunDir.open(path) as directory:
        directory.save_trajectories(
            [
                trajectory(i, task=Task(id=f"test/{i}", data={}), turns=[turn(solved(i))])
                for i in range(num_tasks)
            ],
            name="eval",
        )
    return path


def turn(is_solved):
    return Turn(finish_reason="stop", reward=float(is_solved))


def test_evaluations_are_paired_by_task(tmp_path):
    """20 and 26 of 40: intervals of 0.16 say nothing, six tasks gained and none lost do."""
    first = evaluation(tmp_path / "first", lambda i: i < 20)
    second = evaluation(tmp_path / "second", lambda i: i < 26)
    (row,) = compare([first, second]).heldout
    assert row.values == [0.5, 0.65]
    assert row.verdicts == [None, "better"]
    assert row.differences[1][0] > 0
    low, high = row.intervals[0]
    assert low < 0.65 < high


def test_gains_and_losses_that_cancel_are_noise(tmp_path):
    first = evaluation(tmp_path / "first", lambda i: i % 2 == 0)
    second = evaluation(tmp_path / "second", lambda i: i % 2 == 1)
    (row,) = compare([first, second]).heldout
    assert row.verdicts == [None, "within noise"]


def test_runs_are_compared_over_shared_steps(tmp_path):
    long = make_run(tmp_path / "long", num_steps=14, num_trajectories=2)
    short = make_run(tmp_path / "short", num_steps=12, num_trajectories=2, trainer={"lr": 1e-5})
    found = compare([long, short])
    assert found.steps == (3, 12)
    assert found.settings["trainer.lr"][1] == 1e-5
    assert set(found.settings) == {"steps", "trainer.lr"}
    rewards = next(row for row in found.training if row.label == "reward")
    assert rewards.values == pytest.approx([0.2 + 0.05 * 7.5] * 2)
    assert rewards.verdicts == [None, "within noise"]
    assert any("different steps" in remark for remark in found.remarks)


def test_runs_of_different_environments_are_not_compared(tmp_path):
    paths = [
        make_run(tmp_path / env, num_steps=6, num_trajectories=2, env={"id": env})
        for env in ("tir", "math")
    ]
    found = compare(paths)
    assert all(verdict is None for row in found.heldout for verdict in row.verdicts)
    reward = next(row for row in found.training if row.label == "reward")
    assert reward.verdicts == [None, None]
    pace = next(row for row in found.training if row.label == "seconds of a step")
    assert pace.verdicts == [None, "within noise"]
    assert found.remarks[0].startswith("the environments differ")


def test_empty_directory_is_refused(tmp_path):
    with pytest.raises(UsageError, match="neither a run directory nor an evaluation"):
        compare([tmp_path, tmp_path])


def test_compare_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a", num_steps=6, num_trajectories=2)
    make_run(tmp_path / "b", num_steps=6, num_trajectories=2, trainer={"lr": 1e-5})
    make_run(tmp_path / "c", num_steps=6, num_trajectories=2, seed=1)
    assert areal_gym(["compare", "a", "b", "c"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split()[:2] == ["a", "b"]
    assert any(line.split()[0] == "trainer.lr" for line in lines if line.strip())
    assert next(line for line in lines if "sampled, last" in line).count("within noise") == 2
    assert "areal-gym view a b c" in err

    assert areal_gym(["compare", "a", "b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in found["runs"]] == ["a", "b"]
    assert found["steps"] == [1, 6]

    assert areal_gym(["compare", "a"]) == 2
    assert areal_gym(["compare", "a", "nothing"]) == 2
    assert "nothing is neither a run" in capsys.readouterr().err
