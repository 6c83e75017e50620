"""Fuzz every tool of an MCP server over HTTP from its schema: no failure, no lost turn."""

import asyncio
import contextlib
import json
import random

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import areal_gym
from areal_gym.envs.server.env_sessions import Sessions
from tests._support.raw_http import exchange, odd_request, statuses
from tests._support.schema_noise import body_bytes, mutated, value

pytest.importorskip("mcp", reason="needs the extra mcp")

from areal_gym.envs.server.mcp_server import make_mcp_server, serve_http
from areal_gym.utils.http_servers.connections import ConnectionLimits

VERSION = "2026-07-28"
META = {
    "io.modelcontextprotocol/protocolVersion": VERSION,
    "io.modelcontextprotocol/clientInfo": {"name": "fuzz", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}
INTERNAL_ERROR = -32603
"""The JSON-RPC code of a failure of the server itself."""


def call_of(name, arguments):
    """Return the body of a valid request that calls a tool."""
    params = {"name": name, "arguments": arguments, "_meta": META}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


class Client:
    """Sends raw requests to an MCP server."""

    def __init__(self, http, url):
        self.http, self.url = http, url

    async def post(self, body, method="tools/call", name="start_episode"):
        """Post any bytes; return status and content of the answer."""
        headers = {
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
            "Mcp-Protocol-Version": VERSION,
            "Mcp-Method": method,
            "Mcp-Name": name,
        }
        async with self.http.post(self.url, data=body, headers=headers) as answer:
            text = await answer.text()
        try:
            return answer.status, json.loads(text)
        except json.JSONDecodeError:
            return answer.status, {"text": text}

    async def call(self, name, arguments):
        """Return the result of a tool, or None if the request was refused."""
        body = json.dumps(call_of(name, arguments)).encode()
        status, content = await self.post(body, name=name)
        assert status < 500, (name, arguments, content)
        return content.get("result")


@contextlib.asynccontextmanager
async def serving(env, **options):
    """Serve an environment on a free port; yield a client and the sessions."""
    sessions = Sessions(lambda: areal_gym.make(env))
    address = asyncio.get_running_loop().create_future()
    async with sessions, aiohttp.ClientSession() as http:
        server = asyncio.create_task(
            serve_http(
                make_mcp_server(sessions, env),
                host="127.0.0.1",
                port=0,
                token=None,
                on_ready=address.set_result,
                **options,
            )
        )
        try:
            yield Client(http, await address), sessions
        finally:
            server.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await server


async def play_whole_episode(client, sessions, env, begun):
    """Play the gold policy in an episode that was started before the malformed calls."""
    local = areal_gym.make(env)
    local.reset(seed=7)
    session = sessions.get(begun)
    assert session.env.num_turns == 0
    assert session.env.messages == local.messages
    result = await client.call("answer", {"episode": begun, "text": local.gold_action()})
    assert result["structuredContent"]["reward"] == 1.0


def malformed_call(rng, tools, episode):
    """Return a malformed request body made from a tool's schema, and the tool's name."""
    tool = rng.choice(tools)
    schema = tool["inputSchema"]
    arguments = value(schema, {}, rng)
    if isinstance(arguments, dict) and "episode" in arguments and rng.random() < 0.8:
        arguments["episode"] = episode
    content = call_of(tool["name"], arguments)
    if rng.random() < 0.5:
        content = mutated(content, rng)
    return body_bytes(content, rng), tool["name"]


@pytest.mark.parametrize("env", ["countdown", "tir"])
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_mcp_tools_refuse_malformed_calls_and_keep_the_episode(env, seed):
    rng = random.Random(seed)

    async def use():
        async with serving(env) as (client, sessions):
            listed = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": META}}
            _, content = await client.post(json.dumps(listed).encode(), "tools/list")
            tools = content["result"]["tools"]
            assert {tool["name"] for tool in tools} >= {"start_episode", "answer"}
            begun = (await client.call("start_episode", {"seed": 7}))["structuredContent"][
                "episode"
            ]
            other = (await client.call("start_episode", {"seed": 8}))["structuredContent"]
            for _ in range(20):
                body, name = malformed_call(rng, tools, other["episode"])
                status, content = await client.post(body, name=name)
                assert status < 500, (body, content)
                assert content.get("error", {}).get("code") != INTERNAL_ERROR, (body, content)
            if env == "countdown":
                await play_whole_episode(client, sessions, env, begun)

    asyncio.run(use())


def test_mcp_server_survives_malformed_http():
    rng = random.Random(29)
    limits = ConnectionLimits(header_s=2.0, body_s=2.0, idle_s=2.0)
    bodies = [b"", b"x", json.dumps(call_of("start_episode", {"seed": 7})).encode()]

    async def use():
        async with serving("countdown", limits=limits) as (client, sessions):
            begun = await client.call("start_episode", {"seed": 7})
            port = int(client.url.rpartition(":")[2].partition("/")[0])
            odd = [odd_request(rng, ["/mcp", "/mcp/", "/"], bodies) for _ in range(150)]
            answers = await asyncio.gather(*(exchange(port, raw, ends=False) for raw in odd))
            for raw, answer in zip(odd, answers, strict=True):
                assert all(status < 500 for status in statuses(answer)), (raw, answer)
            await play_whole_episode(
                client, sessions, "countdown", begun["structuredContent"]["episode"]
            )

    asyncio.run(use())
