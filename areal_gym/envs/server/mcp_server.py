"""An environment as an MCP server: `areal-gym serve-env ENV --mcp`.

Whoever has a client of the Model Context Protocol can play: its tools are those of the environment,
and two more. The protocol's newest version knows no sessions, so an episode is an argument:

    start_episode(seed, split, index)  ->  the episode's id, and what the task is
    TOOL(episode, ...)                 ->  what the tool says
    answer(episode, text)              ->  an assistant message that calls nothing; the reward
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mcp import types
from mcp.server import Server, ServerRequestContext
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from areal_gym.envs.base import TextEnv
from areal_gym.envs.server.env_sessions import FullError, GoneError, Session, Sessions
from areal_gym.envs.server.wire_format import step_body
from areal_gym.errors import EpisodeError, UsageError
from areal_gym.types import FunctionCall, Message, readable
from areal_gym.utils.http_servers.addresses import http_address, is_same_secret, listen
from areal_gym.utils.http_servers.asgi_site import serve_asgi
from areal_gym.utils.http_servers.connections import ConnectionLimits
from areal_gym.version import __version__

START, ANSWER, EPISODE = "start_episode", "answer", "episode"

_EPISODE = {"type": "string", "description": f"What {START} gave."}


def make_mcp_server(sessions: Sessions, env_id: str) -> Server[Any]:
    """Return an MCP server of the environment, without a transport; the caller enters `sessions`.

    A tool or an argument of the environment whose name is needed here is a UsageError.
    """
    env = sessions.example
    tools = _tools(env)

    async def list_tools(
        context: ServerRequestContext[Any], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=tools)

    async def call_tool(
        context: ServerRequestContext[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        try:
            return await _call(sessions, params.name, params.arguments or {})
        except (UsageError, GoneError, FullError) as error:
            # The caller can do better; what fails below is no answer of a tool.
            return _result("\n".join((error.message, *error.hints)), {}, is_error=True)
        except EpisodeError as error:
            return _result(f"the environment failed: {error}", {}, is_error=True)

    return Server(
        f"areal-gym {env_id}",
        version=__version__,
        instructions=f"Call {START} first. {(type(env).__doc__ or '').strip()}",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def _tools(env: TextEnv) -> list[types.Tool]:
    taken = {tool.name for tool in env.tools} & {START, ANSWER}
    if taken:
        raise UsageError(f"a tool is named {taken.pop()!r}, which MCP clients need otherwise")
    whole, text = {"type": "integer", "minimum": 0}, {"type": "string"}
    return [
        types.Tool(
            name=START,
            description="Begin an episode: draws a task, or takes number `index` of a split.",
            input_schema=_object({"seed": whole, "split": text, "index": whole}, []),
        ),
        *(_episode_tool(tool.name, tool.description, tool.parameters) for tool in env.tools),
        _episode_tool(
            ANSWER,
            "Say something that calls no tool, such as the final answer.",
            {"properties": {"text": text}, "required": ["text"]},
        ),
    ]


def _episode_tool(name: str, description: str, parameters: Mapping[str, Any]) -> types.Tool:
    properties = parameters.get("properties", {})
    if EPISODE in properties:
        raise UsageError(f"{name} has an argument {EPISODE!r}, which MCP clients need otherwise")
    required = [EPISODE, *parameters.get("required", ())]
    schema = _object({EPISODE: _EPISODE, **properties}, required)
    return types.Tool(name=name, description=description, input_schema=schema)


def _object(properties: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": required}


# ---- calls --------------------------------------------------------------------------------------


async def _call(sessions: Sessions, name: str, arguments: dict[str, Any]) -> types.CallToolResult:
    if name == START:
        return await _start(sessions, arguments)
    episode = arguments.pop(EPISODE, None)
    if not isinstance(episode, str):
        raise UsageError(f"which episode? {EPISODE!r} is what {START} gave")
    message: Message = {"role": "assistant", "content": ""}
    if name == ANSWER:
        text = arguments.get("text")
        if not isinstance(text, str):
            raise UsageError(f"{ANSWER} takes a text")
        message["content"] = text
    else:
        function: FunctionCall = {"name": name, "arguments": arguments}
        message["tool_calls"] = [{"id": "call-0", "type": "function", "function": function}]
    return await _play(sessions.get(episode), message, sessions)


async def _start(sessions: Sessions, arguments: dict[str, Any]) -> types.CallToolResult:
    seed = arguments.pop("seed", None)
    if seed is not None and not (type(seed) is int and 0 <= seed < 2**64):
        raise UsageError(f"a seed is a whole number from 0 on, not {seed!r}")
    unknown = set(arguments) - {"split", "index"}
    if unknown:
        raise UsageError(f"{START} takes seed, split and index, not {', '.join(sorted(unknown))}")
    session, info = await sessions.begin(seed, arguments)
    opening = "\n\n".join(readable(message["content"]) for message in info["messages"])
    return _result(
        f"{EPISODE}: {session.id}\n\n{opening}",
        {EPISODE: session.id, "task_id": info["task_id"], "messages": list(info["messages"])},
    )


async def _play(session: Session, message: Message, sessions: Sessions) -> types.CallToolResult:
    result = await session.step(message)
    texts = [readable(message["content"]) for message in result.info["messages"]]
    if session.is_over:
        why = "" if result.terminated else f", ended by a limit ({result.info['truncated_by']})"
        texts.append(f"the episode is over: reward {result.reward:g}{why}")
        await sessions.close(session.id)
    body = step_body(result)
    fields = ("messages", "reward", "reward_parts", "terminated", "truncated")
    return _result("\n\n".join(texts), {name: body[name] for name in fields})


def _result(
    text: str, structured: dict[str, Any], *, is_error: bool = False
) -> types.CallToolResult:
    return types.CallToolResult(
        content=[types.TextContent(text=text)],
        structured_content=structured or None,
        is_error=is_error,
    )


# ---- transports ---------------------------------------------------------------------------------


async def serve_stdio(server: Server[Any]) -> None:
    """Serve one client at stdin and stdout until it disconnects."""
    from mcp.server.stdio import stdio_server

    async with stdio_server() as (read_stream, write_stream):
        await server.run(read_stream, write_stream, server.create_initialization_options())


async def serve_http(
    server: Server[Any],
    *,
    host: str,
    port: int,
    token: str | None,
    on_ready: Callable[[str], None],
    limits: ConnectionLimits | None = None,
) -> None:
    """Serve any number of clients over streamable HTTP, until cancelled or interrupted.

    Clients must send the token, if there is one. `on_ready` is given the address; a port that is
    taken is an InfrastructureError.
    """
    listener = listen(host, port)
    app: ASGIApp = server.streamable_http_app(host=host)
    if token is not None:
        app = _guarded(app, token)
    with listener:
        on_ready(f"{http_address(host, listener.getsockname()[1])}/mcp")
        await serve_asgi(app, listener, limits=limits, has_lifespan=True)


def _guarded(app: ASGIApp, token: str) -> ASGIApp:
    """Return an application that refuses clients which do not send the token."""
    denied = JSONResponse({"error": "the token is missing or wrong"}, 401)

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        is_request = scope["type"] == "http"
        given = Request(scope).headers.get("authorization", "") if is_request else ""
        is_denied = is_request and not is_same_secret(given, f"Bearer {token}")
        await (denied if is_denied else app)(scope, receive, send)

    return call
