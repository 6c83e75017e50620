"""Read evaluations from disk: their list, how each was measured, its scores and its samples.

`areal-gym eval` writes one directory for each environment (`EvaluationWriter`):

    evaluation.json           how it was measured (`EvaluationInfo`), and its scores at the end
    samples.jsonl             one line per finished sample, with the keys `SAMPLE_KEYS`
    trajectories/eval.jsonl   the episodes; eval-greedy.jsonl with --greedy
    status.json               the same as a run's; step and steps count samples
    settings.yaml             the resolved settings, which --resume reads

The directory is `runs/eval-ENV-DATE-TIME`, `RUN/evaluations/eval-ENV-DATE-TIME` for a run's
checkpoint, or a folder in --out. Samples and trajectories are appended during the evaluation. A
failed sample that --resume repeats has two lines, of which the later one counts.

The evaluations that a run makes on its schedule are read in the same way: `RUN/evaluations.jsonl`
has their scores, `RUN/trajectories/eval-STEP.jsonl` their samples. Directories of earlier versions
only have `trajectories/eval.jsonl`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from areal_gym.errors import DataError, GymError, NothingToDoError
from areal_gym.run_dir.run_files import RunFiles
from areal_gym.run_dir.run_status import RunStatus, StatusFile
from areal_gym.run_dir.trajectory_files import Head, TrajectoryFile
from areal_gym.types import Trajectory
from areal_gym.utils.files import open_data, path_hints, read_json, read_lines
from areal_gym.utils.statistics import Interval, pass_at_k_interval

SAMPLE_KEYS = (
    *("index", "attempt", "task", "env", "reward", "success", "parts", "metrics", "stop"),
    *("turns", "tokens", "seconds", "error", "preview", "trajectory", "offset", "bytes"),
)
"""The keys of a sample. `index` is the task's index in its split, and `attempt` counts from 0;
`task` is the task's id, the same in every run; `success` is None for a failed episode, which no
score includes; `stop` is a StopReason; `tokens` is the number of tokens that the policy sampled;
`seconds` is the time in engine and environment; `preview` is the end of the last answer;
`trajectory` is an id, and `offset` and `bytes` locate its line in the file of trajectories."""

EVALUATION_FILE = "evaluation.json"
_TRAJECTORY_ID = re.compile(r"eval-(\d+)-(\d+)")
_NAMES = {"eval": False, "eval-greedy": True}
_SUCCESS = 1 - 1e-9
_ROUNDING = 1e-7


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationInfo:
    """The settings, the progress and the scores of an evaluation."""

    path: Path
    """The evaluation's directory; for one on a run's schedule, it is the run's."""
    name: str
    """The directory's name; `RUN, step 40` for one on a schedule."""
    env: str
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    benchmark: str | None = None
    """The benchmark's id in `areal-gym list benchmarks`."""
    split: str = "test"
    policy: Mapping[str, Any] = field(default_factory=dict)
    """`model`, and if known `checkpoint`, `run` and `step`."""
    agent: str = "chat"
    engine: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """`temperature` (0 is greedy), `top_p`, `top_k`, `max_new_tokens`."""
    seed: int | None = None
    num_tasks: int | None = None
    num_samples: int = 1
    success_reward: float = 1.0
    started_at: str | None = None
    duration_s: float | None = None
    """Wall-clock seconds, without the time between a crash and --resume."""
    status: RunStatus = "finished"
    error: str | None = None
    num_done: int | None = None
    num_total: int | None = None
    scores: Mapping[str, Any] = field(default_factory=dict)
    """`EvalReport.to_dict()`: `pass@1`, `pass@1_low`, `pass@1_high`, `reward`, `stop_reasons`, ...;
    empty until it has ended."""
    software: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_greedy(self) -> bool:
        """Whether sampling was greedy (temperature 0)."""
        return self.sampling.get("temperature") == 0

    @property
    def pass_at_1(self) -> Interval | None:
        """The share of samples that succeed, with its 95% interval; None until it has ended."""
        values = [self.scores.get(f"pass@1{end}") for end in ("", "_low", "_high")]
        if any(not isinstance(value, int | float) for value in values):
            return None
        return Interval(*map(float, values))  # type: ignore[arg-type]

    @property
    def policy_name(self) -> str:
        """A short name of the policy: `tir-1, step 40`, or the model."""
        run, step = self.policy.get("run"), self.policy.get("step")
        if run:
            return Path(run).name + ("" if step is None else f", step {step}")
        name = str(self.policy.get("checkpoint") or self.policy.get("model") or "?")
        path = Path(name)
        if not path.is_absolute():
            return name  # a name on the hub, or a small policy
        number = path.name.removeprefix("step-")
        if path.parent.name == "checkpoints" and number.isdecimal():  # a run's checkpoint as model
            return f"{path.parent.parent.name}, step {int(number)}"
        return path.name


