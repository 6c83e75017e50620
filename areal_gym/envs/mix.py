"""`mix`: several environments in one run, each with a share of the tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from areal_gym.envs.base import Response, StepResult, TextEnv
from areal_gym.errors import UsageError, choices
from areal_gym.places import ProgramPlace
from areal_gym.plugins import registry
from areal_gym.tasks.base import SampledTasks, TaskSource, asked_for
from areal_gym.types import Message, Task

_KEYS = ("id", "weight", "kwargs", "name")


class MixedEnv(TextEnv):
    """Tasks of several environments, each played by its own environment.

    Task: of one of the environments, drawn by weight. With an index, they take turns in
        proportion to their weights, and what has no more tasks is passed over.
    Tools, observation, action, reward, episode end, metrics: of that environment.
    Splits: theirs.
    Data: theirs. History: v0.

    On the command line: `areal-gym train --env tir:0.7 --env math:0.3`.

    Args:
        envs: of each its `id`, its `weight` [1], its arguments `kwargs` and, when an id occurs
            twice, a `name`, by which results are told apart.
    """

    def __init__(
        self, *, envs: Sequence[Mapping[str, Any]], render_mode: str | None = None
    ) -> None:
        super().__init__(render_mode=render_mode)
        if not envs:
            raise UsageError(
                "a mix of no environments", hints=["envs=[{id: tir, weight: 0.7}, ...]"]
            )
        self._envs: dict[str, TextEnv] = {}
        self._weights: list[float] = []
        for given in envs:
            name, weight = _checked(given, self._envs)
            made: TextEnv = registry().make("envs", given["id"], **given.get("kwargs", {}))
            self._envs[name] = made
            self._weights.append(weight)
        self.suspends = any(env.suspends for env in self._envs.values())
        self.roles = tuple(dict.fromkeys(r for env in self._envs.values() for r in env.roles))
        self._name = next(iter(self._envs))
        self._turns: dict[str, list[tuple[int, int]]] = {}
        self._counts: dict[str, list[int]] = {}

    @property
    def playing(self) -> TextEnv:
        """The environment of the running episode, as if it had been reset to the task itself."""
        return self._envs[self._name]

    @property
    def played_id(self) -> str:
        """The name of the environment of the running episode."""
        return self._name

    @property
    def sandboxes(self) -> Sequence[Any]:
        """The sandboxes of all environments."""
        return [sandbox for env in self._envs.values() for sandbox in env.sandboxes]

    def num_tasks(self, split: str) -> int | None:
        """Return the number of all tasks; None if one of the environments is endless."""
        counts = [env.num_tasks(split) for env in self._envs.values()]
        return None if None in counts else sum(count or 0 for count in counts)

    @cached_property
    def tasks(self) -> TaskSource:
        """The tasks of all environments."""
        notes = [note for env in self._envs.values() for note in getattr(env.tasks, "notes", ())]
        return SampledTasks(self.sample_task, self.num_tasks, notes)

    @property
    def prepares(self) -> bool:
        """Whether one of the environments awaits its reset."""
        return any(env.prepares for env in self._envs.values())

    async def prepare(self, seed: int | None, options: Mapping[str, Any]) -> None:
        """Reset the next task's environment here, if one of the environments awaits its reset."""
        if not self.prepares:
            return
        rng = self.np_random if seed is None else np.random.default_rng(seed)
        given = options.get("task")
        if given is None:
            self._name, options = self._whose(rng, options)
        else:
            data = given.data if isinstance(given, Task) else given["data"]
            self._name, options = data["env"], {"task": dict(data["task"])}
        await self.playing.areset(seed=int(rng.integers(2**31)), options=options)

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Return a task of an environment drawn by weight, or the one that `options` names."""
        if self.prepares:
            return _task_of(self._name, self.playing.task)
        name, options = self._whose(rng, options)
        return _task_of(name, self._envs[name].sample_task(rng, options))

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Return the first messages of the task's environment, after resetting it to the task."""
        if not self.prepares:
            self._name = task.data["env"]
            seed = int(self.np_random.integers(2**31))
            self.playing.reset(seed=seed, options={"task": dict(task.data["task"])})
        env = self.playing
        self.tools, self.tool_dialect, self.max_turns = env.tools, env.tool_dialect, env.max_turns
        self.roles = env.roles
        return tuple(env.messages)

    async def respond(self, message: Message) -> Response:
        """Return the response of the task's environment."""
        return _response_of(await self.playing.astep(message))

    async def conclude(self) -> Response | None:
        """Let the task's environment grade the episode as it stands."""
        step = await self.playing.aconclude()
        return None if step is None else _response_of(step)

    async def program_place(self) -> ProgramPlace | None:
        """Return where programs play the task's environment."""
        return await self.playing.program_place()

    async def before_run(self, on_progress: Callable[[int, int], None]) -> None:
        """Make what the episodes of each environment share."""
        for env in self._envs.values():
            await env.before_run(on_progress)

    async def aclose(self) -> None:
        """Release what the environments hold."""
        for env in self._envs.values():
            await env.aclose()

    def gold_action(self) -> str:
        """Return the gold action of the task's environment."""
        return self.playing.gold_action()

    def noop_action(self) -> str:
        """Return the noop action of the task's environment."""
        return self.playing.noop_action()

    def _whose(
        self, rng: np.random.Generator, options: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any]]:
        """Return the name of the next task's environment, and the options for it."""
        split, index = asked_for(options)
        if index is None:
            shares = np.array(self._weights) / sum(self._weights)
            number = int(rng.choice(len(shares), p=shares))
        else:
            number, index = self._turn(index, split)
            options = {**options, "index": index}
        return list(self._envs)[number], options

    def _turn(self, index: int, split: str) -> tuple[int, int]:
        """Return the number of the environment whose turn it is, and the index of its task."""
        turns = self._turns.setdefault(split, [])
        counts = self._counts.setdefault(split, [0] * len(self._envs))
        while len(turns) <= index:
            limits = [env.num_tasks(split) for env in self._envs.values()]
            left = [n for n, limit in enumerate(limits) if limit is None or counts[n] < limit]
            if not left:
                raise UsageError(f"index {index} of split {split!r}: there are {len(turns)} tasks")
            # Who has had the fewest for its weight.
            number = min(left, key=lambda n: ((counts[n] + 1) / self._weights[n], n))
            turns.append((number, counts[number]))
            counts[number] += 1
        return turns[index]


