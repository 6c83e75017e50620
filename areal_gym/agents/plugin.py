"""The built-in agents."""

from __future__ import annotations

from collections.abc import Iterable

from areal_gym.plugins import AgentSpec, hookimpl


@hookimpl
def register_agents() -> Iterable[AgentSpec]:
    """Register the default agent, programs that call the policy over HTTP, and people."""
    yield AgentSpec(
        id="anthropic",
        entry_point="areal_gym.agents.black_box:AnthropicFunctionAgent",
        summary="a function of yours that uses the anthropic client",
        requires=("anthropic",),
        extra="agents",
    )
    yield AgentSpec(
        id="chat",
        entry_point="areal_gym.agents.chat:ChatAgent",
        summary="plain dialogue: the policy and the environment take turns",
    )
    yield AgentSpec(
        id="human",
        entry_point="areal_gym.agents.human:HumanAgent",
        summary="you read each answer, and may comment on it before it counts",
    )
    yield AgentSpec(
        id="online",
        entry_point="areal_gym.agents.online_agent:OnlineAgent",
        summary="outside programs open episodes at the gateway (with --env online)",
    )
    yield AgentSpec(
        id="openai",
        entry_point="areal_gym.agents.black_box:OpenAIFunctionAgent",
        summary="a function of yours that uses the openai client",
        requires=("openai",),
        extra="agents",
    )
    yield AgentSpec(
        id="openai_agents",
        entry_point="areal_gym.agents.openai_agents:OpenAIAgentsAgent",
        summary="agents of the OpenAI Agents SDK, with handoffs and the environment's tools",
        requires=("agents", "openai"),
        extra="agents",
    )
    yield AgentSpec(
        id="program",
        entry_point="areal_gym.agents.program:ProgramAgent",
        summary="a command line that finds the policy at OPENAI_BASE_URL",
    )
