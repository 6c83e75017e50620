"""The composition root: settings to objects, a run from its first line to its last.

The only module that knows all parts. `areal-gym train` and `areal-gym eval` are thin around
`train` and `evaluate`; a script may call them as well.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

from areal_gym.agents.base import Agent
from areal_gym.config import RunConfig
from areal_gym.engines.base import Engine
from areal_gym.envs.base import TextEnv
from areal_gym.errors import ConfigError, UsageError
from areal_gym.learning_curve import CurvePoint, draw_learning_curve
from areal_gym.plugins import registry
from areal_gym.provenance import entries_used
from areal_gym.rendering import Renderer
from areal_gym.rollout.evaluate import EvalReport
from areal_gym.rollout.evaluate import evaluate as evaluate_policy
from areal_gym.rollout.runner import RolloutRunner, RolloutStats
from areal_gym.rundir import RunDir, RunMode, write_atomic
from areal_gym.types import Group, Trajectory
from areal_gym.version import __version__

__all__ = ["Display", "SilentDisplay", "evaluate", "relax_garbage_collection", "train"]


class Display(Protocol):
    """Where a run says what it does; `areal_gym.cli.display` shows it to a person."""

    def say(self, text: str) -> None:
        """A line of talk."""
        ...

    def phase(self, name: str, total: int = 0) -> None:
        """A new part of the run begins; `total` is its number of units, 0 if unknown."""
        ...

    def advance(self, done: int, detail: str = "") -> None:
        """`done` units of the phase are ready."""
        ...

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """A training step ended."""
        ...

    def watch(self, stats: Callable[[], str] | None) -> None:
        """Where episodes wait, asked for while the display refreshes; None to stop asking."""
        ...


class SilentDisplay:
    """For scripts and tests."""

    def say(self, text: str) -> None:
        """Nothing."""

    def phase(self, name: str, total: int = 0) -> None:
        """Nothing."""

    def advance(self, done: int, detail: str = "") -> None:
        """Nothing."""

    def step(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def watch(self, stats: Callable[[], str] | None) -> None:
        """Nothing."""


def train(
    config: RunConfig, *, run_dir: Path, mode: RunMode = "new", display: Display | None = None
) -> dict[str, Any]:
    """Run the whole of it and return the summary, which is also in `summary.json`.

    Interrupted (Ctrl-C), it saves a checkpoint of what was learned and raises KeyboardInterrupt;
    `mode="resume"` goes on from there.

    Raises:
        GymError: see `areal_gym.errors`; what was learned so far is saved where the disk allows.
    """
    run = _Training(config, display or SilentDisplay())
    with RunDir.open(run_dir, mode) as directory:
        return asyncio.run(run.play(directory, is_resumed=mode == "resume"))


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

    async def measure() -> EvalReport:
        parts = _Parts.of(config)
        policy = checkpoint or _policy_directory(config, parts, shown)[0]
        async with _engine(config, policy) as (engine, renderer):
            kept: list[Trajectory] = []
            report = await _measure(
                config, parts, engine, renderer, shown, "evaluate", greedy=greedy, keep=kept
            )
            if out is not None:
                RunDir(out).save_trajectories(kept, name="eval-greedy" if greedy else "eval")
            return report

    return asyncio.run(measure())


def relax_garbage_collection() -> None:
    """Look for reference cycles more rarely, and never among what is loaded already.

    Trajectories are many small objects and hold no cycles; Python's default looks through all of
    them again and again, which costs about a sixth of an episode's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


# ---- parts ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """What the settings name, imported."""

    env_class: Callable[..., TextEnv]
    env_kwargs: Mapping[str, Any]
    agent: Agent

    @classmethod
    def of(cls, config: RunConfig) -> _Parts:
        found = registry()
        env = found.get("envs", config.env.id)
        parts = cls(
            env_class=env.load(),
            env_kwargs={**getattr(env.spec, "kwargs", {}), **config.env.kwargs},
            agent=found.load("agents", config.agent.id)(**config.agent.kwargs),
        )
        parts.make_env().close()  # a wrong argument is found before anything has been waited for
        return parts

    def make_env(self) -> TextEnv:
        """A new instance.

        Raises:
            ConfigError: the environment takes no such argument.
        """
        try:
            return self.env_class(**self.env_kwargs)
        except TypeError as error:
            raise ConfigError(
                f"env.kwargs do not fit: {error}", hints=["its arguments: areal-gym show ENV"]
            ) from error


