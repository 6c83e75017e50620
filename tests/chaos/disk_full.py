"""The disk is full at random moments of checkpoint, metrics, journal and trajectories.

A run on a small disk is undisturbed until some call that writes; from there on the disk has no
room, or only a part of what is needed. The run must fail by a TrainError that says so. Then there
is room again, and the resumed run must be the undisturbed one to the last bit (where it is
deterministic), or train every group once (where it has a journal).
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from areal_gym.errors import TrainError
from areal_gym.rollout.journal import Journal
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.train import train
from tests.chaos.support_runs import (
    STEPS,
    SmallDisk,
    before_call,
    config_of,
    fingerprint,
    make_policy,
)


def run(small: bool, directory: Path) -> dict[str, object]:
    """Fills the disk some times and returns how often the run failed and went on."""
    policy = make_policy(directory / "model")
    exact = config_of(policy)
    train(exact, run_dir=directory / "undisturbed")
    wanted = fingerprint(directory / "undisturbed")
    disk = SmallDisk(directory / "disk")
    figures = {"filled": 0, "failed": 0, "resumed_exactly": 0, "journals_resumed": 0}
    chance = random.Random(0)
    moments = [
        (exact, RunDir, "append_metrics", (1, 3)),
        (exact, RunDir, "save_trajectories", (2, 5)),
        (exact, RunDir, "save_trained", (1, 3)),
        (exact, _checkpoints(), "save_trainer", (1, 3)),
        (exact, _checkpoints(), "write_file", (1, 9)),
        (config_of(policy, "deterministic=false"), Journal, "_append", (1, 9)),
        (config_of(policy, "deterministic=false"), Journal, "checkpoint", (1, 3)),
    ]
    chosen = [moments[3], moments[5]] if small else moments * 4
    try:
        for config, owner, name, (first, last) in chosen:
            number = chance.randint(first, last)
            left = chance.choice([0, 100, 4096, 20_000, 60_000])
            _fill_once(disk, config, owner, name, number, left, wanted, figures)
    finally:
        disk.close()
    return {**figures, "disk": "tmpfs" if disk.is_mounted else "file size limit"}


def _checkpoints() -> Any:
    import areal_gym.trainer.checkpoint

    return areal_gym.trainer.checkpoint


def _fill_once(
    disk: SmallDisk,
    config: Any,
    owner: Any,
    name: str,
    number: int,
    left: int,
    wanted: str,
    figures: dict[str, int],
) -> None:
    place = disk.place / "run"
    shutil.rmtree(place, ignore_errors=True)
    figures["filled"] += 1
    failure: TrainError | None = None
    with before_call(owner, name, number, lambda: disk.fill(left)):
        try:
            train(config, run_dir=place)
        except TrainError as error:
            failure = error
        finally:
            disk.empty()
    directory = RunDir(place)
    if failure is not None:
        figures["failed"] += 1
        words = str(failure)
        assert "disk is full" in words or "cannot write" in words or "MB left" in words, words
        assert directory.status != "finished"
        train(config, run_dir=place, mode="resume")
    assert [row["step"] for row in directory.read_metrics()] == list(range(1, STEPS + 1))
    assert directory.status == "finished"
    if config.deterministic:
        assert fingerprint(place) == wanted, f"{name}, call {number}, {left} bytes left"
        figures["resumed_exactly"] += 1
    else:
        groups = [g.id for step in range(1, STEPS + 1) for g in directory.read_groups(step)]
        assert len(set(groups)) == len(groups) == 2 * STEPS
        figures["journals_resumed"] += 1
