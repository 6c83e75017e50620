"""The run directory becomes read-only, is moved or deleted in mid-run, and the clock jumps.

What is read-only or gone must end the run by an error that names it. When the directory is there
again, the resumed run is the undisturbed one to the last bit. A clock that jumps by days changes
nothing at all.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal_gym.config import RunConfig
from areal_gym.errors import TrainError
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.train import train
from tests.chaos.support_runs import SmallDisk, before_call, config_of, fingerprint, make_policy


def run(small: bool, directory: Path) -> dict[str, object]:
    """Disturbs runs and returns how often each went on exactly."""
    policy = make_policy(directory / "model")
    config = config_of(policy)
    train(config, run_dir=directory / "undisturbed")
    wanted = fingerprint(directory / "undisturbed")
    figures = {"read_only": 0, "moved": 0, "deleted": 0, "clock_jumps": 0}
    steps = (2,) if small else (1, 2, 3)
    for step in steps:
        if not small:
            _read_only(config, directory / f"disk-{step}", step, wanted)
            figures["read_only"] += 1
            _deleted(config, directory / f"deleted-{step}", step)
            figures["deleted"] += 1
        _moved(config, directory / f"moved-{step}", step, wanted)
        figures["moved"] += 1
    for seed in range(1 if small else 5):
        with _jumping_clock(seed) as jumps:
            train(config, run_dir=directory / f"clock-{seed}")
        assert fingerprint(directory / f"clock-{seed}") == wanted
        assert RunDir(directory / f"clock-{seed}").status == "finished"
        figures["clock_jumps"] += jumps()
    return dict(figures)


def _read_only(config: RunConfig, place: Path, step: int, wanted: str) -> None:
    disk = SmallDisk(place)
    if not disk.is_mounted:  # an ordinary user
        assert place.stat().st_uid != 0
    try:
        path = place / "run"
        with before_call(RunDir, "append_metrics", step, lambda: disk.set_read_only(True)):
            _fail(config, path, "cannot write")
        _fail(config, path, "cannot write", mode="resume")
        disk.set_read_only(False)
        train(config, run_dir=path, mode="resume")
        assert fingerprint(path) == wanted
    finally:
        disk.close()


def _moved(config: RunConfig, place: Path, step: int, wanted: str) -> None:
    elsewhere = place.with_name(place.name + "-elsewhere")
    with before_call(RunDir, "append_metrics", step, lambda: _move(place, elsewhere)):
        _fail(config, place, "deleted or moved")
    train(config, run_dir=elsewhere, mode="resume")
    assert fingerprint(elsewhere) == wanted


def _move(place: Path, elsewhere: Path) -> None:
    place.rename(elsewhere)


def _deleted(config: RunConfig, place: Path, step: int) -> None:
    with before_call(RunDir, "append_metrics", step, lambda: shutil.rmtree(place)):
        _fail(config, place, "deleted or moved")


def _fail(config: RunConfig, path: Path, words: str, mode: str = "new") -> None:
    with pytest.raises(TrainError, match=words):
        train(config, run_dir=path, mode=mode)  # type: ignore[arg-type]


@contextmanager
def _jumping_clock(seed: int) -> Iterator[Callable[[], int]]:
    """Inside, the clock on the wall is another one at each look: days before or after."""
    chance = random.Random(seed)
    original, count = time.time, 0

    def jumped() -> float:
        nonlocal count
        count += 1
        return original() + chance.uniform(-1e6, 1e6)

    time.time = jumped
    try:
        yield lambda: count
    finally:
        time.time = original
