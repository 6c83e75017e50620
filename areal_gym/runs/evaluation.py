"""Evaluates a policy on held-out tasks: by itself, or on a schedule during training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from areal_gym.chat import Renderer
from areal_gym.config import RunConfig
from areal_gym.config.online_settings import ONLINE, split_address
from areal_gym.engines.base import Engine, SnapshotEngine
from areal_gym.errors import UsageError
from areal_gym.gateway.shared_gateway import gateway_at
from areal_gym.report.chart_table import evaluations_of as flattened
from areal_gym.rollout.eval_report import EvalReport
from areal_gym.run_dir.evaluation_writer import EvaluationWriter
from areal_gym.run_dir.evaluations import is_graded_reward
from areal_gym.run_dir.run_dir import RunDir, RunMode
from areal_gym.run_dir.run_list import new_run_path
from areal_gym.runs.components import Components
from areal_gym.runs.measuring import Watch, measure_policy, measure_texts
from areal_gym.runs.open_engine import open_engine
from areal_gym.runs.policy_directory import policy_directory
from areal_gym.runs.reward_trial import try_rewards
from areal_gym.runs.run_display import Display
from areal_gym.runs.task_counts import announce_heldout
from areal_gym.utils.blocking import run_to_end


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalJob:
    """One evaluation: which policy, in which environment, and where it is written."""

    config: RunConfig
    checkpoint: Path | None = None
    """The policy; by default `config.engine.model`."""
    greedy: bool = False
    """Whether the likeliest token is always taken."""
    out: Path | None = None
    """The evaluation's directory (see `areal_gym.run_dir.evaluations`); None writes nothing."""
    mode: RunMode = "new"
    benchmark: str | None = None

    @property
    def num_samples(self) -> int:
        """Episodes per task."""
        return 1 if self.greedy else self.config.eval.num_samples

    @property
    def asks_server(self) -> bool:
        """Whether the policy is a server that answers messages."""
        return self.checkpoint is None and "://" in self.config.engine.model

    def facts(self) -> dict[str, Any]:
        """Return how the policy is evaluated, in the form of `EvaluationInfo`."""
        config = self.config
        rollout, is_greedy = config.rollout, self.greedy
        sampling = {
            "temperature": 0.0 if is_greedy else rollout.temperature,
            "top_p": 1.0 if is_greedy else rollout.top_p,
            "top_k": 0 if is_greedy else rollout.top_k,
            "max_new_tokens": rollout.max_new_tokens,
        }
        return {
            "env": config.env.id,
            "env_kwargs": config.env.model_dump(mode="json")["kwargs"],
            "benchmark": self.benchmark,
            "split": config.eval.split,
            "policy": _policy_facts(config, self.checkpoint),
            "agent": config.agent.id,
            "engine": "server" if self.asks_server else config.engine.id,
            "sampling": sampling,
            "seed": config.seed,
            "num_tasks": config.eval.num_tasks,
            "num_samples": self.num_samples,
            "success_reward": 1.0,
        }


def _policy_facts(config: RunConfig, checkpoint: Path | None) -> dict[str, Any]:
    if checkpoint is None:
        return {"model": config.engine.model}
    path = checkpoint.resolve()
    facts: dict[str, Any] = {"model": config.engine.model, "checkpoint": str(path)}
    if path.parent.name == "checkpoints":
        facts["run"] = str(path.parent.parent)
        step = path.name.removeprefix("step-")
        facts["step"] = int(step) if step.isdigit() else None
    return facts


def evaluate(
    config: RunConfig,
    *,
    checkpoint: Path | None = None,
    out: Path | None = None,
    greedy: bool = False,
    display: Display | None = None,
) -> EvalReport:
    """Evaluate a policy on held-out tasks.

    Args:
        config: the settings of a run.
        checkpoint: the policy; by default `config.engine.model`.
        out: the evaluation's directory; if it is a run, a folder in the run's `evaluations/`.
        greedy: whether the likeliest token is always taken.
        display: shows progress.
    """
    if out is not None and RunDir(out).config_file.exists():
        out = new_run_path(f"eval-{config.env.id}", RunDir(out).evaluations_dir)
    job = EvalJob(config=config, checkpoint=checkpoint, out=out, greedy=greedy)
    return evaluate_jobs([job], display)[0]


def evaluate_jobs(jobs: Sequence[EvalJob], display: Display | None = None) -> list[EvalReport]:
    """Evaluate one after another; the engine stays open while policy and engine are the same.

    All directories are claimed before the first episode is played.

    Raises:
        UsageError: a job has no held-out tasks, or its directory is not writable.
    """
    if any(job.config.env.id == ONLINE for job in jobs):
        raise UsageError(
            "an online run has no held-out tasks: programs outside measure the policy",
            hints=["serve it to them: areal-gym serve --run RUN"],
        )
    return run_to_end(_evaluate_jobs(jobs, display or Display()))


