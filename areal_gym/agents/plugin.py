"""The agents that come with areal-gym."""

from __future__ import annotations

from collections.abc import Iterable

from areal_gym.plugins import AgentSpec, hookimpl


@hookimpl
def register_agents() -> Iterable[AgentSpec]:
    """The default loop."""
    yield AgentSpec(
        id="chat",
        entry_point="areal_gym.agents.chat:ChatAgent",
        summary="plain dialogue: the policy and the environment take turns",
    )
