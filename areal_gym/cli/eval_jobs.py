"""Plans the evaluations of `areal-gym eval`: a job and directory per environment or benchmark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_gym.cli.own_task import require_named_model
from areal_gym.cli.setting_flags import env_flags, policy_files, resolve, task_flags
from areal_gym.config.trust import remember_settings
from areal_gym.errors import NothingToDoError, UsageError
from areal_gym.plugins import registry
from areal_gym.run_dir.evaluations import Evaluation, EvaluationInfo, evaluation_paths
from areal_gym.run_dir.run_list import new_run_path
from areal_gym.utils.command_words import quoted
from areal_gym.utils.files import path_hints, read_yaml

if TYPE_CHECKING:
    from areal_gym.config import RunConfig
    from areal_gym.runs.evaluation import EvalJob


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The command's arguments."""

    overrides: Sequence[str]
    envs: Sequence[str]
    benchmarks: Sequence[str]
    recipe: Path | None
    run: Path | None
    checkpoint: Path | None
    flags: Mapping[str, Any]
    own: Mapping[str, Any]
    """Arguments of the environment, from `--data`, `--reward` and `--tools`."""
    trust: bool
    greedy: bool
    out: Path | None
    resume: bool
    clean: bool


@dataclass(slots=True)
class Plan:
    """Jobs, the folder with their results, and evaluations that were finished already."""

    jobs: list[EvalJob]
    folder: Path
    shown: Path
    """The argument of `areal-gym view`: the run, if the evaluation is a run's, else the folder."""
    finished: list[EvaluationInfo] = field(default_factory=list)

    @property
    def is_suite(self) -> bool:
        """Whether there are several evaluations."""
        return len(self.jobs) + len(self.finished) > 1


def plan_of(request: Request) -> Plan:
    """Plan the evaluations, and reserve their directory.

    Raises:
        UsageError: arguments contradict each other, or a setting is wrong.
        NothingToDoError: the run has no checkpoint yet.
    """
    models = (request.run, request.checkpoint, request.flags.get("engine.model"))
    if sum(model is not None for model in models) > 1:
        raise UsageError("--run, --checkpoint and --model exclude each other")
    if request.flags.get("eval.num_tasks") == 0:  # in a run, 0 switches evaluations off
        raise UsageError("'-n': 0 is not in the range x>=1: there would be nothing to measure")
    if request.envs and request.benchmarks:
        raise UsageError(
            "--env and --benchmark exclude each other: a benchmark has its environment",
            hints=["see them all: areal-gym list benchmarks"],
        )
    if request.own and request.benchmarks:
        raise UsageError("--benchmark has its own data and graders: leave out --data and --reward")
    if (request.resume or request.clean) and request.out is None:
        flag = "--resume" if request.resume else "--clean"
        raise UsageError(
            f"{flag} needs the directory of the evaluation",
            hints=[f"name it: {flag} --out runs/NAME", "see all: areal-gym list evals"],
        )
    if request.resume and request.clean:
        raise UsageError("--resume and --clean exclude each other")
    return _resumed(request) if request.resume else _new(request)


def _new(request: Request) -> Plan:
    from areal_gym.runs.evaluation import EvalJob

    run_recipe, checkpoint = policy_files(request.run, request.checkpoint)
    recipe = request.recipe or run_recipe
    targets = _targets(request.envs, request.benchmarks, recipe)
    if not request.benchmarks:
        flags = task_flags(request.envs, request.own, request.flags, recipe, request.overrides)
        targets = [(None, flags)] if request.own else targets
    is_chosen = request.trust or request.recipe is not None or recipe is None
    configs = [
        resolve(
            file=recipe,
            overrides=request.overrides,
            flags={**settings, **request.flags},
            is_chosen=is_chosen,
        )
        for _, settings in targets
    ]
    if checkpoint is None and not request.benchmarks:
        for config in configs:
            require_named_model(config, request.flags, request.overrides, recipe)
    folder = _folder(request, configs[0].env.label if len(configs) == 1 else "suite", targets)
    if len(configs) == 1:
        places = [folder]
    else:
        places = [folder / name for name in _names([c.env.label for c in configs], targets)]
    jobs = []
    for (benchmark, _), config, place in zip(targets, configs, places, strict=True):
        if checkpoint is None:
            _require_other_than_starter(benchmark, config)
        if is_chosen:
            remember_settings(config)
        job = EvalJob(
            config=config,
            checkpoint=checkpoint,
            greedy=request.greedy or _is_greedy(benchmark, request),
            out=place,
            mode="clean" if request.clean else "new",
            benchmark=benchmark,
        )
        jobs.append(job)
    return Plan(jobs, folder, request.run if request.run and not request.out else folder)


_Target = tuple[str | None, dict[str, Any]]
"""The benchmark's id, if it is one, and settings."""


