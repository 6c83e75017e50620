"""SIGTERM, SIGINT and SIGKILL in each phase of a run, which then goes on where it was.

A run sends itself the signal some milliseconds after a phase has begun: start, warm start, probe,
rollout, training, publication, metrics, checkpoint, evaluation, end. Its status must say how it
ended, and what is resumed must be the undisturbed run to the last bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.train import train
from tests._support.paths import ROOT
from tests.chaos.support_runs import config_of, fingerprint, make_policy, overrides_of
from tests.chaos.support_signalled import PHASES

SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
_MOST_S = 600


def run(small: bool, directory: Path) -> dict[str, object]:
    """Signals runs in each phase and returns how they ended, and how many went on exactly."""
    policy = make_policy(directory / "model")
    train(config_of(policy), run_dir=directory / "undisturbed")
    wanted = fingerprint(directory / "undisturbed")
    chance = random.Random(0)
    cases = [(phase, number) for phase in PHASES for number in SIGNALS[:2]]
    if small:
        cases = [("checkpoint", signal.SIGKILL)]
    ended: dict[str, int] = {}
    for place, (phase, number) in enumerate(cases):
        path = directory / f"run-{place}"
        status = _signalled(policy, path, phase, number, chance)
        ended[status] = ended.get(status, 0) + 1
        if phase == "warm start":  # of another policy, which takes a minute to make
            continue
        _go_on(policy, path, status)
        assert fingerprint(path) == wanted, f"{number.name} in {phase}"
    return {"signals": len(cases), "ended": ended, "resumed_exactly": len(cases) - _skipped(cases)}


def _skipped(cases: list[tuple[str, signal.Signals]]) -> int:
    return sum(phase == "warm start" for phase, _ in cases)


def _signalled(
    policy: Path, path: Path, phase: str, number: signal.Signals, chance: random.Random
) -> str:
    """Runs until the signal has ended it; returns its status, or "no run" where none had begun."""
    model = "starter" if phase == "warm start" else policy
    order = {
        "phase": phase,
        "number": chance.randint(1, 2)
        if phase not in ("probe", "end", "start", "warm start")
        else 1,
        "signal": int(number),
        "delay_s": chance.choice([0, 0.001, 0.01, 0.05]),
        "reached": str(path.with_suffix(".reached")),
        "argv": ["--plain", "train", "--out", str(path), *overrides_of(model)],
    }
    child = subprocess.run(
        [sys.executable, "-m", "tests.chaos.support_signalled", json.dumps(order)],
        cwd=ROOT,
        env={**os.environ, "AREAL_GYM_CACHE": str(path.with_suffix(".cache"))},
        capture_output=True,
        text=True,
        timeout=_MOST_S,
        check=False,
    )
    words = child.stdout + child.stderr
    assert Path(str(order["reached"])).exists(), words
    assert "a bug" not in words, words
    assert child.returncode in (0, 130, -number), (child.returncode, words)
    run = RunDir(path)
    if not run.config_file.exists():
        assert not run.holds_run
        return "no run"
    status = run.status
    expected = ("died",) if number == signal.SIGKILL else ("interrupted",)
    assert status in (*expected, "finished"), (status, words)
    assert not run.is_being_written
    return status


def _go_on(policy: Path, path: Path, status: str) -> None:
    if status == "finished":
        return
    mode = "new" if status == "no run" else "resume"
    train(config_of(policy), run_dir=path, mode=mode)  # type: ignore[arg-type]
    assert RunDir(path).status == "finished"
