"""Plays or measures many episodes in three lines, outside of training.

    import areal_gym

    played = areal_gym.rollout("http://localhost:8000/v1", "tir", n=64)
    played.to_pandas()
    areal_gym.evaluate("runs/tir-1/checkpoints/best", "tir", n=200, k=4)

Both functions work in scripts and in notebooks, where an event loop is running already. An
interrupt first ends the episodes that have begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from areal_gym.chat import Renderer
from areal_gym.config.prompts_settings import PROMPTS
from areal_gym.engines.base import SamplingParams
from areal_gym.envs.base import TextEnv, run_on_kept_loop
from areal_gym.errors import UsageError
from areal_gym.plugins import registry
from areal_gym.recording import derive_seed
from areal_gym.rollout.episode_runners import EnvPool, EpisodeRequest, LocalEpisodeRunner
from areal_gym.rollout.eval_report import EvalReport
from areal_gym.rollout.evaluate import first_tasks, measure, play_all
from areal_gym.runs.episodes.policies import Policy, opened
from areal_gym.runs.episodes.rollout_table import Rollouts
from areal_gym.types import Task
from areal_gym.utils.progress import progress_bar

__all__ = ["Rollouts", "evaluate", "rollout"]


def rollout(
    policy: Policy,
    env: str | TextEnv | Callable[[], TextEnv] | None = None,
    n: int = 64,
    concurrency: int = 64,
    *,
    data: Any = None,
    reward: Any = None,
    tools: Any = None,
    split: str = "test",
    seed: int = 0,
    temperature: float = 1.0,
    max_new_tokens: int = 512,
    max_context: int = 4096,
    timeout_s: float | None = 300.0,
    model: str = "default",
    renderer: Renderer | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    progress: bool | None = None,
) -> Rollouts:
    """Play the first `n` tasks of a split, starting again with the first if it has fewer.

    Args:
        policy: a checkpoint's directory, a model of the hub, the URL of an OpenAI-compatible
            server, an engine (it is started and closed here), or a function of the messages that
            returns a text or a message (asynchronous, or called on threads).
        env: an id, `FILE.py:CLASS`, a class, a function that makes an environment, or the result
            of `areal_gym.make`; by default the environment of your own prompts.
        n: the number of episodes.
        concurrency: the most episodes at once.
        data: your own prompts, as in `areal_gym.train`.
        reward: your own reward, as in `areal_gym.train`.
        tools: your own tools, as in `areal_gym.train`.
        split: the split whose tasks are played.
        seed: seeds the environment and sampling.
        temperature: the sampling temperature; 0 is greedy. Functions ignore it.
        max_new_tokens: the most tokens of a turn.
        max_context: the most tokens of an episode that a checkpoint plays.
        timeout_s: the limit of one episode in seconds, beyond which it has failed; None for none.
        model: the model's name on a server.
        renderer: turns messages into token ids; for an engine only.
        env_kwargs: arguments of the environment, if `env` is an id.
        progress: whether a bar is shown; by default on terminals and in notebooks only.

    Returns:
        The episodes in the order of the tasks, including failed ones.

    Raises:
        UsageError: the policy or the environment is not one of the above.
        NothingToDoError: the split is empty.
    """
    _require_episodes(n=n, concurrency=concurrency)
    make_env, env_id = _factory(env, env_kwargs or {}, tasks=data, reward=reward, tools=tools)
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)
    playing = opened(policy, params, model, renderer, max_context, timeout_s, env_id)

    async def play(on_progress: Callable[[int, int], None]) -> Rollouts:
        async with playing as play_episode:
            start_s = time.perf_counter()
            envs = EnvPool(make_env)
            tasks = await first_tasks(envs, split, n, concurrency)
            trajectories = await play_all(
                [partial(_request, tasks, seed, place) for place in range(n)],
                LocalEpisodeRunner(envs, play_episode),
                max_in_flight=concurrency,
                on_progress=on_progress,
            )
            return Rollouts(tuple(trajectories), time.perf_counter() - start_s)

    with progress_bar(f"rollout in {env_id}", n, progress) as advance:
        return run_on_kept_loop(play(advance))


def evaluate(
    policy: Policy,
    env: str | TextEnv | Callable[[], TextEnv] | None = None,
    n: int = 64,
    k: int = 1,
    concurrency: int = 64,
    *,
    data: Any = None,
    reward: Any = None,
    tools: Any = None,
    split: str = "test",
    seed: int = 0,
    temperature: float = 1.0,
    max_new_tokens: int = 512,
    max_context: int = 4096,
    timeout_s: float | None = 300.0,
    success_reward: float = 1.0,
    max_failure_rate: float = 0.5,
    model: str = "default",
    renderer: Renderer | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    progress: bool | None = None,
) -> EvalReport:
    """Measure a policy on the first `n` tasks of a split, or on all if it has fewer.

    Does what `areal-gym eval` does, for any policy that `rollout` takes: pass@1, pass@k and pass^k
    with 95% intervals over the tasks, why episodes ended, and what failed. The episodes themselves
    are the report's `trajectories`. The arguments are those of `rollout`, and:

    - `k`: episodes per task;
    - `success_reward`: an episode with at least this reward counts as a success;
    - `max_failure_rate`: there is no report if a larger share of episodes failed; each is retried
      once first.

    Raises:
        UsageError: the policy or the environment is not one of the above.
        NothingToDoError: the split is empty.
        FailureBudgetError: too many episodes fail for the numbers to mean anything.
    """
    _require_episodes(n=n, k=k, concurrency=concurrency)
    make_env, env_id = _factory(env, env_kwargs or {}, tasks=data, reward=reward, tools=tools)
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)
    playing = opened(policy, params, model, renderer, max_context, timeout_s, env_id)

    async def play(on_progress: Callable[[int, int], None]) -> EvalReport:
        async with playing as play_episode:
            return await measure(
                make_env,
                play_episode,
                temperature=temperature,
                split=split,
                num_tasks=n,
                num_samples=k,
                max_in_flight=concurrency,
                max_failure_rate=max_failure_rate,
                success_reward=success_reward,
                seed=seed,
                env_id=env_id,
                on_progress=on_progress,
            )

    with progress_bar(f"evaluate in {env_id}", n * k, progress) as advance:
        return run_on_kept_loop(play(advance))


def _request(tasks: Sequence[Task], seed: int, place: int, attempt: int) -> EpisodeRequest:
    return EpisodeRequest(
        task=tasks[place % len(tasks)],
        seed=derive_seed(seed, place),
        trajectory_id=f"t{place:06d}",
        group_id=f"g{place % len(tasks):06d}",
    )


def _require_episodes(**numbers: int) -> None:
    if min(numbers.values()) < 1:
        given = ", ".join(f"{name} = {number}" for name, number in numbers.items())
        raise UsageError(f"{given}: at least one episode at a time")


def _factory(
    env: str | TextEnv | Callable[[], TextEnv] | None, kwargs: Mapping[str, Any], **task: Any
) -> tuple[Callable[[], TextEnv], str]:
    """Return a function that makes environments, and their id; `task` is data, reward, tools."""
    given = {name: value for name, value in task.items() if value is not None}
    if env is None and not given:
        raise UsageError(
            "which environment?",
            hints=['name one: env="tir"', "or give your own prompts: data=rows, reward=exact"],
        )
    if env is None or (isinstance(env, str) and given):
        env, kwargs = env or PROMPTS, {**kwargs, **given}
        # All instances share the tasks, so that rows from memory or a generator are read once.
        tasks = registry().make("envs", env, **kwargs).tasks
        kwargs = {**kwargs, "tasks": tasks} if "tasks" in given else kwargs
    if isinstance(env, str):
        id = env
        return lambda: registry().make("envs", id, **kwargs), id
    if given:
        raise UsageError(f"{' and '.join(task)} are for own prompts, or for an environment's id")
    if kwargs:
        raise UsageError("env_kwargs are for an environment's id")
    if not isinstance(env, TextEnv):
        return env, getattr(env, "__name__", type(env).__name__)
    if env.made_by is None:
        raise UsageError(
            f"many episodes at once need many instances of {type(env).__name__}",
            hints=["give its id, its class, or a function that makes one"],
        )
    return env.made_by, type(env).__name__
