"""Evaluates a policy on held-out tasks: by itself, and on a schedule while training goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_gym.chat import Renderer
from areal_gym.config import RunConfig
from areal_gym.config.online_settings import ONLINE, split_address
from areal_gym.engines.base import Engine, SamplingParams, SnapshotEngine
from areal_gym.errors import ConfigError, UsageError
from areal_gym.gateway.shared_gateway import gateway_at
from areal_gym.report.learning_curve import CurvePoint
from areal_gym.rollout.eval_report import EvalReport
from areal_gym.rollout.evaluate import evaluate as evaluate_policy
from areal_gym.rollout.evaluate import measure as measure_play
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.components import Components
from areal_gym.runs.episodes.policies import opened
from areal_gym.runs.open_engine import open_engine
from areal_gym.runs.policy_directory import policy_directory
from areal_gym.runs.run_display import Display, SilentDisplay
from areal_gym.runs.sandboxes import announce_sandboxes
from areal_gym.types import Trajectory
from areal_gym.utils.blocking import run_to_end


def evaluate(
    config: RunConfig,
    *,
    checkpoint: Path | None = None,
    out: Path | None = None,
    num_tasks: int | None = None,
    num_samples: int | None = None,
    greedy: bool = False,
    display: Display | None = None,
) -> EvalReport:
    """Measure a policy on held-out tasks.

    Args:
        config: the settings; those of a run, for its policy.
        checkpoint: a policy in Hugging Face's layout; by default `config.engine.model`.
        out: a directory that gets `trajectories/eval-STEP.jsonl`.
        num_tasks: how many held-out tasks; by default as the settings say.
        num_samples: episodes per task.
        greedy: the likeliest token always, instead of sampling.
        display: where to say what goes on.

    Raises:
        GymError: see `areal_gym.errors`.
    """
    shown = display or SilentDisplay()
    settings = config.eval.model_copy(
        update={
            "num_tasks": num_tasks or config.eval.num_tasks,
            "num_samples": num_samples or config.eval.num_samples,
        }
    )
    config = config.model_copy(update={"eval": settings})
    if config.env.id == ONLINE:
        raise UsageError(
            "an online run has no held-out tasks: programs outside measure the policy",
            hints=["serve it to them: areal-gym serve --run RUN"],
        )

    async def measure() -> EvalReport:
        components = Components.of(config)
        kept: list[Trajectory] = []
        label = f"evaluate ({'greedy' if greedy else 'sampled'})"
        total = config.eval.num_tasks * (1 if greedy else config.eval.num_samples)
        await announce_sandboxes(components, shown.say)
        if checkpoint is None and "://" in config.engine.model:
            shown.phase(label, total)
            report = await _measure_words(config, components, greedy, kept, shown.advance)
        else:
            policy = checkpoint or policy_directory(config, components, shown)[0]
            async with (
                open_engine(config, policy, display=shown) as (engine, renderer),
                gateway_at(*split_address(config.gateway)),
            ):
                shown.phase(label, total)
                report = await _measure(
                    config,
                    components,
                    engine,
                    renderer,
                    greedy=greedy,
                    keep=kept,
                    advance=shown.advance,
                )
        if out is not None:
            RunDir(out).save_trajectories(kept, name="eval-greedy" if greedy else "eval")
        return report

    return run_to_end(measure())


async def _measure_words(
    config: RunConfig,
    components: Components,
    greedy: bool,
    keep: list[Trajectory],
    advance: Callable[..., Any],
) -> EvalReport:
    """The policy that an OpenAI-compatible server has: messages in and out, no tokens.

    Raises:
        ConfigError: the settings want what only tokens can give.
    """
    if config.agent.id != "chat" or set(config.engine.kwargs) - {"model"}:
        raise ConfigError(
            f"{config.engine.model} answers messages of the environment only",
            hints=[
                "agent.id=chat; engine.kwargs.model=NAME is the model's name there",
                "agents play where tokens are recorded: --engine sglang --engine.url URL",
            ],
        )
    rollout, temperature = config.rollout, 0.0 if greedy else config.rollout.temperature
    params = SamplingParams(max_new_tokens=rollout.max_new_tokens, temperature=temperature)
    name = str(config.engine.kwargs.get("model", "default"))
    timeout_s = rollout.episode_timeout_s
    going = RunningEval(keep, advance)
    async with opened(config.engine.model, params, name, None, 0, timeout_s, config.env.id) as play:
        return await measure_play(
            components.make_env,
            play,
            temperature=temperature,
            split=config.eval.split,
            num_tasks=config.eval.num_tasks,
            num_samples=1 if greedy else config.eval.num_samples,
            max_in_flight=rollout.max_in_flight,
            seed=config.seed,
            env_id=config.env.id,
            on_progress=going.on_progress,
            on_trajectory=going.on_trajectory,
        )


@dataclass(slots=True)
class Evaluations:
    """A run's evaluations: step 0 before any update, then on a schedule, then at the end.

    A scheduled one runs beside training. Where the engine can give a snapshot of itself, it
    measures exactly one version; served policies are shared, so that a long evaluation sees the
    versions which are published meanwhile (its trajectories carry them, and the record says so).
    """

    config: RunConfig
    components: Components
    engine: Engine
    renderer: Renderer
    directory: RunDir
    display: Display
    log: Callable[[int, Mapping[str, Any]], None]
    """Called with step and metrics of each evaluation, besides `evaluations.jsonl`."""
    _task: asyncio.Task[CurvePoint] | None = field(default=None, init=False)
    _step_under_way: int | None = field(default=None, init=False)

    @property
    def points(self) -> list[CurvePoint]:
        """All evaluations of the run so far, those before an interruption too."""
        return points_of(self.directory)

    def scores(self) -> dict[int, float | None]:
        """Sampled held-out accuracy by step; None for the step that is being measured."""
        measured: dict[int, float | None] = {point.step: point.sampled for point in self.points}
        if self._step_under_way is not None:
            measured.setdefault(self._step_under_way, None)
        return measured

    def is_due(self, step: int) -> bool:
        """Whether the settings want an evaluation at this step, and none is on record."""
        if self.config.env.id == ONLINE:
            return False
        every = self.config.eval.every
        is_wanted = step == 0 or (every > 0 and step % every == 0) or not self.points
        return is_wanted and all(point.step != step for point in self.points)

    async def measure_start(self, step: int) -> None:
        """Evaluate the policy before anything is trained; a resumed run has that on record."""
        if self.is_due(step):
            await self._play(step, self.engine, is_shown=True)

    async def measure_end(self, step: int) -> None:
        """Evaluate the policy after training, unless that is on record."""
        await self.settle()
        if self.config.env.id != ONLINE and all(point.step != step for point in self.points):
            await self._play(step, self.engine, is_shown=True)

    async def begin(self, step: int) -> None:
        """Measure the policy as it is now while training goes on.

        Waits for the one before it first: two at once would take the engine from training.
        """
        await self.settle()
        engine = self.engine
        if isinstance(engine, SnapshotEngine):
            engine = await engine.snapshot()
        self._step_under_way = step
        self._task = asyncio.create_task(self._in_background(step, engine))

    async def settle(self) -> None:
        """Wait for the evaluation under way."""
        task, self._task = self._task, None
        if task is not None:
            await task
            self._step_under_way = None

    async def aclose(self) -> None:
        """Give up the evaluation under way."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _in_background(self, step: int, engine: Engine) -> CurvePoint:
        if engine is self.engine:
            return await self._play(step, engine, is_shown=False)
        try:
            await engine.start()
            return await self._play(step, engine, is_shown=False)
        finally:
            await engine.aclose()

    async def _play(self, step: int, engine: Engine, *, is_shown: bool) -> CurvePoint:
        config, display = self.config, self.display
        reports: list[EvalReport] = []
        kept: list[Trajectory] = []
        for greedy in (False, True):
            if is_shown:
                name = f"held-out, step {step} ({'greedy' if greedy else 'sampled'})"
                num_samples = 1 if greedy else config.eval.num_samples
                display.phase(name, config.eval.num_tasks * num_samples)
            reports.append(
                await _measure(
                    config,
                    self.components,
                    engine,
                    self.renderer,
                    greedy=greedy,
                    keep=None if greedy else kept,
                    advance=display.advance if is_shown else None,
                )
            )
        sampled, greedy_report = reports
        self.directory.save_trajectories(kept, name=f"eval-{step:06d}")
        row = {"step": step, "sampled": sampled.to_dict(), "greedy": greedy_report.to_dict()}
        self.directory.append_evaluation(row)
        point = _point(row)
        self.log(
            step,
            {
                "eval/sampled": point.sampled,
                "eval/sampled_low": point.low,
                "eval/sampled_high": point.high,
                "eval/greedy": point.greedy,
                **{
                    f"eval/sampled/{name}": score.pass_at_1.mean
                    for name, score in sampled.by_env.items()
                },
            },
        )
        versions = sampled.policy_versions
        mixed = f", versions {versions[0]} to {versions[-1]}" if len(versions) > 1 else ""
        display.say(
            f"held-out at step {step}: {point.sampled:.3f} sampled "
            f"({point.low:.3f} to {point.high:.3f}), {point.greedy:.3f} greedy, "
            f"{sampled.num_tasks} tasks{mixed}"
        )
        for name, score in sampled.by_env.items():
            display.say(
                f"  {name}: {score.pass_at_1.mean:.3f} sampled, "
                f"{greedy_report.by_env[name].pass_at_1.mean:.3f} greedy, {score.num_tasks} tasks"
            )
        return point


