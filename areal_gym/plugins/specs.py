"""The kinds of plugins, one class each: typed descriptions whose entry points load on use.

A plugin is one cheap module that imports `areal_gym.plugins` and nothing else; its hooks are
functions that yield specs, and their order does not matter:

    @hookimpl
    def register_envs() -> Iterable[EnvSpec]:
        yield EnvSpec(id="dice", entry_point="my_dice.env:Dice", summary="guess the sum")

Its distribution declares it in the entry-point group `areal_gym`:

    [project.entry-points."areal_gym"]
    dice = "my_dice.plugin"

A new kind is one class statement here (and its name in `areal_gym.plugins`). Its hook, its place in
`KINDS`, `areal-gym list`, `areal-gym show`, completion and the tests of the docs follow.
docs/plugins.md has a section with an example for each hook.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pluggy

GROUP = "areal_gym"
"""The entry-point group, and pluggy's project name."""

hookimpl = pluggy.HookimplMarker(GROUP)
"""Marks a function of a plugin module as the implementation of the hook of that name."""

KINDS: dict[str, type[Spec]] = {}
"""The words that people type (`areal-gym list WORD`), and the specs they stand for."""


class HookSpecs:
    """One hook for each kind of plugin, such as `register_envs`: `Spec` adds them."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The description of what a plugin offers. Subclasses are kinds, with class arguments of the
    same names; their docstring is the contract."""

    kind: ClassVar[str] = "thing"
    """What messages call one thing of the kind, like "policy loss"."""
    plural: ClassVar[str] = ""
    """The word of `areal-gym list`, like "losses"."""
    hook: ClassVar[str] = ""
    """The function that yields such specs; by default `register_` and the plural."""
    setting: ClassVar[str] = ""
    """The setting whose value is an id of this kind, like "trainer.loss"."""
    set_by: ClassVar[str] = ""
    """How keyword arguments are set on the command line; `{id}` stands for the id. By default the
    setting beside: "env.kwargs" for "env.id", "trainer.loss_kwargs" for "trainer.loss"."""
    takes_from_run: ClassVar[bool] = False
    """Whether a run passes the arguments that have no default."""

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

    def __init_subclass__(cls, *, plural: str = "", setting: str = "", **about_kind: Any) -> None:
        super().__init_subclass__()
        if not plural:  # a plugin's own subclass of a kind
            return
        cls.plural, cls.hook, cls.setting = plural, f"register_{plural.replace('-', '_')}", setting
        if setting:
            section = setting.removesuffix("id") if setting.endswith(".id") else f"{setting}_"
            cls.set_by = f"{section}kwargs.NAME=VALUE"
        for name, value in about_kind.items():
            setattr(cls, name, value)
        KINDS[plural] = cls
        setattr(HookSpecs, cls.hook, _hook(cls))

    @property
    def shown_id(self) -> str:
        """The id, as lists show it."""
        return self.id


def _hook(cls: type[Spec]) -> Any:
    """Declare the hook of a kind of plugin; its documentation is the contract of the kind."""

    def hook(self: HookSpecs) -> Iterable[object]:
        return ()

    name = cls.__name__
    hook.__name__ = cls.hook
    hook.__qualname__ = f"HookSpecs.{cls.hook}"
    hook.__doc__ = f"""{cls.__doc__ or ""}

        Example::

            @hookimpl
            def {cls.hook}() -> Iterable[{name}]:
                yield {name}(id="mine", entry_point="my_plugin:Mine", summary="what it does")
        """
    return pluggy.HookspecMarker(GROUP)(hook)


@dataclass(frozen=True, kw_only=True)
class EnvSpec(Spec, kind="environment", plural="envs", setting="env.id"):
    """An environment: a subclass of `areal_gym.TextEnv`."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for the class; the user's settings override them."""
    tags: tuple[str, ...] = ()
    version: int = 0
    """The `-vN` of the Gymnasium id; raised when scores stop being comparable."""
    argument: str = ""
    """An adapter's: the keyword argument that takes the text after a colon (`gymnasium:NAME`)."""

    @property
    def shown_id(self) -> str:
        """The id, for an adapter with a placeholder for the text after the colon."""
        return f"{self.id}:<{self.argument}>" if self.argument else self.id

    def named(self, text: str) -> EnvSpec:
        """Return the environment that an adapter makes of `text`."""
        return replace(
            self, id=f"{self.id}:{text}", kwargs={**self.kwargs, self.argument: text}, argument=""
        )


