"""Two agents of the OpenAI Agents SDK learn together: one hands over, the other calculates.

    areal-gym train --env tir --agent openai_agents \\
        agent.kwargs.build=examples/openai_agents_math.py:build

Nothing here knows of training. The policy speaks for both agents; each has its own instructions,
so what each says is a branch of the episode's trajectory, and one reward counts for both.
"""

from __future__ import annotations

from typing import Any

from agents import Agent

TRIAGE = "You decide who answers. Hand sums over to the calculator; answer anything else yourself."
CALCULATOR = (
    "You calculate with the python tool, and give the result in a box: \\boxed{RESULT}. "
    "Never calculate in your head."
)


def build(tools: list[Any]) -> Agent:
    """The agent to begin with; `tools` are the environment's."""
    calculator = Agent(
        name="Calculator",
        handoff_description="Calculates exactly.",
        instructions=CALCULATOR,
        tools=tools,
    )
    return Agent(name="Triage", instructions=TRIAGE, handoffs=[calculator])
