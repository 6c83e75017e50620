"""Write the directory of an evaluation, sample by sample, and continue one after a crash.

`evaluations` describes the files. A trajectory is written before the line of its sample. When an
evaluation is continued after a crash, a line without its trajectory is dropped, and trajectories
after that of the last sample are cut off.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from areal_gym.errors import NothingToDoError, RunExistsError, UsageError
from areal_gym.images import ImageStore
from areal_gym.run_dir.evaluations import EVALUATION_FILE, Evaluation
from areal_gym.run_dir.run_dir import RunMode
from areal_gym.run_dir.run_status import DirectoryLock, StatusFile
from areal_gym.run_dir.trajectory_files import preview_of
from areal_gym.types import Trajectory
from areal_gym.utils.files import (
    append_bytes,
    cut_torn_end,
    path_hints,
    read_json,
    readable_disk_errors,
    remove,
    to_json,
    to_json_line,
    write_atomic,
)
from areal_gym.version import __version__

_STATUS_EVERY_S = 1.0


class EvaluationWriter:
    """Claims a directory and writes one evaluation to it; a context manager.

    Args:
        path: the directory.
        facts: the fields of `EvaluationInfo` without the outcome: `env`, `policy`, `sampling`, ...
        settings: the resolved settings, as YAML; `--resume` reads them.
        mode: "new" needs an empty or missing directory, "clean" replaces an evaluation in it, and
            "resume" keeps finished samples and repeats failed ones.

    Raises:
        RunExistsError: the directory has an evaluation or a run already.
        UsageError: there is nothing to continue, or it was measured with other settings.
        InfrastructureError: another process is writing to the directory.
    """

    def __init__(
        self, path: Path, facts: Mapping[str, Any], *, settings: str, mode: RunMode = "new"
    ) -> None:
        self.path = path
        self.kept: dict[tuple[int, int], Trajectory] = {}
        """The finished samples of an interrupted evaluation, by task index and attempt."""
        self.repairs: list[str] = []
        is_greedy = facts["sampling"]["temperature"] == 0
        stem = "eval-greedy" if is_greedy else "eval"
        self._file = path / EVALUATION_FILE
        self._samples = path / "samples.jsonl"
        self._trajectories = path / "trajectories" / f"{stem}.jsonl"
        self._status = StatusFile(path / "status.json")
        self._facts = {**facts, "started_at": None, "duration_s": 0.0, "scores": None}
        self._mode = mode
        self._num_done, self._status_s = 0, 0.0
        self._places: dict[str, tuple[int, int]] = {}
        if mode == "resume" and not self._file.is_file():
            raise UsageError(
                f"{path} has no evaluation to continue",
                hints=[*path_hints(path), "start one: leave --resume out"],
            )
        with readable_disk_errors(path):
            self._trajectories.parent.mkdir(parents=True, exist_ok=True)
        self._lock = DirectoryLock(path)
        try:
            if mode == "resume":
                self._continue()
            else:
                self._begin(settings, is_clean=mode == "clean")
        except BaseException:
            self._lock.release()
            raise
        self._start_s = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_refused = isinstance(error, UsageError | NothingToDoError)
        if is_refused and self._mode != "resume" and not self._samples.exists():
            self._remove()  # a refused request leaves no files
            with contextlib.suppress(OSError):
                self._trajectories.parent.rmdir()
                self.path.rmdir()
        elif self._facts["scores"] is None:
            self._status.took_step(self._num_done)
            self._save()
            self._status.end(error or KeyboardInterrupt())
        self._lock.release()

    def begin(self, num_total: int) -> None:
        """Write `status.json`; `num_total` samples will be measured."""
        self._num_done = len(self.kept)
        self._status.start(step=self._num_done, steps=num_total)

    def add_trajectory(self, trajectory: Trajectory) -> None:
        """Append a finished episode, also one that failed and will be repeated.

        Raises:
            TrainError: the disk is full.
        """
        ImageStore(self.path / "images").keep_images_of([trajectory])
        line = to_json_line(trajectory.to_dict(packs_numbers=True))
        offset = self._trajectories.stat().st_size if self._trajectories.exists() else 0
        append_bytes(self._trajectories, line)
        self._places[trajectory.id] = (offset, len(line))

    def add_sample(self, index: int, attempt: int, trajectory: Trajectory) -> None:
        """Append the line of a finished sample; call `add_trajectory` before.

        Raises:
            TrainError: the disk is full.
        """
        row = sample_row(
            index, attempt, trajectory, success_reward=float(self._facts["success_reward"])
        )
        offset, num_bytes = self._places.pop(trajectory.id)
        row |= {"offset": offset, "bytes": num_bytes}
        append_bytes(self._samples, to_json_line(row))
        self._num_done += 1
        if time.monotonic() - self._status_s > _STATUS_EVERY_S:
            self._status_s = time.monotonic()
            self._status.took_step(self._num_done)

    def finish(self, scores: Mapping[str, Any]) -> None:
        """Save the scores, which marks the evaluation as finished."""
        self._facts["scores"] = dict(scores)
        self._status.took_step(self._num_done)
        self._save()
        self._status.end(None)

    def _begin(self, settings: str, *, is_clean: bool) -> None:
        if (self.path / "config.yaml").exists():
            raise RunExistsError(
                f"{self.path} is a run's directory",
                hints=[f"its evaluations go to {self.path / 'evaluations'}: leave --out out"],
            )
        if self._file.exists() and not is_clean:
            raise RunExistsError(
                f"{self.path} already holds an evaluation",
                hints=[
                    "continue it:  --resume",
                    "replace it:   --clean",
                    "keep it:      choose another directory with --out",
                ],
            )
        self._remove()
        self._facts["started_at"] = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        self._facts["software"] = {"areal_gym": __version__, "python": platform.python_version()}
        write_atomic(self.path / "settings.yaml", settings)
        self._save()

    def _remove(self) -> None:
        # Only what evaluations write is deleted: a mistyped --out must not cost a home directory.
        files = (self._file, self._samples, self._status.file, self.path / "settings.yaml")
        remove(self.path / "images")
        folder = self._trajectories.parent
        for file in (*files, *(folder / f"{stem}.jsonl" for stem in ("eval", "eval-greedy"))):
            remove(file)

    def _continue(self) -> None:
        """Keep the complete samples, and cut off what a crash left incomplete."""
        previous = read_json(self._file)
        for name in ("started_at", "duration_s", "software"):
            self._facts[name] = previous.get(name)
        now, before = (
            json.loads(to_json({k: v for k, v in facts.items() if k in _IDENTITY}))
            for facts in (self._facts, previous)
        )
        if differing := [name for name in now if now[name] != before.get(name)]:
            shown = "; ".join(f"{k}: {before.get(k)!r}, not {now[k]!r}" for k in differing)
            raise UsageError(
                f"{self.path} was measured in another way: {shown}",
                hints=[
                    "go on as it began: areal-gym eval --resume --out DIRECTORY, nothing else",
                    "measure anew: choose another directory with --out",
                ],
            )
        self.repairs += filter(None, (cut_torn_end(self._samples),))
        rows, num_dropped = [], 0
        end = 0
        for sample, trajectory in self._whole_samples():
            end = max(end, sample["offset"] + sample["bytes"])
            if trajectory is None or sample["success"] is None:
                num_dropped += 1
                continue
            rows.append(sample)
            self.kept[sample["index"], sample["attempt"]] = trajectory
        if num_dropped:
            write_atomic(self._samples, map(to_json_line, rows))
            self.repairs.append(f"{num_dropped} samples that had failed are measured again")
        size = self._trajectories.stat().st_size if self._trajectories.exists() else 0
        if size > end:
            os.truncate(self._trajectories, end)
            self.repairs.append(f"{size - end:,} bytes of an unfinished trajectory are cut off")

    def _whole_samples(self) -> Iterator[tuple[dict[str, Any], Trajectory | None]]:
        evaluation = Evaluation.open(self.path)
        size = self._trajectories.stat().st_size if self._trajectories.exists() else 0
        for sample in evaluation.samples():
            if sample["offset"] + sample["bytes"] > size:
                yield {**sample, "offset": 0, "bytes": 0}, None  # a crash lost the trajectory
            else:
                yield sample, evaluation.read_trajectory(sample)

    def _save(self) -> None:
        facts = dict(self._facts)
        if self._facts["started_at"] is not None and hasattr(self, "_start_s"):
            duration_s = float(facts["duration_s"] or 0) + time.perf_counter() - self._start_s
            facts["duration_s"] = round(duration_s, 3)
        write_atomic(self._file, to_json(facts, indent=2))


_IDENTITY = (
    *("env", "env_kwargs", "benchmark", "split", "policy", "agent", "sampling", "seed"),
    *("num_tasks", "num_samples", "success_reward"),
)


def sample_row(
    index: int, attempt: int, trajectory: Trajectory, *, success_reward: float
) -> dict[str, Any]:
    """Return the line of a sample as a row, without the keys `offset` and `bytes`."""
    is_success = trajectory.reward >= success_reward - 1e-9
    seconds = sum(turn.engine_s + turn.env_s for turn in trajectory.turns)
    return {
        "index": index,
        "attempt": attempt,
        "task": trajectory.task.id,
        "env": trajectory.env_id,
        "reward": trajectory.reward,
        "success": None if trajectory.stop_reason.is_failure else is_success,
        "parts": dict(trajectory.reward_parts),
        "metrics": dict(trajectory.metrics),
        "stop": str(trajectory.stop_reason),
        "turns": len(trajectory.turns),
        "tokens": trajectory.num_policy_tokens,
        "seconds": round(seconds, 4),
        "error": trajectory.error,
        "preview": preview_of(trajectory.messages),
        "trajectory": trajectory.id,
    }
