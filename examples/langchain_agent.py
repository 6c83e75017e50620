"""An agent of LangChain, which calls the environment's tools until it has an answer.

    areal-gym train --env tir --agent openai \\
        agent.kwargs.function=examples/langchain_agent.py:solve agent.kwargs.max_calls=8

LangChain is as `pip install langchain langchain-openai` brings it; the model's `base_url` and
`api_key` are all that changes. The environment runs the tools, so its rewards count.
"""

from __future__ import annotations

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_tool_call
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, DefaultAsyncHttpxClient


async def solve(client: AsyncOpenAI, task) -> str:
    names = {tool["function"]["name"] for tool in task.tools}

    @wrap_tool_call
    async def in_the_environment(request, handler):
        call = request.tool_call
        is_known = call["name"] in names
        said = await task.call_tool(call["id"]) if is_known else "there is no such tool"
        return ToolMessage(said, tool_call_id=call["id"])

    # LangChain's own connections would outlive the event loop that they belong to.
    async with DefaultAsyncHttpxClient() as http:
        model = ChatOpenAI(
            model="gpt-4o",
            base_url=str(client.base_url),
            api_key=client.api_key,
            http_async_client=http,
        )
        agent = create_agent(model, tools=task.tools, middleware=[in_the_environment])
        state = await agent.ainvoke({"messages": task.messages})
    return state["messages"][-1].text
