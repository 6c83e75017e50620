"""A ChatAgent of CAMEL, which calls the environment's tools until it has an answer.

    areal-gym train --env tir --agent openai \\
        agent.kwargs.function=examples/camel_agent.py:solve agent.kwargs.max_calls=8

CAMEL is as `pip install camel-ai` brings it; its model gets our client. CAMEL does not tell a tool
which call it is run for: it is the first one of the history that has no result yet.
"""

from __future__ import annotations

from camel.agents import ChatAgent
from camel.models import OpenAICompatibleModel
from camel.toolkits import FunctionTool
from camel.utils import BaseTokenCounter
from openai import AsyncOpenAI


class Uncounted(BaseTokenCounter):
    """The engine knows the context's limit; CAMEL's counter is of another model's tokens."""

    def count_tokens_from_messages(self, messages) -> int:
        return 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode()


async def solve(client: AsyncOpenAI, task) -> str:
    async def in_the_environment(**arguments) -> str:
        results = {m["tool_call_id"] for m in agent.chat_history if m["role"] == "tool"}
        calls = [call["id"] for m in agent.chat_history for call in m.get("tool_calls") or ()]
        return await task.call_tool(next(id for id in calls if id not in results))

    model = OpenAICompatibleModel(
        "gpt-4o", api_key=client.api_key, async_client=client, token_counter=Uncounted()
    )
    agent = ChatAgent(
        "\n".join(m["content"] for m in task.messages if m["role"] == "system") or None,
        model=model,
        tools=[FunctionTool(in_the_environment, schema) for schema in task.tools],
        step_timeout=None,
    )
    response = await agent.astep(task.prompt)
    return response.msgs[-1].content if response.msgs else ""
