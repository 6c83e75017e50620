"""What the gateway answers to: the table of its routes, and its OpenAPI description."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import BaseModel, Field

from areal_gym.gateway.anthropic_messages import AnthropicMessage, MessagesRequest
from areal_gym.gateway.error_replies import ApiError
from areal_gym.gateway.gateway_server import MODEL, Gateway, json_response, parse
from areal_gym.gateway.openai_chat import Chat, ChatRequest, Text
from areal_gym.gateway.openai_completions import TextCompletion, TextCompletionRequest
from areal_gym.gateway.openai_responses import Response, ResponseRequest
from areal_gym.gateway.session import EpisodeHandle, Session
from areal_gym.utils.http_servers.aiohttp_site import read_body
from areal_gym.version import __version__

Reward = Annotated[float, Field(allow_inf_nan=False)]
Key = Literal["session", "control", "none"]


class OpenSession(BaseModel):
    """A program outside begins an episode."""

    task: str | None = None
    """Sessions of the same task are compared with each other."""


class GiveReward(BaseModel):
    """What an answer was worth, besides what was said before."""

    reward: Reward
    answer_id: str | None = None
    """The `id` of an answer; by default the newest."""


class EndSession(BaseModel):
    """The program is done."""

    reward: Reward | None = None
    """For the newest answer."""
    error: str | None = None
    """It has failed, and why: nothing is learned from the session."""


class RunTool(BaseModel):
    """Run a tool of the environment that the policy has called."""

    call_id: str


class GiveAnswer(BaseModel):
    """Hand a text to the environment."""

    content: Text


class Nothing(BaseModel):
    """No body is needed."""


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the table."""

    method: str
    path: str
    summary: str
    key: Key
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    body: type[BaseModel] | None = None


def routes_of(gateway: Gateway) -> list[web.RouteDef]:
    """All routes."""
    table = _table(gateway)
    description = openapi(table)

    async def describe(request: web.Request) -> web.Response:
        return json_response(description)

    return [
        *(web.route(route.method, route.path, route.handler) for route in table),
        web.get("/openapi.json", describe),
    ]


