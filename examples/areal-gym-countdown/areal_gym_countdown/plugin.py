"""What this package offers to areal-gym. Cheap to import: the entry points are text."""

from __future__ import annotations

from collections.abc import Iterable

from areal_gym.plugins import AgentSpec, EnvSpec, PolicyLossSpec, hookimpl


@hookimpl
def register_envs() -> Iterable[EnvSpec]:
    """One environment."""
    yield EnvSpec(
        id="countdown/numbers",
        entry_point="areal_gym_countdown.env:NumbersEnv",
        summary="reach a target with three numbers, in three tries",
        tags=("math", "multi-turn", "generated"),
    )


@hookimpl
def register_agents() -> Iterable[AgentSpec]:
    """One agent."""
    yield AgentSpec(
        id="countdown/reminder",
        entry_point="areal_gym_countdown.agent:ReminderAgent",
        summary="plain dialogue that repeats the rules in every request",
    )


@hookimpl
def register_policy_losses() -> Iterable[PolicyLossSpec]:
    """One loss."""
    yield PolicyLossSpec(
        id="countdown/vanilla",
        entry_point="areal_gym_countdown.loss:vanilla",
        summary="the plain policy gradient: no ratio, no clipping",
    )
