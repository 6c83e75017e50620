"""`gymnasium:ID`: any Gymnasium environment that a text can show, with discrete actions or text."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import gymnasium
import numpy as np

from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.spaces import TextSpace
from areal_gym.errors import UnknownIdError, UsageError, did_you_mean
from areal_gym.tasks import SeedTasks, choose_task
from areal_gym.types import Message, Task, text_of

_ACTIONS: Mapping[str, tuple[str, ...]] = {
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
"""Names of the actions of Gymnasium's own environments that work well as text."""

_MARKED = re.compile(r"\x1b\[[\d;]*m(.)\x1b\[0m")
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")


class GymnasiumEnv(TextEnv):
    """A Gymnasium environment in words.

    Task: the environment's own, reset with a seed.
    Tools: none.
    Observation: what the environment draws in its mode `ansi`, with [ ] around what it marks; where
        it has no such mode, its observation as Python writes it.
    Action: the last name or number of an action in the message; of an environment whose actions are
        texts, the message. A message without an action is answered, and moves nothing.
    Reward: the environment's own. No gold policy is known.
    Episode end: the environment's own; truncated after `max_turns`.
    Splits: `train` and `test`, endless, of different seeds.
    Metrics: `invalid_actions`.

    Args:
        name: Gymnasium's id, such as FrozenLake-v1; `module:ID` imports the module first.
        actions: names of the actions, in the order of their numbers. Those of FrozenLake, Taxi,
            CliffWalking and Blackjack are known.
        instruction: what the policy is told before all else.
        make: keyword arguments for `gymnasium.make`.
        max_turns: assistant messages after which the episode is truncated.
    """

    has_gold = False

    def __init__(
        self,
        name: str,
        *,
        actions: Sequence[str] = (),
        instruction: str = "",
        make: Mapping[str, Any] | None = None,
        max_turns: int = 50,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        self.max_turns = max_turns
        self._env = _make(name, dict(make or {}))
        short = name.rpartition(":")[2].rpartition("/")[2].partition("-v")[0]
        space = self._env.action_space
        self._numbers: dict[str, int] = {}
        if isinstance(space, gymnasium.spaces.Discrete):
            names = tuple(actions) or _ACTIONS.get(short, ())
            numbers = range(int(space.start), int(space.start + space.n))
            if names and len(names) != len(numbers):
                raise UsageError(f"{name} has {len(numbers)} actions, not {len(names)}")
            self._numbers = {str(number): number for number in numbers}
            self._numbers |= {n.casefold(): i for n, i in zip(names, numbers, strict=False)}
            choices = names or tuple(map(str, numbers))
            default = f"{short}. In each turn, end with one of: {', '.join(choices)}."
        elif isinstance(space, gymnasium.spaces.Text | TextSpace):
            default = f"{short}. Your message is your action."
            self.judges_all_output = True
        else:
            raise UsageError(
                f"{name} takes actions that are neither texts nor a choice: {space}",
                hints=["wrap it: gymnasium.wrappers.TransformAction gives it a Discrete space"],
            )
        self._instruction = instruction or default

    def sample_task(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Draw a seed."""
        return choose_task(SeedTasks(), rng, options)

    def first_messages(self, task: Task) -> Sequence[Message]:
        """Return the instruction and the first observation."""
        observation, _ = self._env.reset(seed=task.data["seed"])
        return [
            {"role": "system", "content": self._instruction},
            {"role": "user", "content": self._seen(observation)},
        ]

    async def respond(self, message: Message) -> Response:
        """Take the step."""
        action = self._action(text_of(message["content"]))
        if action is None:
            text = f"There is no action in that. Choose one of: {', '.join(self._numbers)}."
            messages: list[Message] = [{"role": "user", "content": text}]
            return Response(messages=messages, metrics={"invalid_actions": 1})
        observation, reward, is_terminated, is_truncated, _ = self._env.step(action)
        return Response(
            messages=[{"role": "user", "content": self._seen(observation)}],
            reward=float(reward),
            is_terminated=bool(is_terminated),
            is_truncated=bool(is_truncated),
            metrics={"invalid_actions": 0},
        )

    def _action(self, text: str) -> Any:
        if not self._numbers:
            return text
        # What a policy says last is what it means, after all that it has weighed.
        for word in reversed(re.findall(r"[\w-]+", text[-2_000:].casefold())):
            if word in self._numbers:
                return self._numbers[word]
        return None

    def _seen(self, observation: Any) -> str:
        if self._env.render_mode != "ansi":
            return str(observation)
        return _ESCAPE.sub("", _MARKED.sub(r"[\1]", str(self._env.render()))).strip()


def _make(name: str, arguments: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of newer versions; whoever names one wants that one
        try:
            if "ansi" in _render_modes(name):
                arguments.setdefault("render_mode", "ansi")
            return gymnasium.make(name, disable_env_checker=True, **arguments)
        except (gymnasium.error.UnregisteredEnv, ModuleNotFoundError) as error:
            near = did_you_mean(name, gymnasium.registry)
            every = 'python -c "import gymnasium as g; g.pprint_registry()"'
            raise UnknownIdError(
                f"Gymnasium has no environment {name!r}: {error}",
                hints=[near or f"all of them: {every}"],
            ) from None
        except (TypeError, gymnasium.error.Error) as error:
            raise UsageError(f"Gymnasium cannot make {name!r}: {error}") from error


def _render_modes(name: str) -> Sequence[str]:
    from gymnasium.envs.registration import load_env_creator

    entry_point = gymnasium.spec(name).entry_point
    creator: Any = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    return cast(Sequence[str], getattr(creator, "metadata", {}).get("render_modes", ()))
