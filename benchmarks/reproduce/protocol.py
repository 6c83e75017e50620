"""What the reproduced tables share: whole runs, kept in a file, compared seed by seed."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from areal_gym.config import RunConfig
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.train import train
from areal_gym.utils.statistics import mean_interval

SMALL = (
    *("env.id=tir", "engine.max_context=256", "engine.num_slots=64"),
    *("rollout.batch_groups=8", "rollout.group_size=8", "rollout.max_in_flight=64"),
    "trainer.optimizer=muon",
    # A run that is lost goes on to its end: that is what is measured.
    "guard.action=warn",
)
"""Settings of all runs: 8 groups of 8 episodes a step, the starter policy of the seed."""

Row = dict[str, Any]


def play(config: RunConfig, keep: Path | None = None) -> tuple[Row, list[Row]]:
    """Run `areal-gym train` once; return its outcome, and the metrics of its steps.

    `keep` is where the run directory stays; by default it is removed.
    """
    start_s, start_cpu_s = time.monotonic(), cpu_s()
    with tempfile.TemporaryDirectory() as home:
        run = RunDir(keep or Path(home) / "run")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            train(config, run_dir=run.path)
        rows = run.read_metrics()
        summary = run.read_summary() or {}
    outcome = {
        "before": summary.get("heldout_before"),
        "heldout": summary["heldout_after"],
        "before_reward": summary.get("heldout_reward_before"),
        "heldout_reward": summary.get("heldout_reward_after"),
        "greedy": summary.get("heldout_greedy_after"),
        "s": round(time.monotonic() - start_s, 1),
        "cpu_s": round(cpu_s() - start_cpu_s, 1),
    }
    return outcome, rows


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class KeptRuns:
    """The rows of cases that were run, one line each in a file: an interrupted table goes on."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._rows: dict[tuple[Any, ...], Row] = {}
        if file and file.exists():
            for line in file.read_text().splitlines():
                row = json.loads(line)
                self._rows[tuple(row["case"])] = row

    def get(self, case: tuple[Any, ...], run: Callable[[], Row]) -> Row:
        """Return the row of a case, which is run if it was not yet."""
        if case not in self._rows:
            row = {"case": list(case), **run()}
            self._rows[case] = row
            print(json.dumps(row), file=sys.stderr, flush=True)
            if self._file:
                with self._file.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        return self._rows[case]


def parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all tables have."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--runs", type=Path, help="keeps what was played, one line a run")
    made.add_argument("--picture", type=Path, help="draws it, as SVG")
    made.add_argument("--quick", action="store_true", help="one seed, toy size: does it run?")
    made.add_argument("--json", action="store_true")
    return made


def plot_seeds(panel: Any, cells: Sequence[Sequence[Row]], name: str, label: str) -> None:
    """Plot a figure of the cells of a line: their means as the line, and their seeds as points.

    `panel` is matplotlib's; cells stand at 0, 1, 2, ...
    """
    (line,) = panel.plot([mean(rows, name) for rows in cells], "-", label=label)
    for place, rows in enumerate(cells):
        points = [row[name] for row in rows]
        panel.plot([place] * len(points), points, ".", color=line.get_color(), alpha=0.5)


def difference(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the mean of the paired differences, with its 95% interval where there is one."""
    mean, low, high = mean_interval([a - b for a, b in zip(ours, theirs, strict=True)])
    return f"{mean:+.3f}" + (f" ({low:+.3f} to {high:+.3f})" if math.isfinite(low) else "")


def mean(rows: Sequence[Row], name: str) -> float:
    """Return the mean of one figure over rows."""
    return statistics.fmean(row[name] for row in rows)