def _response_of(step: StepResult) -> Response:
    return Response(
        messages=step.info["messages"],
        reward=step.reward,
        reward_parts=step.info.get("reward_parts", {}),
        is_terminated=step.terminated,
        is_truncated=step.truncated and step.info.get("truncated_by") == "env",
        metrics=step.info.get("metrics", {}),
        state_key=step.info.get("state_key"),
        role=step.info.get("role"),
        role_rewards=step.info.get("role_rewards", {}),
    )


def _task_of(name: str, task: Task) -> Task:
    data = {"env": name, "task": task.to_dict()}
    return Task(id=f"{name}/{task.id}", data=data, split=task.split)


def _checked(given: Mapping[str, Any], others: Mapping[str, TextEnv]) -> tuple[str, float]:
    wrong = [key for key in given if key not in _KEYS]
    if wrong or "id" not in given:
        hints = choices(wrong[0] if wrong else "", _KEYS)
        raise UsageError(f"an environment of a mix is {dict(given)!r}", hints=hints)
    name, weight = str(given.get("name", given["id"])), given.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        raise UsageError(f"the weight of {name} is {weight!r}; a number above 0 is needed")
    if name in others:
        raise UsageError(
            f"{name} is in the mix twice", hints=["give the second a name: {id: ..., name: ...}"]
        )
    return name, float(weight)