def _policy_directory(
    config: RunConfig, parts: _Parts, display: Display
) -> tuple[Path, dict[str, Any]]:
    """Where the initial policy is, and how it came to be (for the starter policy)."""
    if config.engine.model != "starter":
        directory = Path(config.engine.model)
        if not (directory / "config.json").exists():
            raise ConfigError(
                f"engine.model = {config.engine.model!r} is no checkpoint directory",
                hints=[
                    "it must hold config.json, *.safetensors and tokenizer.json",
                    "or let areal-gym build a small policy: engine.model=starter",
                ],
            )
        return directory, {}
    import torch

    from areal_gym.starter.warm_start import prepare_starter

    # Small products on several threads wait for each other: on a busy machine, many times longer.
    torch.set_num_threads(config.trainer.num_threads)
    display.phase("warm start")
    total = 0

    def progress(done: int, at_most: int, detail: str) -> None:
        nonlocal total
        if at_most != total:
            total = at_most
            display.phase("warm start", total)
        display.advance(done, detail)

    key = yaml.safe_dump({"id": config.env.id, "kwargs": dict(parts.env_kwargs)})
    starter = prepare_starter(parts.make_env(), env_key=key, seed=config.seed, on_progress=progress)
    facts = {**starter.facts, "best_demonstrator": starter.best_demonstrator}
    if starter.is_cached:
        display.say(f"warm start: from the cache ({starter.directory})")
        facts["warm_start_s"] = 0.0
    else:
        display.say(
            f"warm start: {facts['num_steps']} steps of imitation in {facts['warm_start_s']:.0f} s"
        )
    shown = ", ".join(
        f"{name} {d['accuracy']:.2f} (x{d['share']:.2f})"
        for name, d in facts["demonstrators"].items()
    )
    display.say(f"  it imitates demonstrators whose accuracy (and share) is: {shown}")
    return starter.directory, facts


@asynccontextmanager
async def _engine(config: RunConfig, policy: Path) -> AsyncIterator[tuple[Engine, Renderer]]:
    renderer = Renderer.from_checkpoint(policy)
    engine_class = registry().load("engines", config.engine.id)
    if not hasattr(engine_class, "from_settings"):
        raise UsageError(
            f"the engine {config.engine.id!r} cannot serve a checkpoint",
            hints=["engine.id=embedded and engine.id=sglang do"],
        )
    engine: Engine = engine_class.from_settings(policy, config.engine)
    try:
        await engine.start()
        yield engine, renderer
    finally:
        await engine.aclose()


async def _measure(
    config: RunConfig,
    parts: _Parts,
    engine: Engine,
    renderer: Renderer,
    display: Display,
    name: str,
    *,
    greedy: bool,
    keep: list[Trajectory] | None = None,
) -> EvalReport:
    label = f"{name} ({'greedy' if greedy else 'sampled'})"
    num_samples = 1 if greedy else config.eval.num_samples
    display.phase(label, config.eval.num_tasks * num_samples)
    return await evaluate_policy(
        parts.make_env,
        parts.agent,
        engine,
        renderer,
        split=config.eval.split,
        num_tasks=config.eval.num_tasks,
        num_samples=num_samples,
        temperature=0.0 if greedy else config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        max_in_flight=config.rollout.max_in_flight,
        timeout_s=config.rollout.episode_timeout_s,
        seed=config.seed,
        env_id=config.env.id,
        agent_id=config.agent.id,
        on_progress=lambda done, total: display.advance(done),
        on_trajectory=None if keep is None else keep.append,
    )


