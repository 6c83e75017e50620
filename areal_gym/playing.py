"""Many episodes in three lines, outside of training.

    import areal_gym

    played = areal_gym.rollout("http://localhost:8000/v1", "tir", n=64)
    played.to_pandas()

Works in scripts and in notebooks, where an event loop is running already.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from areal_gym.config import EngineConfig
from areal_gym.engines.base import Engine, SamplingParams
from areal_gym.envs.base import TextEnv, run_on_kept_loop
from areal_gym.envs.chat_client import ChatClient
from areal_gym.envs.tools import Tool
from areal_gym.errors import AgentError, ConfigError, EpisodeError, UsageError
from areal_gym.metrics import mean
from areal_gym.plugins import registry
from areal_gym.rendering import Renderer
from areal_gym.rollout.episode import derive_seed, play_episode, stop_reason_of
from areal_gym.rollout.pool import EnvPool
from areal_gym.types import FinishReason, Message, StopReason, Task, Trajectory, Turn

if TYPE_CHECKING:
    import datasets
    import pandas

__all__ = ["Rollouts", "rollout"]

Policy = Engine | str | Path | Callable[[Sequence[Message]], "str | Message | Awaitable[Any]"]
_Play = Callable[..., Awaitable[Trajectory]]
"""Plays one episode: of an environment and, by name, its task, seed and names."""


@dataclass(frozen=True, slots=True)
class Rollouts(Sequence[Trajectory]):
    """Trajectories that were played, failures included."""

    trajectories: tuple[Trajectory, ...]
    wall_s: float = 0.0

    @property
    def scored(self) -> list[Trajectory]:
        """Those that infrastructure did not fail: what numbers are made of."""
        return [t for t in self.trajectories if not t.stop_reason.is_failure]

    @property
    def mean_reward(self) -> float:
        """Over the scored ones; NaN without any."""
        return mean(t.reward for t in self.scored)

    def rows(self) -> list[dict[str, Any]]:
        """One flat row per episode: task, reward and its parts, turns, messages, metrics, ..."""
        parts = sorted({name for t in self for name in t.reward_parts})
        metrics = sorted({name for t in self for name in t.metrics})
        return [
            {
                "task_id": t.task.id,
                "env": t.env_id,
                "reward": None if t.stop_reason.is_failure else t.reward,
                "num_turns": len(t.turns),
                "num_tokens": t.num_policy_tokens,
                "stop_reason": str(t.stop_reason),
                "error": t.error,
                **{f"reward/{name}": t.reward_parts.get(name) for name in parts},
                **{f"metrics/{name}": t.metrics.get(name) for name in metrics},
                "task": json.dumps(t.task.to_dict()["data"], ensure_ascii=False),
                "messages": [{"role": m["role"], "content": m["content"]} for m in t.messages],
                "seed": t.seed,
            }
            for t in self
        ]

    def to_pandas(self) -> pandas.DataFrame:
        """`rows` as a table.

        Raises:
            ConfigError: pandas is not installed.
        """
        return _imported("pandas").DataFrame(self.rows())

    def to_dataset(self) -> datasets.Dataset:
        """`rows` as a Hugging Face data set.

        Raises:
            ConfigError: datasets is not installed.
        """
        return _imported("datasets").Dataset.from_list(self.rows())

    def __len__(self) -> int:
        return len(self.trajectories)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...

    @overload
    def __getitem__(self, index: slice) -> Rollouts: ...

    def __getitem__(self, index: int | slice) -> Trajectory | Rollouts:
        if isinstance(index, slice):
            return Rollouts(self.trajectories[index], self.wall_s)
        return self.trajectories[index]

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __repr__(self) -> str:
        scored = self.scored
        lines = [f"{len(self)} episodes in {self.wall_s:.1f} s, mean reward {self.mean_reward:.3f}"]
        parts = sorted({name for t in scored for name in t.reward_parts})
        names = {name: mean(t.reward_parts.get(name, 0.0) for t in scored) for name in parts}
        if names:
            lines.append("  " + ", ".join(f"{name} {value:.3f}" for name, value in names.items()))
        stops = Counter(str(t.stop_reason) for t in self).most_common()
        lines.append(
            f"  {mean(len(t.turns) for t in scored):.1f} turns; stopped by "
            + ", ".join(f"{reason} {count}" for reason, count in stops)
        )
        errors = Counter(t.error for t in self if t.stop_reason.is_failure).most_common(1)
        lines += [f"  {count} x {error}" for error, count in errors]
        return "\n".join(lines)


def rollout(
    policy: Policy,
    env: str | TextEnv | Callable[[], TextEnv],
    n: int = 64,
    concurrency: int = 64,
    *,
    split: str = "test",
    seed: int = 0,
    temperature: float = 1.0,
    max_new_tokens: int = 512,
    max_context: int = 4096,
    timeout_s: float | None = 300.0,
    model: str = "default",
    renderer: Renderer | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
) -> Rollouts:
    """Play the first `n` tasks of a split, and then the first ones again if there are fewer.

    Args:
        policy: a checkpoint's directory (sampled in this process), the URL of an OpenAI-compatible
            server, an engine (it is started and closed here), or a function of the messages so
            far that gives a text (or a message; it may be asynchronous, and is called on threads
            otherwise).
        env: an environment's id, one that `areal_gym.make` has made, a class, or a function that
            makes one.
        n: episodes.
        concurrency: how many are played at once.
        split: whose tasks.
        seed: of the environment's chance and of sampling.
        temperature: 0 is greedy; functions and their like do as they please.
        max_new_tokens: per turn.
        max_context: tokens of one episode, for a checkpoint's directory.
        timeout_s: of one episode; beyond it, it has failed. None: no limit.
        model: the name that a server knows its model by.
        renderer: messages to ids; needed for an engine, and for nothing else.
        env_kwargs: arguments of the environment, with an id.

    Returns:
        The episodes in the order of the tasks, failures among them.

    Raises:
        UsageError: policy or environment are none, or the split has no tasks.
    """
    if n < 1 or concurrency < 1:
        raise UsageError(f"n = {n}, concurrency = {concurrency}: at least one episode at a time")
    make_env, env_id = _factory(env, env_kwargs or {})
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)

    async def play_all() -> Rollouts:
        start_s = time.perf_counter()
        envs = EnvPool(make_env)
        tasks = _tasks(envs, split, n)
        found: dict[int, Trajectory] = {}
        waiting = iter(range(n))

        async def work(play: _Play) -> None:
            for number in waiting:
                one = envs.take()
                names = {
                    "group_id": f"g{number % len(tasks):06d}",
                    "trajectory_id": f"t{number:06d}",
                }
                seeds = {"seed": derive_seed(seed, number)}
                found[number] = await play(
                    one, task=tasks[number % len(tasks)], env_id=env_id, **names, **seeds
                )
                if not found[number].stop_reason.is_failure:
                    envs.give_back(one)

        async with _opened(policy, params, model, renderer, max_context, timeout_s) as play:
            workers = [asyncio.create_task(work(play)) for _ in range(min(concurrency, n))]
            try:
                await asyncio.gather(*workers)
            finally:  # the first that fails ends the others
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        ordered = tuple(found[number] for number in sorted(found))
        return Rollouts(ordered, time.perf_counter() - start_s)

    return run_on_kept_loop(play_all())


def _factory(
    env: str | TextEnv | Callable[[], TextEnv], kwargs: Mapping[str, Any]
) -> tuple[Callable[[], TextEnv], str]:
    if isinstance(env, str):
        return lambda: registry().make("envs", env, **kwargs), env
    if kwargs:
        raise UsageError("env_kwargs are for an environment's id")
    if isinstance(env, TextEnv):
        made_by = env.made_by
        if made_by is None:
            raise UsageError(
                f"many episodes at once need many instances of {type(env).__name__}",
                hints=["give its id, its class, or a function that makes one"],
            )
        return made_by, type(env).__name__
    return env, getattr(env, "__name__", type(env).__name__)


def _tasks(envs: EnvPool, split: str, n: int) -> list[Task]:
    env = envs.take()
    limit = env.num_tasks(split)
    if limit == 0:
        raise UsageError(f"the split {split!r} has no tasks")
    tasks = []
    for index in range(n if limit is None else min(n, limit)):
        env.reset(seed=index, options={"split": split, "index": index})
        tasks.append(env.task)
    envs.give_back(env)
    return tasks


# ---- policies ------------------------------------------------------------------------------------


@asynccontextmanager
async def _opened(
    policy: Policy,
    params: SamplingParams,
    model: str,
    renderer: Renderer | None,
    max_context: int,
    timeout_s: float | None,
) -> AsyncIterator[_Play]:
    """What plays one episode with that policy; what was opened for it is closed."""
    if isinstance(policy, Path) or (isinstance(policy, str) and "://" not in policy):
        directory = Path(policy)
        if not (directory / "config.json").exists():
            raise ConfigError(
                f"{str(policy)!r} is no checkpoint's directory",
                hints=["a policy is that, a URL (http://HOST:PORT/v1), an engine or a function"],
            )
        settings = EngineConfig(model=str(directory), max_context=max_context)
        engine = registry().load("engines", "embedded").from_settings(directory, settings)
        try:
            await engine.start()
            rendering = Renderer.from_checkpoint(directory)
            yield _sampled(engine, rendering, params, timeout_s)
        finally:
            await engine.aclose()
    elif isinstance(policy, Engine):
        if renderer is None:
            raise UsageError(
                "an engine takes ids, and somebody has to make them of messages",
                hints=["renderer=Renderer.from_checkpoint(DIRECTORY)"],
            )
        try:
            await policy.start()
            yield _sampled(policy, renderer, params, timeout_s)
        finally:
            await policy.aclose()
    elif isinstance(policy, str):
        yield partial(_asked, _served(policy, model, params), timeout_s)
    elif callable(policy):
        yield partial(_asked, _called(policy), timeout_s)
    else:
        raise UsageError(f"a policy is no {type(policy).__name__}")


def _sampled(
    engine: Engine, renderer: Renderer, params: SamplingParams, timeout_s: float | None
) -> _Play:
    agent = registry().load("agents", "chat")()

    async def play(env: TextEnv, *, task: Task, **names: Any) -> Trajectory:
        return await play_episode(
            env,
            agent,
            engine,
            renderer,
            options={"task": task},
            params=params,
            timeout_s=timeout_s,
            **names,
        )

    return play


_Answer = Callable[[Sequence[Message], Sequence[Tool]], Awaitable["str | Message"]]


def _called(policy: Callable[[Sequence[Message]], Any]) -> _Answer:
    async def answer(messages: Sequence[Message], tools: Sequence[Tool]) -> str | Message:
        if inspect.iscoroutinefunction(policy):
            found: str | Message = await policy(messages)
            return found
        said: str | Message = await asyncio.to_thread(policy, messages)
        return said

    return answer


def _served(url: str, model: str, params: SamplingParams) -> _Answer:
    client = ChatClient(
        url, model=model, temperature=params.temperature, max_tokens=params.max_new_tokens
    )

    async def answer(messages: Sequence[Message], tools: Sequence[Tool]) -> str | Message:
        said = await client.ask(
            [_to_openai(m) for m in messages], tools=[t.schema() for t in tools]
        )
        return _from_openai(said)

    return answer


async def _asked(
    answer: _Answer,
    timeout_s: float | None,
    env: TextEnv,
    *,
    task: Task,
    seed: int,
    trajectory_id: str,
    group_id: str,
    env_id: str,
) -> Trajectory:
    """An episode of a policy that answers in words: there are no tokens on record."""
    turns: list[Turn] = []
    metrics: Counter[str] = Counter()
    reason, trouble = StopReason.COMPLETED, None
    try:
        async with asyncio.timeout(timeout_s):
            env.reset(seed=seed, options={"task": task})
            is_over = False
            while not is_over:
                try:
                    said = await answer(list(env.messages), env.tools)
                except EpisodeError:
                    raise
                except Exception as error:
                    raise AgentError(f"the policy failed: {error!r}") from error
                step = await env.astep(said)
                parts = step.info.get("reward_parts", {})
                turns.append(
                    Turn(finish_reason=FinishReason.STOP, reward=step.reward, reward_parts=parts)
                )
                metrics.update(step.info.get("metrics", {}))
                is_over = step.terminated or step.truncated
                if step.truncated:
                    is_limit = step.info["truncated_by"] == "max_turns"
                    reason = StopReason.MAX_TURNS if is_limit else StopReason.TRUNCATED
    except TimeoutError:
        reason, trouble = StopReason.TIMEOUT, f"the episode took more than {timeout_s:g} s"
    except EpisodeError as error:
        reason, trouble = stop_reason_of(error), str(error)
    finally:
        await env.aclose()
    return Trajectory(
        id=trajectory_id,
        group_id=group_id,
        task=task,
        env_id=env.played_id or env_id,
        turns=tuple(turns),
        messages=tuple(env.messages),
        stop_reason=reason,
        error=trouble,
        metrics=dict(metrics),
        seed=seed,
    )


def _to_openai(message: Message) -> dict[str, Any]:
    """Arguments of calls are text there; what only we know is left out."""
    kept: dict[str, Any] = {
        key: message[key] for key in ("role", "content", "name", "tool_call_id") if key in message
    }
    if "tool_calls" in message:
        kept["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"]),
                },
            }
            for call in message["tool_calls"]
        ]
    return kept


def _from_openai(said: Mapping[str, Any]) -> str | Message:
    """A message whose calls are ours; a text, when it has none: calls may be written in it."""
    content = said.get("content") or ""
    calls = said.get("tool_calls") or []
    if not calls:
        return str(content)
    message: Message = {"role": "assistant", "content": content, "tool_calls": []}
    for number, call in enumerate(calls):
        try:
            name = call["function"]["name"]
            arguments = json.loads(call["function"]["arguments"] or "{}")
            if not isinstance(arguments, dict) or not isinstance(name, str):
                raise ValueError("the arguments are no object")
        except (ValueError, LookupError, TypeError) as error:
            message["parse_error"] = f"a tool call is malformed: {error}"
            continue
        message["tool_calls"].append(
            {
                "id": call.get("id") or f"call{number:05d}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )
    return message


def _imported(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError:
        raise ConfigError(
            f"this table takes the package {package}",
            hints=[f"install it: pip install {package}", "rows() gives plain dictionaries"],
        ) from None
