"""areal-gym: train language-model agents by reinforcement learning in text environments.

    import areal_gym

    env = areal_gym.make("tir")
    text, info = env.reset(seed=0)
    text, reward, terminated, truncated, info = env.step("The answer is 4.")

Names are imported on first use: `import areal_gym` costs a few milliseconds. It also registers
the environments with Gymnasium (`gymnasium.make("areal_gym/tir-v0")`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from areal_gym import _gymnasium, _moved
from areal_gym.version import __version__

if TYPE_CHECKING:
    from areal_gym.agents.base import Agent, Episode
    from areal_gym.config import RunConfig, load_config
    from areal_gym.engines.base import Engine, Generation, SamplingParams
    from areal_gym.envs.base import Response, StepResult, TextEnv
    from areal_gym.envs.tools import Tool, tool
    from areal_gym.errors import (
        ConfigError,
        EnvError,
        EpisodeError,
        GymError,
        StopTraining,
        ToolError,
        UnknownIdError,
        UsageError,
    )
    from areal_gym.plugins import registry
    from areal_gym.rollout.eval_report import EvalReport
    from areal_gym.run_dir.run_dir import RunDir
    from areal_gym.runs.callbacks import Callback
    from areal_gym.runs.episodes import Rollouts, evaluate, rollout
    from areal_gym.runs.interactive import TrainingResult, train
    from areal_gym.types import Group, Message, StopReason, Task, TokenSpan, Trajectory, Turn

__all__ = [
    "Agent",
    "Callback",
    "ConfigError",
    "Engine",
    "EnvError",
    "Episode",
    "EpisodeError",
    "EvalReport",
    "Generation",
    "Group",
    "GymError",
    "Message",
    "Response",
    "Rollouts",
    "RunConfig",
    "RunDir",
    "SamplingParams",
    "StepResult",
    "StopReason",
    "StopTraining",
    "Task",
    "TextEnv",
    "TokenSpan",
    "Tool",
    "ToolError",
    "TrainingResult",
    "Trajectory",
    "Turn",
    "UnknownIdError",
    "UsageError",
    "__version__",
    "evaluate",
    "load_config",
    "make",
    "registry",
    "rollout",
    "tool",
    "train",
]

_HOMES = {
    "agents.base": "Agent Episode",
    "config": "RunConfig load_config",
    "engines.base": "Engine Generation SamplingParams",
    "envs.base": "Response StepResult TextEnv",
    "envs.tools": "Tool tool",
    "errors": "ConfigError EnvError EpisodeError GymError StopTraining ToolError "
    "UnknownIdError UsageError",
    "plugins": "registry",
    "rollout.eval_report": "EvalReport",
    "run_dir.run_dir": "RunDir",
    "runs.callbacks": "Callback",
    "runs.episodes": "Rollouts evaluate",
    "runs.interactive": "TrainingResult train",
    "types": "Group Message StopReason Task TokenSpan Trajectory Turn",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def make(id: str, **kwargs: Any) -> TextEnv:
    """Make an environment by its id; `areal-gym list envs` shows all ids, `show ID` one in full.

    Example: `env = areal_gym.make("tir", max_turns=4)`.

    Raises:
        UnknownIdError: there is no such environment.
        UsageError: it does not take such an argument, or needs a package that is not installed.
    """
    from areal_gym.plugins import registry

    env: TextEnv = registry().make("envs", id, **kwargs)
    env.made_by = lambda: make(id, **kwargs)
    return env


def __getattr__(name: str) -> Any:
    if name == "rollout":  # a package that can be called, see `runs.episodes`
        return import_module("areal_gym.rollout")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'areal_gym' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"areal_gym.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_gymnasium.register_when_imported()
_moved.install()
