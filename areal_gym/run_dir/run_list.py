"""List runs, describe a run, and reserve the path of a new one."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_gym.errors import InfrastructureError
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.utils.files import path_hints, readable_disk_errors


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """The row of a run in a list of runs."""

    path: Path
    env_id: str
    num_steps: int  # number of finished steps
    is_finished: bool
    reward: float | None  # the mean of the newest step
    summary: Mapping[str, Any]  # empty until the run has finished


def run_paths(root: Path) -> list[Path]:
    """Return the paths of the runs directly under `root`, sorted by name."""
    if not root.is_dir():
        return []
    return [path for path in sorted(root.iterdir()) if RunDir(path).config_file.exists()]


def no_run_hints(path: Path) -> list[str]:
    """Return hints for an error about `path`, which is not a run directory."""
    return [*path_hints(path), "all runs: areal-gym list runs"]


def run_info(path: Path) -> RunInfo:
    """Read the row that lists show for a run, finished or not."""
    run = RunDir(path)
    try:
        env_id = str(run.read_config()["env"]["id"])
    except (KeyError, TypeError):
        env_id = "?"
    rows = run.read_metrics()
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    return RunInfo(
        path=run.path,
        env_id=env_id,
        num_steps=max((int(row.get("step", 0)) for row in rows), default=0),
        is_finished=run.is_finished,
        reward=rewards[-1] if rewards else None,
        summary=run.read_summary() or {},
    )


def new_run_path(label: str, root: Path = Path("runs")) -> Path:
    """Create an empty directory `runs/LABEL-DATE-TIME`, which no other process gets.

    `RunDir.open(path, "new")` uses it; `path.rmdir()` removes it.
    """
    stem = f"{re.sub('[/:]+', '-', label)}-{time.strftime('%Y%m%d-%H%M%S')}"
    with readable_disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        for suffix in ("", *(f"-{n}" for n in range(2, 10_000))):
            path = root / (stem + suffix)
            with contextlib.suppress(FileExistsError):
                # mkdir fails if another run that starts in the same second has this name.
                path.mkdir()
                return path
    raise InfrastructureError(f"{root} has no free name left for {stem}")


@contextlib.contextmanager
def run_path(given: Path | None, label: str) -> Iterator[Path]:
    """Yield `given`, or else a reserved path; remove the directory if it stays empty."""
    path = given or new_run_path(label)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()
        if given is None:
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # remove `runs`, too, if it has no other run
