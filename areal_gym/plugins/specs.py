"""What plugins yield: typed descriptions with lazy entry points. Nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """One thing that a plugin offers."""

    kind: ClassVar[str] = "thing"
    """The word people use for it in messages."""
    hook: ClassVar[str] = ""
    """The hook that yields specs of this kind."""

    id: str
    """What people type; `namespace/name` or `name`."""
    entry_point: str
    """`"package.module:Name"`, imported on first use."""
    summary: str
    """One line, lower case, no full stop: what `areal-gym list` shows."""
    requires: tuple[str, ...] = ()
    """Import names that must be installed; a missing one is shown in the list."""
    extra: str = ""
    """The extra of the plugin's own distribution that installs them; "" installs them by name."""

    @property
    def shown_id(self) -> str:
        """The id, as lists show it."""
        return self.id


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSpec(Spec):
    """An environment: a `TextEnv` subclass."""

    kind: ClassVar[str] = "environment"
    hook: ClassVar[str] = "register_envs"

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for the class; a person's settings come on top."""
    tags: tuple[str, ...] = ()
    version: int = 0
    """The `-vN` of the Gymnasium id; raised when scores stop being comparable."""
    argument: str = ""
    """An adapter's: the keyword argument that the text after a colon is, as in `gymnasium:NAME`."""

    @property
    def shown_id(self) -> str:
        """The id, with what an adapter wants to have after a colon."""
        return f"{self.id}:<{self.argument}>" if self.argument else self.id

    def named(self, text: str) -> EnvSpec:
        """Of an adapter: the one environment that `text` names."""
        return replace(
            self, id=f"{self.id}:{text}", kwargs={**self.kwargs, self.argument: text}, argument=""
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSpec(Spec):
    """An agent: a class with `async play(episode)`."""

    kind: ClassVar[str] = "agent"
    hook: ClassVar[str] = "register_agents"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSpec(Spec):
    """A tool: an `areal_gym.envs.tools.Tool`."""

    kind: ClassVar[str] = "tool"
    hook: ClassVar[str] = "register_tools"


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrieverSpec(Spec):
    """Who answers queries in `search`: a class with the `Retriever` protocol."""

    kind: ClassVar[str] = "retriever"
    hook: ClassVar[str] = "register_retrievers"


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSpec(Spec):
    """A sandbox: a class with the `Sandbox` protocol."""

    kind: ClassVar[str] = "sandbox"
    hook: ClassVar[str] = "register_sandboxes"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec(Spec):
    """An engine: a class with the `Engine` protocol."""

    kind: ClassVar[str] = "engine"
    hook: ClassVar[str] = "register_engines"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSpec(Spec):
    """A trainer: a class that takes steps on groups."""

    kind: ClassVar[str] = "trainer"
    hook: ClassVar[str] = "register_trainers"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageSpec(Spec):
    """An advantage estimator: a pure function of rewards and group ids."""

    kind: ClassVar[str] = "advantage estimator"
    hook: ClassVar[str] = "register_advantage_estimators"


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLossSpec(Spec):
    """A policy loss: a pure function of log-probabilities and advantages."""

    kind: ClassVar[str] = "policy loss"
    hook: ClassVar[str] = "register_policy_losses"


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSyncSpec(Spec):
    """A way to bring new weights to the engine."""

    kind: ClassVar[str] = "weight sync"
    hook: ClassVar[str] = "register_weight_syncs"


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterSpec(Spec):
    """A group filter: a class whose objects say why a finished group is not worth training on."""

    kind: ClassVar[str] = "filter"
    hook: ClassVar[str] = "register_filters"


@dataclass(frozen=True, kw_only=True, slots=True)
class CurriculumSpec(Spec):
    """A curriculum: a class whose objects choose the next task from how the last ones went."""

    kind: ClassVar[str] = "curriculum"
    hook: ClassVar[str] = "register_curricula"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggerSpec(Spec):
    """A destination for metrics besides `metrics.jsonl`."""

    kind: ClassVar[str] = "logger"
    hook: ClassVar[str] = "register_loggers"


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandSpec(Spec):
    """A command of `areal-gym`: a click command."""

    kind: ClassVar[str] = "command"
    hook: ClassVar[str] = "register_commands"
