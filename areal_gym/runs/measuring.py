"""Measures a policy with a run's settings: an engine's, or that of an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from areal_gym.chat import Renderer
from areal_gym.config import RunConfig
from areal_gym.engines.base import Engine, SamplingParams
from areal_gym.errors import ConfigError
from areal_gym.rollout.episode_runners import play_with_engine
from areal_gym.rollout.eval_report import EvalReport
from areal_gym.rollout.evaluate import measure
from areal_gym.run_dir.evaluation_writer import EvaluationWriter
from areal_gym.runs.components import Components
from areal_gym.runs.episodes.policies import opened
from areal_gym.types import Trajectory


@dataclass(slots=True)
class Watch:
    """Follows an evaluation: shows its progress, keeps its episodes and writes them to files."""

    advance: Callable[..., Any] | None
    writer: EvaluationWriter | None = None
    trajectories: list[Trajectory] = field(default_factory=list)
    _num_scored: int = field(default=0, init=False)
    _total_reward: float = field(default=0.0, init=False)
    _num_done: int = field(default=0, init=False)

    def _keep(self, trajectory: Trajectory) -> None:
        self.trajectories.append(trajectory)
        if not trajectory.stop_reason.is_failure:
            self._num_scored += 1
            self._total_reward += trajectory.reward

    def on_trajectory(self, trajectory: Trajectory) -> None:
        """Keep an episode that has ended."""
        self._keep(trajectory)
        if self.writer is not None:
            self.writer.add_trajectory(trajectory)

    def on_sample(self, index: int, attempt: int, trajectory: Trajectory) -> None:
        """Write a sample to the files."""
        if self.writer is not None:
            self.writer.add_sample(index, attempt, trajectory)

    def on_begin(self, num_samples: int) -> None:
        """Write the number of expected samples to the files."""
        if self.writer is not None:
            for trajectory in self.writer.kept.values():
                self._keep(trajectory)
            self.writer.begin(num_samples)

    def on_progress(self, done: int, total: int) -> None:
        """Show the progress."""
        self._num_done = done
        if self.advance is not None:
            num_failed = len(self.trajectories) - self._num_scored
            failed = f", {num_failed} failures" if num_failed else ""
            mean = self._total_reward / max(1, self._num_scored)
            self.advance(done, f"reward {mean:.3f}{failed}")

    def on_outage(self, seconds: float, patience_s: float) -> None:
        """Show for how long nothing has been played, because servers are gone."""
        if self.advance is not None:
            waited = f"{seconds:.0f} s of {patience_s:.0f} s"
            self.advance(self._num_done, f"waiting for servers or sandboxes, {waited}")


def _options(config: RunConfig, greedy: bool, watch: Watch) -> dict[str, Any]:
    return {
        "temperature": 0.0 if greedy else config.rollout.temperature,
        "split": config.eval.split,
        "num_tasks": config.eval.num_tasks,
        "num_samples": 1 if greedy else config.eval.num_samples,
        "max_in_flight": config.rollout.max_in_flight,
        "max_retries": config.rollout.max_retries,
        "max_failure_rate": config.rollout.max_failure_rate,
        "outage_patience_s": config.rollout.outage_patience_s,
        "seed": config.seed,
        "env_id": config.env.id,
        "on_progress": watch.on_progress,
        "on_trajectory": watch.on_trajectory,
        "on_begin": watch.on_begin,
        "on_sample": watch.on_sample,
        "on_outage": watch.on_outage,
        "kept": {} if watch.writer is None else watch.writer.kept,
    }


async def measure_policy(
    config: RunConfig,
    components: Components,
    engine: Engine,
    renderer: Renderer,
    greedy: bool,
    watch: Watch,
) -> EvalReport:
    """Measure the policy of an engine that has been started."""
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


async def measure_texts(
    config: RunConfig, components: Components, greedy: bool, watch: Watch
) -> EvalReport:
    """Measure the policy of an OpenAI-compatible server: messages in and out, no tokens.

    Raises:
        ConfigError: the settings need tokens.
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
