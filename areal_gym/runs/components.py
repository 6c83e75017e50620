"""Makes the environment, agent, filters, loggers and curriculum that the settings name."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from areal_gym.agents.base import Agent
from areal_gym.config import AgentConfig, PluginConfig, RunConfig
from areal_gym.config.setting_errors import plain_reason
from areal_gym.envs.base import TextEnv
from areal_gym.envs.role_order import RolePolicy
from areal_gym.errors import ConfigError, GymError, did_you_mean
from areal_gym.images import ImageLimits, set_image_limits
from areal_gym.loggers.base import MetricsLogger
from areal_gym.plugins import Kind, registry
from areal_gym.plugins.wrappers import split_wrapper_arguments
from areal_gym.rollout.curriculum import Curriculum
from areal_gym.rollout.filters import GroupFilter
from areal_gym.runs.run_display import Display
from areal_gym.sandbox.base import SandboxLevel, SandboxReport
from areal_gym.sandbox.shared_pool import reports_of

_MEANING = {
    SandboxLevel.ISOLATED: "",
    SandboxLevel.FILTERED: " (no root directory, processes or network of its own)",
    SandboxLevel.NONE: ": WHAT THE POLICY WRITES RUNS AS YOU, with your files and your network",
}


def use_image_settings(config: RunConfig) -> None:
    """Limit the images that this process reads to the run's settings."""
    set_image_limits(ImageLimits(**config.images.model_dump()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """The environment and the agent that the settings name, imported."""

    env_class: Callable[..., TextEnv]
    env_kwargs: Mapping[str, Any]
    env_id: str = "ENV"
    agent: Agent
    fixed_roles: Mapping[str, RolePolicy] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig) -> Components:
        """Import environment and agent, and limit images to the run's settings.

        Raises:
            UnknownIdError: an id is not registered.
            ConfigError: an argument does not fit.
        """
        use_image_settings(config)
        env = registry().get("envs", config.env.id)
        components = cls(
            env_class=ReferencedEnv(env.id) if env.plugin.is_reference else env.load(),
            env_kwargs={**getattr(env.spec, "kwargs", {}), **config.env.kwargs},
            env_id=config.env.id,
            agent=_make("agents", config.agent, "agent.kwargs"),
        )
        # Made once here, so that a wrong argument is reported before anything slow begins.
        components.make_env().close()
        components.for_evaluation(config)
        return components._with_fixed_roles(config.env.fixed_roles, config, "env.fixed_roles")

    def for_evaluation(self, config: RunConfig) -> Components:
        """Return the components for evaluations, in which other roles may be fixed."""
        if (fixed := config.eval.fixed_roles) is None:
            return self
        return self._with_fixed_roles(fixed, config, "eval.fixed_roles")

    def _with_fixed_roles(
        self, fixed: Mapping[str, str], config: RunConfig, key: str
    ) -> Components:
        from areal_gym.runs.role_policies import make_fixed_roles

        env = self.make_env()
        try:
            return replace(self, fixed_roles=make_fixed_roles(fixed, env, config, key))
        finally:
            env.close()

    def make_env(self) -> TextEnv:
        """Make an environment instance; raise ConfigError if the arguments do not fit."""
        kwargs, wrap = split_wrapper_arguments(self.env_class, self.env_kwargs)
        env = wrap(make_with(self.env_class, kwargs, key="env.kwargs", id=self.env_id))
        if not isinstance(env, TextEnv):
            raise ConfigError(
                f"{self.env_id} makes a {type(env).__name__}, which is not an environment",
                hints=["an environment is a subclass of areal_gym.TextEnv"],
            )
        env.fixed_roles = self.fixed_roles
        return env

    async def make_shared(self, display: Display) -> None:
        """Make what all episodes share, such as container images; raise what episodes would."""
        env = self.make_env()
        is_shown = False

        def on_progress(done: int, total: int) -> None:
            nonlocal is_shown
            if not is_shown:
                display.phase("images", total)
                is_shown = True
            display.advance(done)

        try:
            await env.before_run(on_progress)
        finally:
            await env.aclose()

    async def announce_sandboxes(self, say: Callable[[str], None]) -> list[SandboxReport]:
        """Start the environment's sandboxes, say their levels, and return their reports.

        Raises:
            SandboxError: a sandbox does not start, or protects less than required.
        """
        env = self.make_env()
        try:
            reports = await reports_of(env.sandboxes)
        finally:
            await env.aclose()
        for report in reports:
            say(describe_sandbox(report))
        return reports


class ReferencedEnv:
    """The class that `FILE.py:CLASS` refers to; picklable, because it is loaded by reference."""

    def __init__(self, id: str) -> None:
        self._id = id
        self._load = registry().get("envs", id).load
        self.__signature__ = inspect.signature(self._load())

    def __call__(self, **kwargs: Any) -> Any:
        """Make an environment."""
        return self._load()(**kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        return (ReferencedEnv, (self._id,))


def describe_sandbox(report: SandboxReport) -> str:
    """Return a line that tells people a sandbox's level."""
    warning = "warning: " if report.level is SandboxLevel.NONE else ""
    return f"{warning}sandbox {report.backend}: level {report.level}{_MEANING[report.level]}"


def make_filters(config: RunConfig) -> dict[str, GroupFilter]:
    """Make the group filters of the settings, by id and in order; errors as in `make_with`."""
    return {f.id: _make("filters", f, "rollout.filters") for f in config.rollout.filters}


def make_loggers(config: RunConfig) -> dict[str, MetricsLogger]:
    """Make the loggers of the settings, by id; raise ConfigError if one cannot be made."""
    return {logger.id: _make("loggers", logger, "loggers") for logger in config.loggers}


def make_curriculum(config: RunConfig) -> Curriculum | None:
    """Make the curriculum of the settings; None if they name none."""
    settings = config.rollout.curriculum
    return None if settings is None else _make("curricula", settings, "rollout.curriculum")


def _make(kind: Kind, settings: PluginConfig | AgentConfig, key: str) -> Any:
    factory = registry().load(kind, settings.id)
    return make_with(factory, settings.kwargs, key=key, id=settings.id)


def make_with(factory: Any, kwargs: Mapping[str, Any], *, key: str, id: str) -> Any:
    """Return `factory(**kwargs)`; errors name `key`, the setting to blame, like "env.kwargs".

    Raises:
        ConfigError: an argument is unknown, is missing, or has the wrong type.
        GymError: the factory raises it.
    """
    # A class may accept former arguments that its signature does not have any more.
    kwargs = getattr(factory, "current_arguments", dict)(kwargs)
    check_arguments(factory, kwargs, key=key, id=id)
    try:
        return factory(**kwargs)
    except GymError:
        raise
    except Exception as error:
        message = f"{key}: {id!r} cannot be made with these arguments: {error!r}"
        raise ConfigError(message, hints=[f"its arguments: areal-gym show {id}"]) from error


def check_arguments(factory: Any, kwargs: Mapping[str, Any], *, key: str, id: str) -> None:
    """Check arguments against the signature, and against annotations that pydantic knows.

    Raises:
        ConfigError: an argument is unknown, is missing, or has the wrong type.
    """
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # classes in C have no signature
        return
    hints = [f"its arguments: areal-gym show {id}"]
    if key == "env.kwargs":
        hints.append("to drop the arguments of a run or a recipe: env.kwargs={}")
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        known = list(signature.parameters)
        near = [did_you_mean(name, known) for name in kwargs if name not in known]
        reason = re.sub(r"^[\w.]+\(\) ", "", str(error))
        raise ConfigError(
            f"{key}: the arguments of {id!r} do not fit: {reason}",
            hints=[*filter(None, near), *hints],
        ) from error
    check_types(factory, kwargs, key=key, id=id)


def check_types(factory: Any, kwargs: Mapping[str, Any], *, key: str, id: str) -> None:
    """Raise ConfigError if an argument does not fit its parameter's annotation."""
    function = factory.__init__ if inspect.isclass(factory) else factory
    try:
        types = typing.get_type_hints(function)
    except Exception:  # names that are imported for type checkers only
        return
    for name, value in kwargs.items():
        if name not in types:
            continue
        try:
            TypeAdapter(types[name]).validate_python(value, strict=False)
        except ValidationError as error:
            problem = plain_reason(error.errors()[0])
            raise ConfigError(
                f"{key}: the arguments of {id!r} do not fit: {name} = {value!r}: {problem}",
                hints=[f"its arguments: areal-gym show {id}"],
            ) from None
        except (PydanticUserError, TypeError, NameError, AttributeError):
            pass  # types that pydantic does not know