class Evaluation:
    """One evaluation: `info`, its samples page by page, and its trajectories.

    Example::

        evaluation = Evaluation.open(Path("runs/eval-math-20260301-120000"))
        print(evaluation.info.pass_at_1)
        for sample in evaluation.samples(start=0, limit=50):
            print(sample["task"], sample["attempt"], sample["reward"])
    """

    def __init__(self, info: EvaluationInfo, trajectories: Path, samples: Path | None) -> None:
        self.info = info
        self.trajectories_file = trajectories
        self.samples_file = samples
        """If None, the samples are read from the heads of the trajectories."""

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the directory of an evaluation, finished or not, also one of an earlier version.

        Raises:
            NothingToDoError: the directory has no evaluation.
            DataError: `evaluation.json` is damaged.
        """
        folder = path / "trajectories"
        if (path / EVALUATION_FILE).is_file():
            info = _read_info(path)
            stem = "eval-greedy" if info.is_greedy else "eval"
            return cls(info, folder / f"{stem}.jsonl", path / "samples.jsonl")
        for stem, is_greedy in _NAMES.items():
            file = folder / f"{stem}.jsonl"
            if file.is_file() and not (path / "config.yaml").exists():
                heads = TrajectoryFile(file).page(0, 1)
                env = heads[0].summary["env"] if heads else "?"
                sampling = {"temperature": 0.0} if is_greedy else {}
                info = EvaluationInfo(path=path, name=_name(path), env=env, sampling=sampling)
                return cls(info, file, None)
        raise NothingToDoError(
            f"{path} is not an evaluation",
            hints=[*path_hints(path), "all evaluations: areal-gym list evals"],
        )

    @classmethod
    def of_schedule(cls, run: Path) -> list[Self]:
        """Return the sampled evaluations on a run's schedule, ordered by step.

        The scores of the greedy evaluation at the same step are `scores["greedy"]`.
        """
        files = RunFiles(run)
        settings = files.read_config()
        evaluations = []
        for row in files.read_evaluations():
            if not isinstance(scores := row.get("sampled"), Mapping):
                continue  # an evaluation of imitation, which has losses but no samples
            step = int(row["step"])
            info = _info_of_settings(
                run,
                settings,
                name=f"{_name(run)}, step {step}",
                policy={"run": str(run), "step": step},
                num_tasks=scores.get("num_tasks"),
                num_samples=scores.get("num_samples", 1),
                started_at=row.get("started_at"),
                duration_s=scores.get("wall_s"),
                scores={**scores, "greedy": row.get("greedy")},
            )
            evaluations.append(cls(info, files.trajectories_file(f"eval-{step:06d}"), None))
        return evaluations

    def samples(self, start: int = 0, limit: int | None = None) -> list[dict[str, Any]]:
        """Return samples from `start` on, in the order of tasks and attempts.

        Raises:
            DataError: a line is damaged.
        """
        end = None if limit is None else start + limit
        return self._sorted[start:end]

    def read_trajectory(self, sample: Mapping[str, Any]) -> Trajectory:
        """Read the whole trajectory of a sample.

        Raises:
            DataError: the line is not a trajectory.
        """
        try:
            with open_data(self.trajectories_file) as stream:
                stream.seek(sample["offset"])
                raw = stream.read(sample["bytes"])
            return Trajectory.from_dict(json.loads(raw.decode("utf-8", "surrogatepass")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            place = f"{self.trajectories_file}, at byte {sample['offset']}"
            raise DataError(f"{place}: not a trajectory: {error!r}") from None

    def pass_at_1(self) -> Interval | None:
        """Return pass@1 with its interval; before the end, it is that of the samples so far."""
        if (score := self.info.pass_at_1) is not None:
            return score
        counts: dict[tuple[str, int], list[int]] = {}
        for sample in self._sorted:
            if sample["success"] is not None:
                count = counts.setdefault((sample["env"], sample["index"]), [0, 0])
                count[0] += 1
                count[1] += sample["success"]
        pairs = [(n, c) for n, c in counts.values()]
        return pass_at_k_interval(pairs, 1, num_samples=self.info.num_samples) if pairs else None

    def iter_samples(self) -> Iterator[dict[str, Any]]:
        """Yield the samples in the order in which they ended."""
        if self.samples_file is not None:
            for row in read_lines(self.samples_file, skips_torn_end=True):
                if not row.keys() >= {"index", "attempt", "task", "success"}:
                    raise DataError(f"{self.samples_file} has a line that is not a sample")
                yield row
        elif self.trajectories_file.is_file():
            yield from map(sample_of, TrajectoryFile(self.trajectories_file).page())

    @cached_property
    def _sorted(self) -> list[dict[str, Any]]:
        newest = {(row["index"], row["attempt"]): row for row in self.iter_samples()}
        return [newest[key] for key in sorted(newest)]


def evaluation_paths(root: Path) -> list[Path]:
    """Return the directories of evaluations in and below `root`, also those in run directories."""
    patterns = ("", "*/", "*/*/", "*/evaluations/*/")
    files = {f for p in patterns for f in root.glob(p + EVALUATION_FILE)}
    old = {f for stem in _NAMES for f in root.glob(f"*/trajectories/{stem}.jsonl")}
    paths = {file.parent for file in files}
    paths |= {p for f in old if not ((p := f.parent.parent) / "config.yaml").exists()}
    return sorted(paths)


def list_evaluations(
    root: Path, *, on_damaged: Callable[[Path, GymError], None] | None = None
) -> list[EvaluationInfo]:
    """Return the evaluations in and below `root`, the newest last.

    A damaged evaluation is left out, and `on_damaged` is called with its path and the error.
    """
    infos = []
    for path in evaluation_paths(root):
        try:
            infos.append(Evaluation.open(path).info)
        except GymError as error:
            if on_damaged is not None:
                on_damaged(path, error)
    return sorted(infos, key=lambda info: info.started_at or "")


def _read_info(path: Path) -> EvaluationInfo:
    file = path / EVALUATION_FILE
    row = read_json(file)
    scores = row.get("scores") or {}
    record = None if scores else StatusFile(path / "status.json").read()
    known = {f for f in EvaluationInfo.__dataclass_fields__ if f not in ("path", "name", "status")}
    facts = {key: value for key, value in row.items() if key in known and value is not None}
    wrong = [key for key in ("env_kwargs", "policy", "sampling", "scores", "software")
             if not isinstance(facts.get(key, {}), dict)]  # fmt: skip
    if wrong or not isinstance(facts.get("env"), str):
        raise DataError(f"{file} is not an evaluation's: {', '.join(wrong) or 'no env'}")
    if not scores:
        facts |= {"status": "stopped" if record is None else record.current_state}
        if record is not None:
            facts |= {"error": record.error, "num_done": record.step, "num_total": record.steps}
    return EvaluationInfo(path=path, name=_name(path), **facts)


def _info_of_settings(path: Path, settings: Mapping[str, Any], **facts: Any) -> EvaluationInfo:
    """Return the info of an evaluation on a run's schedule, from the run's settings and `facts`."""
    env, rollout = settings.get("env") or {}, settings.get("rollout") or {}
    sampling = {k: rollout.get(k) for k in ("temperature", "top_p", "top_k", "max_new_tokens")}
    return EvaluationInfo(
        path=path,
        env=str(env.get("id", "?")),
        env_kwargs=env.get("kwargs") or {},
        split=str((settings.get("eval") or {}).get("split", "test")),
        agent=str((settings.get("agent") or {}).get("id", "chat")),
        engine=str((settings.get("engine") or {}).get("id", "")),
        sampling=sampling,
        seed=settings.get("seed"),
        **facts,
    )


def is_graded_reward(scores: Mapping[str, Any]) -> bool:
    """Return whether an evaluation has rewards other than 0 and 1."""
    reward, pass_at_1 = scores.get("reward"), scores.get("pass@1")
    if not isinstance(reward, int | float) or not isinstance(pass_at_1, int | float):
        return False
    return abs(reward - pass_at_1) > _ROUNDING


def sample_of(head: Head) -> dict[str, Any]:
    """Return the sample of a trajectory, with the keys `SAMPLE_KEYS`."""
    row = head.summary
    match = _TRAJECTORY_ID.match(str(row["id"]))
    index, attempt = map(int, match.groups()) if match else (0, 0)
    return {
        "index": index,
        "attempt": attempt,
        "task": row["task"],
        "env": row["env"],
        "reward": row["reward"],
        "success": None if row["error"] else row["reward"] >= _SUCCESS,
        "parts": {},
        "metrics": {},
        "stop": row["stop"],
        "turns": row["turns"],
        "tokens": row["tokens"],
        "seconds": round(row["engine_s"] + row["env_s"], 4),
        "error": row["error"],
        "preview": row["preview"],
        "trajectory": row["id"],
        "offset": head.offset,
        "bytes": head.num_bytes,
    }


def _name(path: Path) -> str:
    return path.absolute().name
