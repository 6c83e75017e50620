"""The hooks. Each yields typed specs; none calls back, so order cannot matter.

A plugin is one cheap module that imports `areal_gym.plugins` and nothing else:

    from collections.abc import Iterable
    from areal_gym.plugins import EnvSpec, hookimpl

    @hookimpl
    def register_envs() -> Iterable[EnvSpec]:
        yield EnvSpec(id="dice", entry_point="my_dice.env:Dice", summary="guess the sum")

and is found through the entry-point group `areal_gym` of its distribution:

    [project.entry-points."areal_gym"]
    dice = "my_dice.plugin"

Entry points of specs are text, imported when somebody uses the thing: listing imports nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from areal_gym.plugins.specs import (
    AdvantageSpec,
    AgentSpec,
    CommandSpec,
    CurriculumSpec,
    EngineSpec,
    EnvSpec,
    FilterSpec,
    LoggerSpec,
    PolicyLossSpec,
    RetrieverSpec,
    SandboxSpec,
    ToolSpec,
    TrainerSpec,
    WeightSyncSpec,
)

GROUP = "areal_gym"
"""The entry-point group, and pluggy's project name."""

hookimpl = pluggy.HookimplMarker(GROUP)
"""Marks a function of a plugin module as the implementation of the hook of that name."""

_hookspec = pluggy.HookspecMarker(GROUP)


class HookSpecs:
    """Everything that a plugin can offer."""

    @_hookspec
    def register_envs(self) -> Iterable[EnvSpec]:
        """Offer environments: subclasses of `areal_gym.TextEnv`.

        Example::

            @hookimpl
            def register_envs() -> Iterable[EnvSpec]:
                yield EnvSpec(id="dice", entry_point="my_dice.env:Dice", summary="guess the sum")
        """
        yield from ()

    @_hookspec
    def register_agents(self) -> Iterable[AgentSpec]:
        """Offer agents: classes with `async def play(self, episode)`.

        Example::

            @hookimpl
            def register_agents() -> Iterable[AgentSpec]:
                yield AgentSpec(id="terse", entry_point="my_dice.agent:Terse", summary="one try")
        """
        yield from ()

    @_hookspec
    def register_tools(self) -> Iterable[ToolSpec]:
        """Offer tools: `areal_gym.Tool` objects, made by `@areal_gym.tool`.

        Example::

            @hookimpl
            def register_tools() -> Iterable[ToolSpec]:
                yield ToolSpec(id="roll", entry_point="my_dice.tools:roll", summary="roll a die")
        """
        yield from ()

    @_hookspec
    def register_retrievers(self) -> Iterable[RetrieverSpec]:
        """Offer retrievers for `search`: see `areal_gym.envs.search.retrievers`.

        Example::

            @hookimpl
            def register_retrievers() -> Iterable[RetrieverSpec]:
                yield RetrieverSpec(id="dense", entry_point="my_ret:Dense", summary="by vectors")
        """
        yield from ()

    @_hookspec
    def register_sandboxes(self) -> Iterable[SandboxSpec]:
        """Offer sandboxes: classes with the protocol `areal_gym.sandbox.base.Sandbox`.

        Example::

            @hookimpl
            def register_sandboxes() -> Iterable[SandboxSpec]:
                yield SandboxSpec(id="vm", entry_point="my_vm:VM", summary="a virtual machine each")
        """
        yield from ()

    @_hookspec
    def register_engines(self) -> Iterable[EngineSpec]:
        """Offer engines: classes with the protocol `areal_gym.engines.base.Engine`.

        Example::

            @hookimpl
            def register_engines() -> Iterable[EngineSpec]:
                yield EngineSpec(id="remote", entry_point="my_http:Engine", summary="over HTTP")
        """
        yield from ()

    @_hookspec
    def register_trainers(self) -> Iterable[TrainerSpec]:
        """Offer trainers: classes that take optimizer steps on groups.

        Example::

            @hookimpl
            def register_trainers() -> Iterable[TrainerSpec]:
                yield TrainerSpec(id="evo", entry_point="my_evo:Trainer", summary="no gradients")
        """
        yield from ()

    @_hookspec
    def register_advantage_estimators(self) -> Iterable[AdvantageSpec]:
        """Offer advantage estimators: pure functions of rewards, group ids and what they name.

        `areal_gym.testing.check_advantage_estimator` is their contract.

        Example::

            @hookimpl
            def register_advantage_estimators() -> Iterable[AdvantageSpec]:
                yield AdvantageSpec(id="rank", entry_point="my_adv:rank", summary="reward ranks")
        """
        yield from ()

    @_hookspec
    def register_policy_losses(self) -> Iterable[PolicyLossSpec]:
        """Offer policy losses: pure functions of log-probabilities and advantages.

        `areal_gym.testing.check_policy_loss` is their contract.

        Example::

            @hookimpl
            def register_policy_losses() -> Iterable[PolicyLossSpec]:
                yield PolicyLossSpec(id="plain", entry_point="my_loss:plain", summary="no clipping")
        """
        yield from ()

    @_hookspec
    def register_weight_syncs(self) -> Iterable[WeightSyncSpec]:
        """Offer ways to bring new weights to an engine.

        Example::

            @hookimpl
            def register_weight_syncs() -> Iterable[WeightSyncSpec]:
                yield WeightSyncSpec(id="disk", entry_point="my_sync:Disk", summary="over a disk")
        """
        yield from ()

    @_hookspec
    def register_filters(self) -> Iterable[FilterSpec]:
        """Offer group filters: see `areal_gym.rollout.filters`.

        Example::

            @hookimpl
            def register_filters() -> Iterable[FilterSpec]:
                yield FilterSpec(id="short", entry_point="my_filter:Short", summary="no long ones")
        """
        yield from ()

    @_hookspec
    def register_curricula(self) -> Iterable[CurriculumSpec]:
        """Offer curricula: see `areal_gym.rollout.curriculum`.

        Example::

            @hookimpl
            def register_curricula() -> Iterable[CurriculumSpec]:
                yield CurriculumSpec(id="slow", entry_point="my_cur:Slow", summary="easy first")
        """
        yield from ()

    @_hookspec
    def register_loggers(self) -> Iterable[LoggerSpec]:
        """Offer destinations of metrics besides `metrics.jsonl`: see `areal_gym.loggers.base`.

        Example::

            @hookimpl
            def register_loggers() -> Iterable[LoggerSpec]:
                yield LoggerSpec(id="csv", entry_point="my_log:Csv", summary="a CSV file")
        """
        yield from ()

    @_hookspec
    def register_commands(self) -> Iterable[CommandSpec]:
        """Offer commands of `areal-gym`: click commands. The id is the word that people type.

        Example::

            @hookimpl
            def register_commands() -> Iterable[CommandSpec]:
                yield CommandSpec(id="dice", entry_point="my_dice.cli:dice", summary="roll dice")
        """
        yield from ()
