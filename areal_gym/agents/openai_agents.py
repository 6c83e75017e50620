"""Agents of the OpenAI Agents SDK, with handoffs and the environment's tools."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from areal_gym.agents.base import Episode
from areal_gym.agents.black_box import ImportableFunction, close_client
from areal_gym.envs.tools import Tool
from areal_gym.images.openai_parts import openai_content
from areal_gym.types import text_of
from areal_gym.utils.per_loop import PerLoop


class OpenAIAgentsAgent:
    """Runs an `agents.Agent` whose model is the policy; its final output answers the environment.

    Args:
        build: `package.module:name` or `file.py:name` of a function that gets the environment's
            tools, as the SDK's, and returns the `agents.Agent` to start with; handoffs are
            followed. By default one agent has all the tools, and the system message as its
            instructions.
        max_turns: the episode is truncated after this many turns of the SDK.
        api: the API of OpenAI that the SDK uses.
        max_calls: the most policy calls of one episode.
    """

    def __init__(
        self,
        build: str | Callable[[list[Any]], Any] | None = None,
        max_turns: int = 10,
        api: Literal["chat", "responses"] = "chat",
        max_calls: int = 256,
    ) -> None:
        self._max_calls = max_calls
        self._build = None if build is None else ImportableFunction(build)
        self._max_turns = max_turns
        self._api = api
        self._clients: PerLoop[Any] = PerLoop(close_client)

    async def play(self, episode: Episode) -> None:
        """Run the agent; its final output is the answer."""
        import agents
        import openai

        endpoint = await episode.access(max_calls=self._max_calls)
        key, url = endpoint.api_key, endpoint.base_url
        make_client = partial(openai.AsyncOpenAI, api_key=key, base_url=url, timeout=None)
        client = self._clients.get(make_client).with_options(api_key=key)
        is_chat = self._api == "chat"
        model_class = agents.OpenAIChatCompletionsModel if is_chat else agents.OpenAIResponsesModel
        model = model_class("policy", client)
        system = [text_of(m["content"]) for m in episode.first_messages if m["role"] == "system"]
        messages = [m for m in episode.first_messages if m["role"] != "system"]
        tools = [_sdk_tool(episode, tool) for tool in episode.tools]
        if self._build is not None:
            agent = self._build.function(tools)
        else:
            agent = agents.Agent(
                name="agent", instructions="\n\n".join(system) or None, tools=tools
            )
        try:
            result = await agents.Runner.run(
                agent,
                [
                    {"role": m["role"], "content": openai_content(m["content"], "responses")}
                    for m in messages
                ],
                max_turns=self._max_turns,
                run_config=agents.RunConfig(model=model, tracing_disabled=True),
            )
        except agents.MaxTurnsExceeded:
            await episode.finish(is_truncated=True)
        except agents.ModelBehaviorError:  # the policy called an unknown tool: its own mistake
            await episode.finish()
        else:
            await episode.finish(str(result.final_output))


def _sdk_tool(episode: Episode, tool: Tool) -> Any:
    from agents import FunctionTool
    from agents.tool_context import ToolContext

    async def invoke(context: ToolContext[Any], arguments: str) -> str:
        return await episode.call_tool(context.tool_call_id)

    return FunctionTool(
        name=tool.name,
        description=tool.description,
        params_json_schema=dict(tool.parameters),
        on_invoke_tool=invoke,
        strict_json_schema=False,
    )