async def _evaluate_jobs(jobs: Sequence[EvalJob], display: Display) -> list[EvalReport]:
    reports = []
    with ExitStack() as claimed:
        writers = [claimed.enter_context(_writer_of(job)) if job.out else None for job in jobs]
        async with _OpenPolicy(display) as policy:
            for job, writer in zip(jobs, writers, strict=True):
                for repair in writer.repairs if writer is not None else ():
                    display.say(f"{job.out}: {repair}")
                report = await _evaluate(job, policy, writer, display)
                if writer is not None:
                    await asyncio.to_thread(writer.finish, report.to_dict())
                reports.append(report)
    return reports


def _writer_of(job: EvalJob) -> EvaluationWriter:
    assert job.out is not None
    settings = yaml.safe_dump(job.config.model_dump(mode="json"), sort_keys=False)
    return EvaluationWriter(job.out, job.facts(), settings=settings, mode=job.mode)


async def _evaluate(
    job: EvalJob, policy: _OpenPolicy, writer: EvaluationWriter | None, display: Display
) -> EvalReport:
    config = job.config
    components = Components.of(config).for_evaluation(config)
    await components.make_shared(display)
    announce_heldout(config, components, display.say)
    await try_rewards(components, config.eval.split, display.say)
    await components.announce_sandboxes(display.say)
    watch = Watch(display.advance, writer)
    label = f"evaluate ({'greedy' if job.greedy else 'sampled'})"
    total = config.eval.num_tasks * job.num_samples
    if job.asks_server:
        display.phase(label, total)
        return await measure_texts(config, components, job.greedy, watch)
    engine, renderer = await policy.open(job, components)
    async with gateway_at(*split_address(config.gateway)):
        display.phase(label, total)
        return await measure_policy(config, components, engine, renderer, job.greedy, watch)


