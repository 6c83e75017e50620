"""An environment as an MCP server, played by the official client, over every transport."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest

import areal_gym
from areal_gym.envs.checker import play
from areal_gym.envs.server.env_sessions import Sessions
from areal_gym.errors import UsageError

pytest.importorskip("mcp", reason="needs the extra mcp")

from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from areal_gym.envs.server.mcp_server import make_mcp_server


def text_of(result):
    return "\n".join(block.text for block in result.content)


def using(use, make=lambda: areal_gym.make("tir"), **limits):
    """Run `use(client, sessions)` with a client in this process."""

    async def main():
        sessions = Sessions(make, **limits)
        async with sessions, Client(make_mcp_server(sessions, "tir")) as client:
            await use(client, sessions)

    asyncio.run(main())


async def play_with(client, seed):
    """Play the gold policy of `tir` through the client; return the last result."""
    env = areal_gym.make("tir")
    env.reset(seed=seed)
    begun = await client.call_tool("start_episode", {"seed": seed})
    episode = begun.structured_content["episode"]
    assert env.messages[-1]["content"] in text_of(begun)
    code = f"print({env.task.data['expression']})"
    printed = text_of(await client.call_tool("python", {"episode": episode, "code": code}))
    answer = {"episode": episode, "text": f"\\boxed{{{printed}}}"}
    return await client.call_tool("answer", answer)


def test_mcp_tools_are_the_environments_plus_two():
    async def use(client, sessions):
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert list(tools) == ["start_episode", "python", "answer"]
        (ours,) = areal_gym.make("tir").tools
        theirs = tools["python"]
        assert theirs.description == ours.description
        assert list(theirs.input_schema["properties"]) == ["episode", "code"]
        assert theirs.input_schema["required"] == ["episode", "code"]

    using(use)


def test_episodes_over_mcp_earn_their_reward():
    async def use(client, sessions):
        for seed in range(3):
            last = await play_with(client, seed)
            assert last.structured_content["terminated"]
            assert last.structured_content["reward"] == 1.0
            assert text_of(last).endswith("the episode is over: reward 1")
        assert len(sessions) == 0

    using(use)


def test_concurrent_mcp_episodes_are_independent():
    async def use(client, sessions):
        results = await asyncio.gather(*(play_with(client, seed) for seed in range(16)))
        assert [last.structured_content["reward"] for last in results] == [1.0] * 16

    using(use)


def test_mcp_episode_of_a_chosen_task():
    async def use(client, sessions):
        begun = await client.call_tool("start_episode", {"split": "test", "index": 4})
        env = areal_gym.make("tir")
        play(env, areal_gym.TextEnv.noop_action, options={"split": "test", "index": 4})
        assert begun.structured_content["task_id"] == env.task.id

    using(use)


def test_mcp_client_mistakes_are_errors():
    async def use(client, sessions):
        episode = (await client.call_tool("start_episode", {})).structured_content["episode"]
        for tool, arguments, message in (
            ("python", {"code": "1"}, "which episode?"),
            ("python", {"episode": "another", "code": "1"}, "no such session"),
            ("answer", {"episode": episode}, "answer takes a text"),
            ("start_episode", {"seed": -1}, "a seed is a whole number"),
            ("start_episode", {"split": "dev"}, "no split 'dev'"),
            ("start_episode", {"options": {}}, "takes seed, split and index"),
        ):
            result = await client.call_tool(tool, arguments)
            assert result.is_error
            assert message in text_of(result)
        assert len(sessions) == 1
        # Errors that the environment reports to a policy are not errors of the MCP call.
        result = await client.call_tool("python", {"episode": episode, "cod": "1"})
        assert "missing: code" in text_of(result)
        assert not result.is_error

    using(use)


def test_mcp_sessions_are_limited():
    async def use(client, sessions):
        await client.call_tool("start_episode", {})
        result = await client.call_tool("start_episode", {})
        assert result.is_error
        assert "all 1 sessions are in use" in text_of(result)

    using(use, max_sessions=1)


def test_reserved_tool_names_are_refused():
    class Clashing(areal_gym.TextEnv):
        """Its tool is called answer."""

        tools = (areal_gym.Tool(name="answer", description="x", parameters={}),)

    with pytest.raises(UsageError, match="a tool is named 'answer'"):
        make_mcp_server(Sessions(Clashing), "clashing")


ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
COMMAND = ["-m", "areal_gym", "serve-env", "tir", "--mcp"]


@pytest.mark.slow
def test_mcp_over_stdio():
    async def use():
        parameters = StdioServerParameters(
            command=sys.executable, args=[*COMMAND, "stdio"], env=ENV
        )
        async with Client(stdio_client(parameters)) as client:
            last = await play_with(client, 1)
            assert last.structured_content["reward"] == 1.0

    asyncio.run(use())


@pytest.mark.slow
def test_mcp_over_http_with_a_token():
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    process = subprocess.Popen(
        [sys.executable, *COMMAND, "http"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENV, "AREAL_GYM_ENV_TOKEN": "sesame"},
    )
    try:
        address = json.loads(process.stdout.readline())
        assert address["token"] == "sesame"

        async def use():
            async with httpx2.AsyncClient() as http:
                refused = await http.post(address["url"], json={})
                assert refused.status_code == 401
            headers = {"Authorization": "Bearer sesame"}
            async with httpx2.AsyncClient(headers=headers, timeout=30) as http:
                transport = streamable_http_client(address["url"], http_client=http)
                async with Client(transport) as client:
                    results = await asyncio.gather(*(play_with(client, seed) for seed in range(4)))
                    assert [last.structured_content["reward"] for last in results] == [1.0] * 4

        asyncio.run(use())
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert "Traceback" not in err
