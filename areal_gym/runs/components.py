"""The environment, agent, filters, loggers and curriculum that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from areal_gym.agents.base import Agent
from areal_gym.config import AgentConfig, PluginConfig, RunConfig
from areal_gym.envs.base import TextEnv
from areal_gym.errors import ConfigError, GymError
from areal_gym.loggers.base import MetricsLogger
from areal_gym.plugins import Kind, registry
from areal_gym.rollout.curriculum import Curriculum
from areal_gym.rollout.filters import GroupFilter
from areal_gym.runs.arguments import check_arguments, make_with, misfit


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """What the settings name, imported."""

    env_class: Callable[..., TextEnv]
    env_kwargs: Mapping[str, Any]
    agent: Agent

    @classmethod
    def of(cls, config: RunConfig) -> Components:
        """Import environment and agent, and try whether they can be made.

        Raises:
            UnknownIdError: nobody registered them.
            ConfigError: they do not take the arguments that the settings give.
        """
        found = registry()
        env = found.get("envs", config.env.id)
        parts = cls(
            env_class=env.load(),
            env_kwargs={**getattr(env.spec, "kwargs", {}), **config.env.kwargs},
            agent=_make("agents", config.agent, "agent.kwargs"),
        )
        check_arguments(parts.env_class, parts.env_kwargs, key="env.kwargs", id=config.env.id)
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
            why, near = misfit(error, self.env_class, self.env_kwargs)
            hints = [*near, "its arguments: areal-gym show ENV"]
            hints.append("to leave out those of a run or a recipe: env.kwargs={}")
            raise ConfigError(f"env.kwargs do not fit: {why}", hints=hints) from error
        except GymError:
            raise
        except Exception as error:
            raise ConfigError(
                f"env.kwargs: the environment cannot be made with these arguments: {error!r}",
                hints=["its arguments: areal-gym show ENV"],
            ) from error


def make_filters(config: RunConfig) -> dict[str, GroupFilter]:
    """The group filters of the settings, by id, in their order.

    Raises:
        ConfigError: one does not take the arguments that the settings give.
    """
    return {f.id: _make("filters", f, "rollout.filters") for f in config.rollout.filters}


def make_loggers(config: RunConfig) -> dict[str, MetricsLogger]:
    """The loggers of the settings, by id.

    Raises:
        ConfigError: what one needs is not installed, or it does not take the arguments.
    """
    return {logger.id: _make("loggers", logger, "loggers") for logger in config.loggers}


def make_curriculum(config: RunConfig) -> Curriculum | None:
    """The curriculum of the settings; None takes tasks as they come.

    Raises:
        ConfigError: it does not take the arguments that the settings give.
    """
    settings = config.rollout.curriculum
    return None if settings is None else _make("curricula", settings, "rollout.curriculum")


def _make(kind: Kind, settings: PluginConfig | AgentConfig, key: str) -> Any:
    thing = registry().load(kind, settings.id)
    return make_with(thing, settings.kwargs, key=key, id=settings.id)