def _targets(envs: Sequence[str], benchmarks: Sequence[str], recipe: Path | None) -> list[_Target]:
    ids = [id for text in benchmarks for id in text.split(",") if id]
    if ids:
        return [(id, _benchmark_settings(id)) for id in dict.fromkeys(ids)]
    flags_by_env = [env_flags([env]) for env in dict.fromkeys(envs) if not _has_weight(env)]
    if len(flags_by_env) < 2 or len(flags_by_env) < len(envs):
        return [(None, env_flags(envs))]  # with weights, they form one environment, a mix
    # The arguments of a run's environment do not fit another one.
    settings = read_yaml(recipe) if recipe is not None else {}
    trained = (settings.get("env") or {}).get("id") if isinstance(settings, dict) else None
    return [
        (None, flags if flags["env.id"] == trained else {**flags, "env.kwargs": {}})
        for flags in flags_by_env
    ]


def _benchmark_settings(id: str) -> dict[str, Any]:
    from areal_gym.envs.benchmarks.left_out import require_not_left_out

    if id not in {entry.id for entry in registry().entries("benchmarks")}:
        require_not_left_out(id)
    settings: dict[str, Any] = registry().load("benchmarks", id).settings()
    return settings


def _require_other_than_starter(benchmark: str | None, config: RunConfig) -> None:
    """Check that a benchmark from a file has a model: the starter needs training tasks.

    Raises:
        UsageError: the model is the starter, and the benchmark's data is a file.
    """
    if benchmark is None or config.engine.model != "starter":
        return
    if registry().load("benchmarks", benchmark).data is not None:
        raise UsageError(
            f"which policy? {benchmark} has no training tasks to make a small policy from",
            hints=[
                "name a model: --model Qwen/Qwen3-0.6B, or the URL of a server",
                "or a run: --run RUN",
            ],
        )


def _is_greedy(benchmark: str | None, request: Request) -> bool:
    """Return whether a benchmark is greedy, and no argument asks for sampling."""
    if benchmark is None or not registry().load("benchmarks", benchmark).is_greedy:
        return False
    typed = [text.partition("=")[0] for text in request.overrides]
    sampled = {"rollout.temperature", "eval.num_samples"}
    return not sampled & {*request.flags, *typed}


def _has_weight(env: str) -> bool:
    return re.search(r":[0-9.]+$", env) is not None and "://" not in env


def _folder(request: Request, label: str, targets: Sequence[_Target]) -> Path:
    run = request.run
    if request.out is not None:
        if not (request.out / "config.yaml").exists():
            return request.out
        run = request.out  # a run keeps its evaluations in a folder
    if len(targets) == 1:
        label = targets[0][0] or label
    root = Path("runs") if run is None else run / "evaluations"
    return new_run_path(f"eval-{label}", root)


def _names(env_ids: Sequence[str], targets: Sequence[_Target]) -> list[str]:
    return [
        re.sub("[/:]+", "-", benchmark or env_id)
        for env_id, (benchmark, _) in zip(env_ids, targets, strict=True)
    ]


def _resumed(request: Request) -> Plan:
    from areal_gym.runs.evaluation import EvalJob

    assert request.out is not None
    arguments = {
        "--env": request.envs,
        "--benchmark": request.benchmarks,
        "--config": request.recipe,
        "--data, --reward or --tools": request.own,
        "--run": request.run,
        "--checkpoint": request.checkpoint,
    }
    if names := [name for name, value in arguments.items() if value]:
        raise UsageError(
            f"--resume continues the evaluation as it began: {', '.join(names)} cannot be given",
            hints=[f"continue: areal-gym eval --resume --out {quoted(request.out)}"],
        )
    paths = evaluation_paths(request.out)
    if not paths:
        raise UsageError(
            f"{request.out} has no evaluation to continue",
            hints=[*path_hints(request.out), "all evaluations: areal-gym list evals"],
        )
    plan = Plan([], request.out, request.out)
    for path in paths:
        info = Evaluation.open(path).info
        if info.status == "finished":
            plan.finished.append(info)
            continue
        config = resolve(
            file=path / "settings.yaml",
            overrides=request.overrides,
            flags=request.flags,
            is_chosen=request.trust,
        )
        checkpoint = info.policy.get("checkpoint")
        job = EvalJob(
            config=config,
            checkpoint=None if checkpoint is None else _still_there(Path(checkpoint)),
            greedy=info.is_greedy,
            out=path,
            mode="resume",
            benchmark=info.benchmark,
        )
        plan.jobs.append(job)
    return plan


def _still_there(checkpoint: Path) -> Path:
    if not (checkpoint / "config.json").is_file():
        raise NothingToDoError(
            f"the checkpoint {checkpoint} is missing: the rest cannot be measured",
            hints=[*path_hints(checkpoint), "measure another one: areal-gym eval --run RUN"],
        )
    return checkpoint