# ---- training ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Training:
    """One training run."""

    config: RunConfig
    display: Display
    points: list[CurvePoint] = field(default_factory=list)

    async def play(self, directory: RunDir, *, is_resumed: bool) -> dict[str, Any]:
        from areal_gym.modeling.checkpoint import load_checkpoint
        from areal_gym.modeling.device import pick_device
        from areal_gym.trainer.checkpoint import (
            latest_checkpoint,
            require_space,
            restore_learner,
        )

        config, display = self.config, self.display
        used = entries_used(config)
        parts = _Parts.of(config)
        self._announce(directory, used)
        directory.save_config(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
        directory.save_provenance(entry.to_dict() for entry in used)
        policy, warm_start = _policy_directory(config, parts, display)
        first_step = 1
        found = latest_checkpoint(directory.checkpoints_dir) if is_resumed else None
        source = policy
        if found is not None:
            step, source = found
            directory.rewind(step)
            first_step = step + 1
            display.say(f"resumed at step {step} from {source}")
        train_class = registry().load("trainers", config.trainer.id)
        learner = train_class(
            load_checkpoint(source, device=pick_device(config.trainer.device)),
            config.trainer,
            advantage=registry().load("advantages", config.trainer.advantage),
            loss=registry().load("losses", config.trainer.loss),
            temperature=config.rollout.temperature,
            constant_length=config.rollout.max_new_tokens,
        )
        require_space(learner, directory.path)
        rollout_state = None
        if found is not None:
            rollout_state = restore_learner(learner, source)
        async with _engine(config, source) as (engine, renderer):
            if first_step > 1:
                await _weight_sync(engine).publish(learner.weights(), first_step - 1)
            before = await self._point(directory, parts, engine, renderer, first_step - 1)
            train_s = await self._steps(
                directory, parts, engine, renderer, learner, policy, first_step, rollout_state
            )
            after = await self._point(directory, parts, engine, renderer, config.steps)
        summary = {
            "env": config.env.id,
            "heldout_before": before.sampled,
            "heldout_after": after.sampled,
            "heldout_greedy_before": before.greedy,
            "heldout_greedy_after": after.greedy,
            "heldout_after_interval": [after.low, after.high],
            "num_heldout_tasks": config.eval.num_tasks,
            "num_steps": config.steps,
            "first_step": first_step,
            "warm_start_s": warm_start.get("warm_start_s", 0.0),
            "train_s": round(train_s, 2),
            "seed": config.seed,
            "warm_start": warm_start,
            "checkpoint": f"checkpoints/step-{config.steps:06d}",
            "version": __version__,
        }
        self._conclude(directory, summary)
        return summary

    async def _steps(
        self,
        directory: RunDir,
        parts: _Parts,
        engine: Engine,
        renderer: Renderer,
        learner: Any,
        tokenizer_dir: Path,
        first_step: int,
        rollout_state: Mapping[str, Any] | None,
    ) -> float:
        """Train to the end; saves what was learned, also when it is interrupted."""
        from areal_gym.trainer.checkpoint import save_learner
        from areal_gym.trainer.loop import train_loop

        config, display = self.config, self.display
        done = saved = first_step - 1
        weight_sync = _weight_sync(engine)
        loggers = [registry().load("loggers", id)(directory.path) for id in config.loggers]

        def save() -> None:
            nonlocal saved
            if saved != done and done > 0:
                save_learner(
                    learner, directory.checkpoints_dir, done, tokenizer_dir, runner.state()
                )
                saved = done

        async def on_step(step: int, metrics: dict[str, float], groups: Sequence[Group]) -> None:
            nonlocal done
            done = step
            row = {"step": step, **metrics, **_rollout_metrics(runner.stats())}
            directory.append_metrics(row)
            directory.save_trajectories((t for group in groups for t in group), name=step)
            for logger in loggers:
                logger.log(step, row)
            display.step(step, config.steps, row)
            if config.trainer.save_every and step % config.trainer.save_every == 0:
                save()
            if config.eval.every and step % config.eval.every == 0 and step < config.steps:
                await self._point(directory, parts, engine, renderer, step)
                display.phase("train", config.steps)

        relax_garbage_collection()
        display.phase("train", config.steps)
        start_s = time.perf_counter()
        runner = RolloutRunner(
            parts.make_env,
            parts.agent,
            engine,
            renderer,
            config.rollout,
            seed=config.seed,
            env_id=config.env.id,
            agent_id=config.agent.id,
            state=rollout_state,
        )
        try:
            async with runner:
                display.watch(lambda: _waiting(runner.stats()))
                await train_loop(
                    runner,
                    learner,
                    weight_sync,
                    num_steps=config.steps,
                    first_step=first_step,
                    on_step=on_step,
                    num_threads=config.trainer.num_threads,
                )
        except (asyncio.CancelledError, Exception):
            save()
            if done:
                display.say(f"stopped after step {done}; what was learned is in {directory.path}")
                display.say(f"go on with: areal-gym train --resume --out {directory.path}")
            raise
        finally:
            display.watch(None)
            for logger in loggers:
                logger.close()
        save()
        return time.perf_counter() - start_s

    async def _point(
        self, directory: RunDir, parts: _Parts, engine: Engine, renderer: Renderer, step: int
    ) -> CurvePoint:
        """Measure the policy now: sampled, then greedy."""
        kept: list[Trajectory] = []
        config, display = self.config, self.display
        name = f"held-out, step {step}"
        sampled = await _measure(
            config, parts, engine, renderer, display, name, greedy=False, keep=kept
        )
        greedy = await _measure(config, parts, engine, renderer, display, name, greedy=True)
        directory.save_trajectories(kept, name=f"eval-{step:06d}")
        point = CurvePoint(
            step=step,
            sampled=sampled.pass_at_1.mean,
            low=sampled.pass_at_1.low,
            high=sampled.pass_at_1.high,
            greedy=greedy.pass_at_1.mean,
        )
        self.points.append(point)
        display.say(
            f"held-out at step {step}: {point.sampled:.3f} sampled "
            f"({point.low:.3f} to {point.high:.3f}), {point.greedy:.3f} greedy, "
            f"{config.eval.num_tasks} tasks"
        )
        return point

    def _announce(self, directory: RunDir, used: Iterable[Any]) -> None:
        config = self.config
        owners = sorted({entry.plugin.source for entry in used})
        self.display.say(
            f"areal-gym {__version__} | env {config.env.id} | agent {config.agent.id} | engine "
            f"{config.engine.id} ({config.engine.model}) | seed {config.seed}"
        )
        self.display.say(f"  plugins: {', '.join(owners)} | run directory: {directory.path}")

    def _conclude(self, directory: RunDir, summary: dict[str, Any]) -> None:
        display = self.display
        title = f"{self.config.env.id}, seed {self.config.seed}: held-out accuracy"
        best = summary["warm_start"].get("best_demonstrator")
        write_atomic(
            directory.learning_curve_file,
            draw_learning_curve(
                directory.read_metrics(),
                self.points,
                title=title,
                baselines={} if best is None else {"best demonstrator": best},
            ),
        )
        directory.save_summary(summary)
        rows = [("", "before", "after")]
        for label, key in (("sampled", "heldout"), ("greedy", "heldout_greedy")):
            before, after = summary[f"{key}_before"], summary[f"{key}_after"]
            rows.append((f"held-out, {label}", f"{before:.3f}", f"{after:.3f}"))
        if best is not None:
            rows.append(("best demonstrator", f"{best:.3f}", ""))
        for left, middle, right in rows:
            display.say(f"  {left:<20}{middle:>8}{right:>8}")
        display.say(
            f"warm start {summary['warm_start_s']:.0f} s, training {summary['train_s']:.0f} s "
            f"for {summary['num_steps']} steps"
        )
        display.say(f"curve:     {directory.learning_curve_file}")
        display.say(f"policy:    {directory.path / summary['checkpoint']}")
        display.say(f"next:      areal-gym eval --env {summary['env']} --run {directory.path} -k 4")


def _weight_sync(engine: Engine) -> Any:
    return registry().load("weight-syncs", "in-process")(engine)


def _waiting(stats: RolloutStats) -> str:
    """One line for people: what the episodes wait for."""
    text = (
        f"{stats.episodes_in_flight} episodes in flight: {stats.waiting_on_engine} wait for the "
        f"engine, {stats.waiting_on_env} for the environment; {stats.groups_ready} groups ready"
    )
    num_failed = sum(stats.num_failures.values())
    return f"{text}; {num_failed} failures" if num_failed else text


def _rollout_metrics(stats: RolloutStats) -> dict[str, float]:
    return {
        "rollout/failed_groups": float(stats.num_groups_failed),
        "rollout/stale_groups": float(stats.num_groups_stale),
        "rollout/retries": float(stats.num_retries),
        "rollout/groups_ready": float(stats.groups_ready),
        **{f"rollout/failures/{name}": float(n) for name, n in stats.num_failures.items()},
    }