class _OpenPolicy:
    """The open engine of the latest job; an async context manager."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._stack = AsyncExitStack()
        self._key: object = None
        self._opened: tuple[Engine, Renderer]

    async def __aenter__(self) -> _OpenPolicy:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def open(self, job: EvalJob, components: Components) -> tuple[Engine, Renderer]:
        """Return engine and renderer for the job; reuse those of the previous job if they fit."""
        config = job.config
        policy = job.checkpoint or policy_directory(config, components, self._display)[0]
        rollout = config.rollout
        key = (policy, config.engine, config.model, rollout.template_kwargs, rollout.thinking)
        if key != self._key:
            await self._stack.aclose()
            opening = open_engine(config, policy, display=self._display)
            self._opened = await self._stack.enter_async_context(opening)
            self._key = key
        return self._opened


@dataclass(slots=True)
class Evaluations:
    """A run's evaluations: before any update (`eval.at_start`), on a schedule, and at the end.

    A scheduled evaluation runs beside training. If the engine can make a snapshot of itself, it
    measures exactly one version. Servers are shared with training, so a long evaluation samples
    from all versions that are published meanwhile, which its trajectories and its record tell.
    """

    config: RunConfig
    components: Components
    engine: Engine
    renderer: Renderer
    directory: RunDir
    display: Display
    log: Callable[[int, Mapping[str, Any]], None]
    """Called with the step and the metrics of each evaluation, besides `evaluations.jsonl`."""
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _step_under_way: int | None = field(default=None, init=False)

    def scores(self) -> dict[int, tuple[float, float] | None]:
        """Return sampled accuracy and reward by step; None for a step that is being evaluated."""
        rows = [(row["step"], row["sampled"]) for row in self.directory.read_evaluations()]
        measured: dict[int, tuple[float, float] | None]
        measured = {step: (scores["pass@1"], scores.get("reward", 0.0)) for step, scores in rows}
        if self._step_under_way is not None:
            measured.setdefault(self._step_under_way, None)
        return measured

    def is_due(self, step: int) -> bool:
        """Return whether the settings ask for an evaluation at this step that is not recorded."""
        settings, measured = self.config.eval, self._measured()
        is_first = settings.at_start and (step == 0 or not measured)
        is_wanted = is_first or settings.is_scheduled(step)
        return is_evaluated(self.config) and is_wanted and step not in measured

    async def measure_start(self, step: int) -> None:
        """Evaluate the policy before training, if the settings ask for it and no row has it."""
        if self.is_due(step):
            await self._play(step, self.engine, is_shown=True)

    async def measure_end(self, step: int) -> None:
        """Evaluate the policy after training, unless that is recorded."""
        await self.settle()
        if is_evaluated(self.config) and step not in self._measured():
            await self._play(step, self.engine, is_shown=True)

    async def begin(self, step: int) -> None:
        """Start to evaluate the current policy while training continues.

        Waits for the previous evaluation first: two at once would take the engine from training.
        """
        await self.settle()
        engine = self.engine
        if isinstance(engine, SnapshotEngine):
            engine = await engine.snapshot()
        self._step_under_way = step
        self._task = asyncio.create_task(self._in_background(step, engine))

    def _measured(self) -> set[int]:
        return {row["step"] for row in self.directory.read_evaluations()}

    async def settle(self) -> None:
        """Wait for the running evaluation."""
        task, self._task = self._task, None
        if task is not None:
            await task
            self._step_under_way = None

    async def aclose(self) -> None:
        """Cancel the running evaluation."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _in_background(self, step: int, engine: Engine) -> None:
        if engine is self.engine:
            await self._play(step, engine, is_shown=False)
            return
        try:
            await engine.start()
            await self._play(step, engine, is_shown=False)
        finally:
            await engine.aclose()

    async def _play(self, step: int, engine: Engine, *, is_shown: bool) -> None:
        config, display = self.config, self.display
        components = self.components.for_evaluation(config)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        reports: list[EvalReport] = []
        watches = [Watch(display.advance if is_shown else None) for _ in range(2)]
        for greedy, watch in zip((False, True), watches, strict=True):
            if is_shown:
                name = f"held-out, step {step} ({'greedy' if greedy else 'sampled'})"
                num_samples = 1 if greedy else config.eval.num_samples
                display.phase(name, config.eval.num_tasks * num_samples)
            report = await measure_policy(config, components, engine, self.renderer, greedy, watch)
            reports.append(report)
        sampled, greedy_report = reports
        await asyncio.to_thread(
            self.directory.save_trajectories, watches[0].trajectories, name=f"eval-{step:06d}"
        )
        row: dict[str, Any] = {"step": step, "started_at": started_at}
        row |= {"sampled": sampled.to_dict(), "greedy": greedy_report.to_dict()}
        self.directory.append_evaluation(row)
        accuracy, low, high = (row["sampled"][f"pass@1{end}"] for end in ("", "_low", "_high"))
        greedy_accuracy = row["greedy"]["pass@1"]
        metrics = {
            "eval/sampled": accuracy,
            "eval/sampled_low": low,
            "eval/sampled_high": high,
            "eval/greedy": greedy_accuracy,
        }
        ends = {end: row["sampled"][f"reward{end}"] for end in ("", "_low", "_high")}
        metrics |= {f"eval/reward{end}": x for end, x in ends.items() if x is not None}
        for name, score in sampled.by_env.items():
            metrics[f"eval/sampled/{name}"] = score.pass_at_1.mean
        for role, role_score in sampled.by_role.items():
            metrics[f"eval/role/{role}"] = role_score.reward
        self.log(step, metrics)
        versions = sampled.policy_versions
        mixed = f", versions {versions[0]} to {versions[-1]}" if len(versions) > 1 else ""
        display.say(
            f"held-out at step {step}: {accuracy:.3f} sampled ({low:.3f} to {high:.3f}), "
            f"{greedy_accuracy:.3f} greedy, {sampled.num_tasks} tasks{mixed}"
            f"{_reward_of(row['sampled'])}"
        )
        for name, score in sampled.by_env.items():
            display.say(
                f"  {name}: {score.pass_at_1.mean:.3f} sampled, "
                f"{greedy_report.by_env[name].pass_at_1.mean:.3f} greedy, {score.num_tasks} tasks"
            )
        for role, role_score in sampled.by_role.items():
            fixed = ", another policy" if role_score.is_fixed else ""
            display.say(
                f"  role {role}: reward {role_score.reward:.3f}, "
                f"{role_score.num_episodes} episodes{fixed}"
            )


def _reward_of(scores: Mapping[str, Any]) -> str:
    """Return the mean reward as text, if it says more than the accuracy."""
    if not is_graded_reward(scores):
        return ""
    low, high = scores["reward_low"], scores["reward_high"]
    interval = "" if low is None else f" ({low:.3f} to {high:.3f})"
    return f"; reward {scores['reward']:.3f}{interval}"


def is_evaluated(config: RunConfig) -> bool:
    """Return whether the run has held-out tasks to evaluate on."""
    return config.env.id != ONLINE and config.eval.num_tasks > 0


def evaluations_of(directory: RunDir) -> list[dict[str, Any]]:
    """Return the recorded evaluations in order, as `report.chart_table` flattens them."""
    return flattened(directory.read_evaluations())
