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
from areal_gym.report.chart_table import evaluation_of
from areal_gym.rollout.episode_runners import play_with_engine
from areal_gym.rollout.eval_report import EvalReport
from areal_gym.rollout.evaluate import measure
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.runs.components import Components
from areal_gym.runs.episodes.policies import opened
from areal_gym.runs.open_engine import open_engine
from areal_gym.runs.policy_directory import policy_directory
from areal_gym.runs.run_display import Display
from areal_gym.types import Trajectory
from areal_gym.utils.blocking import run_to_end


def evaluate(
    config: RunConfig,
    *,
    checkpoint: Path | None = None,
    out: Path | None = None,
    greedy: bool = False,
    display: Display | None = None,
) -> EvalReport:
    """Measure the policy in `checkpoint`, by default `config.engine.model`, on held-out tasks.

    `greedy` takes the likeliest token always. `out` gets `trajectories/eval.jsonl`.
    """
    if config.env.id == ONLINE:
        raise UsageError(
            "an online run has no held-out tasks: programs outside measure the policy",
            hints=["serve it to them: areal-gym serve --run RUN"],
        )
    return run_to_end(_evaluate(config, checkpoint, out, greedy, display or Display()))


async def _evaluate(
    config: RunConfig, checkpoint: Path | None, out: Path | None, greedy: bool, display: Display
) -> EvalReport:
    components = Components.of(config)
    await components.announce_sandboxes(display.say)
    watch = _Watch(display.advance)
    label = f"evaluate ({'greedy' if greedy else 'sampled'})"
    total = config.eval.num_tasks * (1 if greedy else config.eval.num_samples)
    if checkpoint is None and "://" in config.engine.model:
        display.phase(label, total)
        report = await _measure_texts(config, components, greedy, watch)
    else:
        policy = checkpoint or policy_directory(config, components, display)[0]
        async with (
            open_engine(config, policy, display=display) as (engine, renderer),
            gateway_at(*split_address(config.gateway)),
        ):
            display.phase(label, total)
            report = await _measure(config, components, engine, renderer, greedy, watch)
    if out is not None:
        name = "eval-greedy" if greedy else "eval"
        await asyncio.to_thread(RunDir(out).save_trajectories, watch.trajectories, name=name)
    return report