def points_of(directory: RunDir) -> list[CurvePoint]:
    """Return the evaluations on record, in their order."""
    return [_point(row) for row in directory.read_evaluations()]


def _point(row: Mapping[str, Any]) -> CurvePoint:
    sampled = row["sampled"]
    return CurvePoint(
        step=row["step"],
        sampled=sampled["pass@1"],
        low=sampled["pass@1_low"],
        high=sampled["pass@1_high"],
        greedy=row["greedy"]["pass@1"],
    )


@dataclass(slots=True)
class RunningEval:
    """Keeps the trajectories of an evaluation, and shows its progress."""

    keep: list[Trajectory] | None
    advance: Callable[..., Any] | None
    _reward: float = 0.0
    _num_scored: int = 0
    _num_failed: int = 0

    def on_trajectory(self, trajectory: Trajectory) -> None:
        """Keep the trajectory and count its score."""
        if self.keep is not None:
            self.keep.append(trajectory)
        if trajectory.stop_reason.is_failure:
            self._num_failed += 1
        else:
            self._reward += trajectory.reward
            self._num_scored += 1

    def on_progress(self, done: int, total: int) -> None:
        """Show how many episodes are done, and how many failed."""
        if self.advance is not None:
            failed = f", {self._num_failed} failures" if self._num_failed else ""
            reward = self._reward / max(1, self._num_scored)
            self.advance(done, f"reward {reward:.3f}{failed}")


async def _measure(
    config: RunConfig,
    components: Components,
    engine: Engine,
    renderer: Renderer,
    *,
    greedy: bool,
    keep: list[Trajectory] | None,
    advance: Callable[..., Any] | None,
) -> EvalReport:
    going = RunningEval(keep, advance)
    return await evaluate_policy(
        components.make_env,
        components.agent,
        engine,
        renderer,
        split=config.eval.split,
        num_tasks=config.eval.num_tasks,
        num_samples=1 if greedy else config.eval.num_samples,
        temperature=0.0 if greedy else config.rollout.temperature,
        top_p=1.0 if greedy else config.rollout.top_p,
        top_k=0 if greedy else config.rollout.top_k,
        max_new_tokens=config.rollout.max_new_tokens,
        max_in_flight=config.rollout.max_in_flight,
        timeout_s=config.rollout.episode_timeout_s,
        seed=config.seed,
        env_id=config.env.id,
        agent_id=config.agent.id,
        on_progress=going.on_progress,
        on_trajectory=going.on_trajectory,
    )
