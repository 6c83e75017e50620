"""The built-in environments."""

from __future__ import annotations

from collections.abc import Iterable

from areal_gym.plugins import EnvSpec, hookimpl

__all__ = ["register_envs"]


@hookimpl
def register_envs() -> Iterable[EnvSpec]:
    """Offer the environments that come with areal-gym."""
    yield EnvSpec(
        id="countdown",
        entry_point="areal_gym.envs.countdown:CountdownEnv",
        summary="reach a target with given numbers",
        tags=("math", "single-turn", "generated"),
    )
    yield EnvSpec(
        id="math",
        entry_point="areal_gym.envs.math:MathEnv",
        summary="arithmetic and word problems, or a file of questions",
        tags=("math", "single-turn", "generated", "jsonl"),
    )
    yield EnvSpec(
        id="online",
        entry_point="areal_gym.envs.online:OnlineEnv",
        summary="no environment: programs outside ask the policy and post rewards",
        tags=("gateway",),
    )
    yield EnvSpec(
        id="tir",
        entry_point="areal_gym.envs.tir:TirEnv",
        summary="arithmetic with a Python sandbox",
        tags=("math", "tools", "multi-turn", "generated"),
    )