async def _measure_texts(
    config: RunConfig, components: Components, greedy: bool, watch: _Watch
) -> EvalReport:
    """Measure the policy of an OpenAI-compatible server: messages in and out, no tokens.

    Raises ConfigError if the settings want what only tokens can give.
    """
    if config.agent.id != "chat" or set(config.engine.kwargs) - {"model"}:
        raise ConfigError(
            f"{config.engine.model} answers messages of the environment only",
            hints=[
                "agent.id=chat; engine.kwargs.model=NAME is the model's name there",
                "agents play where tokens are recorded: --engine sglang --engine.url URL",
            ],
        )
    options, rollout = _options(config, greedy, watch), config.rollout
    params = SamplingParams(
        max_new_tokens=rollout.max_new_tokens, temperature=options["temperature"]
    )
    name = str(config.engine.kwargs.get("model", "default"))
    timeout_s = rollout.episode_timeout_s
    async with opened(config.engine.model, params, name, None, 0, timeout_s, config.env.id) as play:
        return await measure(components.make_env, play, **options)


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
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _step_under_way: int | None = field(default=None, init=False)

    def scores(self) -> dict[int, float | None]:
        """Return sampled held-out accuracy by step; None for the step that is being measured."""
        measured = {row["step"]: row["sampled"] for row in evaluations_of(self.directory)}
        if self._step_under_way is not None:
            measured.setdefault(self._step_under_way, None)
        return measured

    def is_due(self, step: int) -> bool:
        """Return whether the settings want an evaluation at this step that is not on record."""
        every, measured = self.config.eval.every, self._measured()
        is_wanted = step == 0 or (every > 0 and step % every == 0) or not measured
        return self.config.env.id != ONLINE and is_wanted and step not in measured

    async def measure_start(self, step: int) -> None:
        """Evaluate the policy before anything is trained; a resumed run has that on record."""
        if self.is_due(step):
            await self._play(step, self.engine, is_shown=True)

    async def measure_end(self, step: int) -> None:
        """Evaluate the policy after training, unless that is on record."""
        await self.settle()
        if self.config.env.id != ONLINE and step not in self._measured():
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

    def _measured(self) -> set[int]:
        return {row["step"] for row in self.directory.read_evaluations()}

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
        reports: list[EvalReport] = []
        watches = [_Watch(display.advance if is_shown else None) for _ in range(2)]
        for greedy, watch in zip((False, True), watches, strict=True):
            if is_shown:
                name = f"held-out, step {step} ({'greedy' if greedy else 'sampled'})"
                num_samples = 1 if greedy else config.eval.num_samples
                display.phase(name, config.eval.num_tasks * num_samples)
            report = await _measure(config, self.components, engine, self.renderer, greedy, watch)
            reports.append(report)
        sampled, greedy_report = reports
        await asyncio.to_thread(
            self.directory.save_trajectories, watches[0].trajectories, name=f"eval-{step:06d}"
        )
        row: dict[str, Any] = {"step": step, "sampled": sampled.to_dict()}
        row["greedy"] = greedy_report.to_dict()
        self.directory.append_evaluation(row)
        accuracy, low, high = (row["sampled"][f"pass@1{end}"] for end in ("", "_low", "_high"))
        greedy_accuracy = row["greedy"]["pass@1"]
        metrics = {
            "eval/sampled": accuracy,
            "eval/sampled_low": low,
            "eval/sampled_high": high,
            "eval/greedy": greedy_accuracy,
        }
        for name, score in sampled.by_env.items():
            metrics[f"eval/sampled/{name}"] = score.pass_at_1.mean
        self.log(step, metrics)
        versions = sampled.policy_versions
        mixed = f", versions {versions[0]} to {versions[-1]}" if len(versions) > 1 else ""
        display.say(
            f"held-out at step {step}: {accuracy:.3f} sampled ({low:.3f} to {high:.3f}), "
            f"{greedy_accuracy:.3f} greedy, {sampled.num_tasks} tasks{mixed}"
        )
        for name, score in sampled.by_env.items():
            display.say(
                f"  {name}: {score.pass_at_1.mean:.3f} sampled, "
                f"{greedy_report.by_env[name].pass_at_1.mean:.3f} greedy, {score.num_tasks} tasks"
            )


def evaluations_of(directory: RunDir) -> list[dict[str, Any]]:
    """Return the evaluations on record, in their order, as `evaluation_of` flattens them."""
    return [evaluation_of(row) for row in directory.read_evaluations()]


@dataclass(slots=True)
class _Watch:
    advance: Callable[..., Any] | None
    trajectories: list[Trajectory] = field(default_factory=list)

    def on_progress(self, done: int, total: int) -> None:
        if self.advance is not None:
            scored = [t.reward for t in self.trajectories if not t.stop_reason.is_failure]
            num_failed = len(self.trajectories) - len(scored)
            failed = f", {num_failed} failures" if num_failed else ""
            self.advance(done, f"reward {sum(scored) / max(1, len(scored)):.3f}{failed}")


def _options(config: RunConfig, greedy: bool, watch: _Watch) -> dict[str, Any]:
    return {
        "temperature": 0.0 if greedy else config.rollout.temperature,
        "split": config.eval.split,
        "num_tasks": config.eval.num_tasks,
        "num_samples": 1 if greedy else config.eval.num_samples,
        "max_in_flight": config.rollout.max_in_flight,
        "seed": config.seed,
        "env_id": config.env.id,
        "on_progress": watch.on_progress,
        "on_trajectory": watch.trajectories.append,
    }


async def _measure(
    config: RunConfig,
    components: Components,
    engine: Engine,
    renderer: Renderer,
    greedy: bool,
    watch: _Watch,
) -> EvalReport:
    options, rollout = _options(config, greedy, watch), config.rollout
    params = SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=options["temperature"],
        top_p=1.0 if greedy else rollout.top_p,
        top_k=0 if greedy else rollout.top_k,
    )
    play = play_with_engine(
        *(components.agent, engine, renderer, params, rollout.episode_timeout_s),
        env_id=config.env.id,
        agent_id=config.agent.id,
    )
    return await measure(components.make_env, play, **options)
