"""The environment, agent, filters, loggers and curriculum that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from areal_gym.agents.base import Agent
from areal_gym.config import AgentConfig, PluginConfig, RunConfig
from areal_gym.envs.base import TextEnv
from areal_gym.loggers.base import MetricsLogger
from areal_gym.plugins import Kind, registry
from areal_gym.rollout.curriculum import Curriculum
from areal_gym.rollout.filters import GroupFilter
from areal_gym.runs.arguments import make_with
from areal_gym.sandbox.base import SandboxLevel, SandboxReport
from areal_gym.sandbox.shared_pool import reports_of

_MEANING = {
    SandboxLevel.ISOLATED: "",
    SandboxLevel.FILTERED: " (no root directory, processes or network of its own)",
    SandboxLevel.NONE: ": WHAT THE POLICY WRITES RUNS AS YOU, with your files and your network",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """The environment and the agent that the settings name, imported."""

    env_class: Callable[..., TextEnv]
    env_kwargs: Mapping[str, Any]
    env_id: str = "ENV"
    agent: Agent

    @classmethod
    def of(cls, config: RunConfig) -> Components:
        """Import environment and agent, and try whether they can be made.

        Raises:
            UnknownIdError: no plugin registers them.
            ConfigError: they do not take the arguments that the settings give.
        """
        env = registry().get("envs", config.env.id)
        components = cls(
            env_class=env.load(),
            env_kwargs={**getattr(env.spec, "kwargs", {}), **config.env.kwargs},
            env_id=config.env.id,
            agent=_make("agents", config.agent, "agent.kwargs"),
        )
        # A wrong argument is found before anything has been waited for.
        components.make_env().close()
        return components

    def make_env(self) -> TextEnv:
        """Make a new instance.

        Raises:
            ConfigError: the environment does not take the arguments.
        """
        kwargs = self.env_kwargs
        env: TextEnv = make_with(self.env_class, kwargs, key="env.kwargs", id=self.env_id)
        return env

    async def announce_sandboxes(self, say: Callable[[str], None]) -> list[SandboxReport]:
        """Start the environment's sandboxes, say their levels, and return their reports.

        Raises:
            SandboxError: one does not start, or protects less than it must.
        """
        env = self.make_env()
        try:
            reports = await reports_of(env.sandboxes)
        finally:
            await env.aclose()
        for report in reports:
            say(describe_sandbox(report))
        return reports


def describe_sandbox(report: SandboxReport) -> str:
    """Return one line on a sandbox for people."""
    warning = "warning: " if report.level is SandboxLevel.NONE else ""
    return f"{warning}sandbox {report.backend}: level {report.level}{_MEANING[report.level]}"


def make_filters(config: RunConfig) -> dict[str, GroupFilter]:
    """Make the group filters of the settings: by id, in their order.

    Raises:
        ConfigError: one does not take the arguments that the settings give.
    """
    return {f.id: _make("filters", f, "rollout.filters") for f in config.rollout.filters}


def make_loggers(config: RunConfig) -> dict[str, MetricsLogger]:
    """Make the loggers of the settings, by id.

    Raises:
        ConfigError: what one needs is not installed, or it does not take the arguments.
    """
    return {logger.id: _make("loggers", logger, "loggers") for logger in config.loggers}


def make_curriculum(config: RunConfig) -> Curriculum | None:
    """Make the curriculum of the settings; None takes tasks as they come.

    Raises:
        ConfigError: it does not take the arguments that the settings give.
    """
    settings = config.rollout.curriculum
    return None if settings is None else _make("curricula", settings, "rollout.curriculum")


def _make(kind: Kind, settings: PluginConfig | AgentConfig, key: str) -> Any:
    factory = registry().load(kind, settings.id)
    return make_with(factory, settings.kwargs, key=key, id=settings.id)
