"""`verifiers:ID`: an environment of the library verifiers, played by its own loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.verifiers.verifiers_worker import VerifiersWorker, default_python, shared_worker
from areal_gym.errors import EnvError, UsageError
from areal_gym.types import Message, Task, text_of


class _Rows:
    """The tasks of a worker's environment, by index."""

    def __init__(self, env: VerifiersEnv) -> None:
        self._env = env

    def num_tasks(self, split: str) -> int | None:
        return self._env.worker.num_tasks.get(split, 0)

    def draw(self, rng: np.random.Generator, split: str) -> Task:
        num_tasks = self.num_tasks(split)
        if not num_tasks:
            raise UsageError(f"{self._env.id} has no tasks in split {split!r}")
        return self.at(int(rng.integers(num_tasks)), split)

    def at(self, index: int, split: str) -> Task:
        if not 0 <= index < (self.num_tasks(split) or 0):
            raise UsageError(f"{self._env.id} has no task {index} in split {split!r}")
        messages = self._env.worker.ask("prompt", split=split, index=index).result()
        data = {"index": index, "messages": [_message(message) for message in messages]}
        return Task(id=f"{split}/{index}", split=split, data=data)


class VerifiersEnv(TextEnv):
    """An environment of verifiers 0.3 or 0.4, in a process with a Python of its own.

    verifiers runs the whole rollout and asks the policy at the gateway, with a key that is worth
    nothing for other episodes. No agent takes part (`--agent chat`, the default, is not asked).

    Task: a row of its data, or a task of its taskset.
    Reward: its own. Parts: the rewards by name, where it tells them.
    Episode end: its own.
    Splits: of 0.3 the data and the evaluation data; of 0.4 every tenth task is held out.
    Failures: of the policy are the engine's, of its sandboxes the sandbox's, of its program the
        agent's, all others the environment's.
    Metrics: its own.

    Args:
        id: the environment's id, as verifiers knows it.
        python: the interpreter that has verifiers and the environment's package; by default the
            variable AREAL_GYM_VERIFIERS_PYTHON.
        arguments: of the environment.
        harness: of 0.4: `in-process`, or an id of verifiers such as `null` or `bash`.
        max_policy_calls: the most policy calls of one episode.
        open_timeout_s: the longest time until it is loaded.
    """

    suspends = True
    has_gold = False
    max_turns = 1000

    def __init__(
        self,
        id: str,
        *,
        python: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        harness: str = "in-process",
        max_policy_calls: int = 256,
        open_timeout_s: float = 300.0,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(tasks=_Rows(self), render_mode=render_mode)
        self.id = id
        self._python = str(Path(python).expanduser()) if python else default_python()
        self._arguments = dict(arguments or {})
        self._harness = harness
        self.max_policy_calls = max_policy_calls
        self._open_timeout_s = open_timeout_s
        self._outcome: dict[str, Any] | None = None
        self.worker  # noqa: B018 - what cannot be loaded is said before a run waits for anything

    @property
    def worker(self) -> VerifiersWorker:
        """The process that has the environment, shared by all instances of this one."""
        return shared_worker(
            self._python, self.id, self._arguments, open_timeout_s=self._open_timeout_s
        )

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Return the prompt of the task, for reading: verifiers sends its own."""
        self._outcome = None
        return [_message(message) for message in task.data["messages"]]

    async def play_outside(self, base_url: str, api_key: str) -> None:
        """Let verifiers play the episode with the policy at `base_url`."""
        self._outcome = await self.worker.play(
            split=self.task.split,
            index=self.task.data["index"],
            url=base_url,
            key=api_key,
            harness=self._harness,
        )

    async def respond(self, message: Message) -> Response:
        """Return the outcome of the rollout, which has ended."""
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            raise EnvError(
                "verifiers plays its environments itself, with the policy at a gateway: "
                "they cannot be stepped"
            )
        return Response(
            reward=outcome["reward"],
            reward_parts=outcome["parts"],
            metrics=outcome["metrics"],
            is_terminated=True,
        )


def _message(given: Mapping[str, Any]) -> Message:
    content = text_of(given["content"] or "")
    if given["role"] == "system":
        return {"role": "system", "content": content}
    return {"role": "assistant" if given["role"] == "assistant" else "user", "content": content}