class BenchmarkSpec(Spec, kind="benchmark", plural="benchmarks"):
    """A known benchmark: an `areal_gym.envs.benchmarks.Benchmark` object.

    `areal-gym eval --benchmark ID` measures it.
    """


class AgentSpec(Spec, kind="agent", plural="agents", setting="agent.id"):
    """An agent: a class with `async def play(self, episode)`."""


class ToolSpec(Spec, kind="tool", plural="tools"):
    """A tool: an `areal_gym.Tool` object, made by `@areal_gym.tool`."""


@dataclass(frozen=True, kw_only=True)
class RewardSpec(
    Spec,
    kind="reward",
    plural="rewards",
    set_by='"env.kwargs.reward={{reward: {id}, kwargs: {{NAME: VALUE}}}}"',
):
    """A reward: a function of a completion and its row, or a class of such (`areal_gym.rewards`).

    It gets what it names in its signature, and returns a number or named parts.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for the function or the class; the user's settings override them."""


class RetrieverSpec(Spec, kind="retriever", plural="retrievers"):
    """A retriever for `search`: a class with the protocol in `areal_gym.envs.search.retrievers`."""


class SandboxSpec(Spec, kind="sandbox", plural="sandboxes"):
    """A sandbox: a class with the protocol `areal_gym.sandbox.base.Sandbox`."""


class PlaceSpec(Spec, kind="place", plural="places"):
    """A backend of places: a class with the protocol `areal_gym.places.Places`."""


class EngineSpec(Spec, kind="engine", plural="engines", setting="engine.id", takes_from_run=True):
    """An engine: a class with the protocol `areal_gym.engines.base.Engine`."""


class TrainerSpec(
    Spec, kind="trainer", plural="trainers", setting="trainer.id", set_by="", takes_from_run=True
):
    """A trainer: a class that takes optimizer steps on groups."""


class AdvantageSpec(
    Spec,
    kind="advantage estimator",
    plural="advantages",
    hook="register_advantage_estimators",
    setting="trainer.advantage",
    takes_from_run=True,
):
    """An advantage estimator: a pure function of rewards, group ids and what else it names.

    `areal_gym.testing.check_advantage_estimator` checks the contract.
    """


class PolicyLossSpec(
    Spec,
    kind="policy loss",
    plural="losses",
    hook="register_policy_losses",
    setting="trainer.loss",
    takes_from_run=True,
):
    """A policy loss: a pure function of log-probabilities and advantages.

    `areal_gym.testing.check_policy_loss` checks the contract.
    """


class WeightSyncSpec(
    Spec,
    kind="weight sync",
    plural="weight-syncs",
    setting="trainer.weight_sync.id",
    takes_from_run=True,
):
    """A weight sync: a class that brings new weights to the engine."""


class FilterSpec(
    Spec,
    kind="filter",
    plural="filters",
    set_by='"rollout.filters=[{{id: {id}, kwargs: {{NAME: VALUE}}}}]"',
):
    """A group filter: a class whose objects reject groups (`areal_gym.rollout.filters`)."""


class CurriculumSpec(
    Spec,
    kind="curriculum",
    plural="curricula",
    setting="rollout.curriculum",
    set_by='"rollout.curriculum={{id: {id}, kwargs: {{NAME: VALUE}}}}"',
):
    """A curriculum: a class whose objects choose the next task (`areal_gym.rollout.curriculum`)."""


class LoggerSpec(
    Spec,
    kind="logger",
    plural="loggers",
    set_by='"loggers=[{{id: {id}, kwargs: {{NAME: VALUE}}}}]"',
):
    """A destination for metrics besides `metrics.jsonl` (`areal_gym.loggers.base`)."""


class CommandSpec(Spec, kind="command", plural="commands"):
    """A command of `areal-gym`: a click command, whose id is the word that people type."""