def _table(gateway: Gateway) -> list[Route]:
    # ---- the policy ---------------------------------------------------------------------------

    async def chat(request: web.Request) -> web.StreamResponse:
        session = gateway.session_of(request)
        body = await read_body(request)
        asked = parse(ChatRequest, body)
        format = Chat(_id("chatcmpl-"), asked, session.recorder.renderer.tokenizer)
        return await gateway.call(request, session, body, asked.to_request(), format)

    async def completions(request: web.Request) -> web.StreamResponse:
        session = gateway.session_of(request)
        body = await read_body(request)
        asked = parse(TextCompletionRequest, body)
        format = TextCompletion(_id("cmpl-"), asked, session.recorder.renderer.tokenizer)
        return await gateway.call(request, session, body, asked.to_request(), format)

    async def responses(request: web.Request) -> web.StreamResponse:
        session = gateway.session_of(request)
        body = await read_body(request)
        asked: ResponseRequest = parse(ResponseRequest, body)
        before = session.history(asked.previous_response_id)
        ask = asked.to_request(before)
        format = Response(_id("resp_"), asked)
        return await gateway.call(
            request,
            session,
            body,
            ask,
            format,
            on_answer=lambda answer: session.keep_history(
                format.id, [*before, *asked.messages(), answer.message]
            ),
        )

    async def messages(request: web.Request) -> web.StreamResponse:
        session = gateway.session_of(request)
        body = await read_body(request)
        asked = parse(MessagesRequest, body)
        format = AnthropicMessage(_id("msg_"), asked)
        return await gateway.call(request, session, body, asked.to_request(), format)

    async def models(request: web.Request) -> web.Response:
        gateway.session_of(request)
        return json_response({"object": "list", "data": [_MODEL]})

    async def model(request: web.Request) -> web.Response:
        gateway.session_of(request)
        if request.match_info["id"] != MODEL:
            raise ApiError(404, f"no model {request.match_info['id']!r}; there is: {MODEL}")
        return json_response(_MODEL)

    async def health(request: web.Request) -> web.Response:
        return json_response({"status": "paused" if gateway.is_paused else "ok"})

    # ---- the episode, for the program that plays it -------------------------------------------

    async def task(request: web.Request) -> web.Response:
        host = _host(gateway.session_of(request))
        tools = [tool.schema() for tool in host.tools]
        messages = list(host.first_messages)
        return json_response({"messages": messages, "tools": tools, "is_over": host.is_over})

    async def tool(request: web.Request) -> web.Response:
        host = _host(gateway.session_of(request))
        asked: RunTool = parse(RunTool, await read_body(request))
        return json_response({"content": await host.call_tool(asked.call_id)})

    async def answer(request: web.Request) -> web.Response:
        host = _host(gateway.session_of(request))
        asked: GiveAnswer = parse(GiveAnswer, await read_body(request))
        messages = await host.reply(asked.content)
        return json_response({"messages": list(messages), "is_over": host.is_over})

    # ---- control ------------------------------------------------------------------------------

    async def open_session(request: web.Request) -> web.Response:
        gateway.require_control(request)
        asked: OpenSession = parse(OpenSession, await read_body(request))
        if gateway.is_paused:
            raise ApiError(429, "the gateway is paused; come back later", retry_after_s=1)
        session = gateway.lobby.claim(asked.task)
        found = {"id": session.id, "api_key": session.api_key, "base_url": session.base_url}
        return json_response(found, status=201)

    async def list_sessions(request: web.Request) -> web.Response:
        gateway.require_control(request)
        ids = sorted(gateway.sessions)
        return json_response({"sessions": ids, "num_free": len(gateway.lobby)})

    async def reward(request: web.Request) -> web.Response:
        session = _named(gateway, request)
        asked: GiveReward = parse(GiveReward, await read_body(request))
        session.give_reward(asked.reward, asked.answer_id)
        return json_response({"id": session.id})

    async def end(request: web.Request) -> web.Response:
        session = _named(gateway, request)
        asked: EndSession = parse(EndSession, await read_body(request))
        if asked.reward is not None and asked.error is None:
            session.give_reward(asked.reward)
        num_calls = session.recorder.num_calls
        session.end(asked.error)
        return json_response({"id": session.id, "num_calls": num_calls})

    async def pause(request: web.Request) -> web.Response:
        gateway.require_control(request)
        gateway.is_paused = True
        return json_response({"is_paused": True, "num_calls": gateway.num_calls})

    async def resume(request: web.Request) -> web.Response:
        gateway.require_control(request)
        gateway.is_paused = False
        return json_response({"is_paused": False, "num_calls": gateway.num_calls})

    return [
        Route(
            "POST",
            "/v1/chat/completions",
            "OpenAI's chat completions",
            "session",
            chat,
            ChatRequest,
        ),
        Route(
            "POST",
            "/v1/completions",
            "go on with a text",
            "session",
            completions,
            TextCompletionRequest,
        ),
        Route("POST", "/v1/responses", "OpenAI's responses", "session", responses, ResponseRequest),
        Route("POST", "/v1/messages", "Anthropic's messages", "session", messages, MessagesRequest),
        Route("GET", "/v1/models", "the policy, in a list", "session", models),
        Route("GET", "/v1/models/{id}", "the policy", "session", model),
        Route("GET", "/health", "whether it serves", "none", health),
        Route("GET", "/v1/rl/task", "what opens the episode, and its tools", "session", task),
        Route("POST", "/v1/rl/tool", "run a tool that was called", "session", tool, RunTool),
        Route("POST", "/v1/rl/answer", "answer the environment", "session", answer, GiveAnswer),
        Route("POST", "/v1/rl/sessions", "open a session", "control", open_session, OpenSession),
        Route("GET", "/v1/rl/sessions", "the open sessions", "control", list_sessions),
        Route(
            "POST", "/v1/rl/sessions/{id}/reward", "reward an answer", "control", reward, GiveReward
        ),
        Route("POST", "/v1/rl/sessions/{id}/end", "end a session", "control", end, EndSession),
        Route("POST", "/v1/rl/pause", "let calls come back later", "control", pause, Nothing),
        Route("POST", "/v1/rl/resume", "take calls again", "control", resume, Nothing),
    ]


def _host(session: Session) -> EpisodeHandle:
    if session.host is None:
        raise ApiError(404, "this session plays no episode: there is no task, only the policy")
    return session.host


def _named(gateway: Gateway, request: web.Request) -> Session:
    gateway.require_control(request)
    session = gateway.sessions.get(request.match_info["id"])
    if session is None:
        raise ApiError(404, f"no session {request.match_info['id']!r} is open")
    return session


def _id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


_MODEL = {"id": MODEL, "object": "model", "created": 0, "owned_by": "areal-gym"}


def openapi(table: list[Route]) -> dict[str, Any]:
    """The description of these routes that `/openapi.json` gives."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for route in table:
        operation: dict[str, Any] = {
            "summary": route.summary,
            "responses": {"default": {"description": "an answer, or an error"}},
            "security": [] if route.key == "none" else [{f"{route.key}_key": []}],
        }
        if "{id}" in route.path:
            schema = {"type": "string"}
            operation["parameters"] = [
                {"name": "id", "in": "path", "required": True, "schema": schema}
            ]
        if route.body is not None:
            body = route.body.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(body.pop("$defs", {}))
            schemas[route.body.__name__] = body
            reference = {"$ref": f"#/components/schemas/{route.body.__name__}"}
            operation["requestBody"] = {"content": {"application/json": {"schema": reference}}}
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    keys = {f"{name}_key": {"type": "http", "scheme": "bearer"} for name in ("session", "control")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "areal-gym gateway", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": keys},
    }
