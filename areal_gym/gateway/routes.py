"""The gateway's table of routes, and its OpenAPI description."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import BaseModel, Field

from areal_gym.gateway.anthropic_messages import AnthropicMessage, MessagesRequest
from areal_gym.gateway.error_replies import ApiError
from areal_gym.gateway.http_messages import json_response, parse_body
from areal_gym.gateway.openai_chat import Chat, ChatRequest, Text
from areal_gym.gateway.openai_completions import TextCompletion, TextCompletionRequest
from areal_gym.gateway.openai_responses import Response, ResponseRequest
from areal_gym.gateway.session import EpisodeHandle, Session
from areal_gym.gateway.session_registry import MODEL, SessionRegistry
from areal_gym.utils.http_servers.aiohttp_site import read_body
from areal_gym.version import __version__

Reward = Annotated[float, Field(allow_inf_nan=False)]
Key = Literal["session", "control", "none"]


class OpenSession(BaseModel):
    """An external program opens an episode."""

    task: str | None = None
    """Sessions of the same task are compared with each other."""


class GiveReward(BaseModel):
    """A reward for an answer, added to earlier ones."""

    reward: Reward
    answer_id: str | None = None
    """The `id` of an answer; by default the newest."""


class EndSession(BaseModel):
    """The program has finished."""

    reward: Reward | None = None
    """For the newest answer."""
    error: str | None = None
    """Why the program has failed: the session is not trained on."""


class RunTool(BaseModel):
    """Run a tool of the environment that the policy has called."""

    call_id: str


class GiveAnswer(BaseModel):
    """A text for the environment."""

    content: Text


class Nothing(BaseModel):
    """An empty body."""


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the table."""

    method: str
    path: str
    summary: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    body: type[BaseModel] | None = None
    key: Key = "session"


def routes_of(gateway: SessionRegistry) -> list[web.RouteDef]:
    """Return all routes of a gateway."""
    table = route_table(gateway)
    description = openapi(table)

    async def describe(request: web.Request) -> web.Response:
        return json_response(description)

    return [
        *(web.route(route.method, route.path, route.handler) for route in table),
        web.get("/openapi.json", describe),
    ]


class _Handlers:
    """Handles the requests of a gateway."""

    def __init__(self, gateway: SessionRegistry) -> None:
        self.gateway = gateway

    # ---- the policy ---------------------------------------------------------------------------

    async def chat(self, request: web.Request) -> web.StreamResponse:
        session = self.gateway.session_of(request)
        body = await read_body(request)
        parsed = parse_body(ChatRequest, body)
        format = Chat(_id("chatcmpl-"), parsed, session.recorder.renderer.tokenizer)
        return await self.gateway.call(request, session, body, parsed.to_request(), format)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        session = self.gateway.session_of(request)
        body = await read_body(request)
        parsed = parse_body(TextCompletionRequest, body)
        format = TextCompletion(_id("cmpl-"), parsed, session.recorder.renderer.tokenizer)
        return await self.gateway.call(request, session, body, parsed.to_request(), format)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        session = self.gateway.session_of(request)
        body = await read_body(request)
        parsed: ResponseRequest = parse_body(ResponseRequest, body)
        before = session.history(parsed.previous_response_id)
        format = Response(_id("resp_"), parsed)
        return await self.gateway.call(
            request,
            session,
            body,
            parsed.to_request(before),
            format,
            on_completion=lambda completion: session.keep_history(
                format.id, [*before, *parsed.messages(), completion.message]
            ),
        )

    async def messages(self, request: web.Request) -> web.StreamResponse:
        session = self.gateway.session_of(request)
        body = await read_body(request)
        parsed = parse_body(MessagesRequest, body)
        format = AnthropicMessage(_id("msg_"), parsed)
        return await self.gateway.call(request, session, body, parsed.to_request(), format)

    async def models(self, request: web.Request) -> web.Response:
        self.gateway.session_of(request)
        return json_response({"object": "list", "data": [_MODEL]})

    async def model(self, request: web.Request) -> web.Response:
        self.gateway.session_of(request)
        if request.match_info["id"] != MODEL:
            raise ApiError(404, f"no model {request.match_info['id']!r}; available: {MODEL}")
        return json_response(_MODEL)

    async def health(self, request: web.Request) -> web.Response:
        return json_response({"status": "paused" if self.gateway.is_paused else "ok"})

    # ---- the episode, for the program that plays it -------------------------------------------

    async def task(self, request: web.Request) -> web.Response:
        episode = _episode(self.gateway.session_of(request))
        tools = [tool.schema() for tool in episode.tools]
        messages = list(episode.first_messages)
        return json_response({"messages": messages, "tools": tools, "is_over": episode.is_over})

    async def tool(self, request: web.Request) -> web.Response:
        episode = _episode(self.gateway.session_of(request))
        parsed: RunTool = parse_body(RunTool, await read_body(request))
        return json_response({"content": await episode.call_tool(parsed.call_id)})

    async def answer(self, request: web.Request) -> web.Response:
        episode = _episode(self.gateway.session_of(request))
        parsed: GiveAnswer = parse_body(GiveAnswer, await read_body(request))
        messages = await episode.reply(parsed.content)
        return json_response({"messages": list(messages), "is_over": episode.is_over})

    # ---- control ------------------------------------------------------------------------------

    async def open_session(self, request: web.Request) -> web.Response:
        self.gateway.require_control(request)
        parsed: OpenSession = parse_body(OpenSession, await read_body(request))
        if self.gateway.is_paused:
            raise ApiError(429, "the gateway is paused; come back later", retry_after_s=1)
        session = self.gateway.queue.claim(parsed.task)
        opened = {"id": session.id, "api_key": session.api_key, "base_url": session.base_url}
        return json_response(opened, status=201)

    async def list_sessions(self, request: web.Request) -> web.Response:
        self.gateway.require_control(request)
        ids = sorted(self.gateway.sessions)
        return json_response({"sessions": ids, "num_free": len(self.gateway.queue)})

    async def reward(self, request: web.Request) -> web.Response:
        session = self._named(request)
        parsed: GiveReward = parse_body(GiveReward, await read_body(request))
        session.give_reward(parsed.reward, parsed.answer_id)
        return json_response({"id": session.id})

    async def end(self, request: web.Request) -> web.Response:
        session = self._named(request)
        parsed: EndSession = parse_body(EndSession, await read_body(request))
        if parsed.reward is not None and parsed.error is None:
            session.give_reward(parsed.reward)
        num_calls = session.recorder.num_calls
        session.end(parsed.error)
        return json_response({"id": session.id, "num_calls": num_calls})

    async def pause(self, request: web.Request) -> web.Response:
        self.gateway.require_control(request)
        self.gateway.is_paused = True
        return json_response({"is_paused": True, "num_calls": self.gateway.num_calls})

    async def resume(self, request: web.Request) -> web.Response:
        self.gateway.require_control(request)
        self.gateway.is_paused = False
        return json_response({"is_paused": False, "num_calls": self.gateway.num_calls})

    def _named(self, request: web.Request) -> Session:
        self.gateway.require_control(request)
        session = self.gateway.sessions.get(request.match_info["id"])
        if session is None:
            raise ApiError(404, f"no session {request.match_info['id']!r} is open")
        return session


def route_table(gateway: SessionRegistry) -> list[Route]:
    """Return the table of a gateway's routes."""
    do = _Handlers(gateway)
    control = "/v1/rl/sessions"
    return [
        Route("POST", "/v1/chat/completions", "OpenAI's chat completions", do.chat, ChatRequest),
        Route("POST", "/v1/completions", "continue a text", do.completions, TextCompletionRequest),
        Route("POST", "/v1/responses", "OpenAI's responses", do.responses, ResponseRequest),
        Route("POST", "/v1/messages", "Anthropic's messages", do.messages, MessagesRequest),
        Route("GET", "/v1/models", "the policy, in a list", do.models),
        Route("GET", "/v1/models/{id}", "the policy", do.model),
        Route("GET", "/health", "whether it serves", do.health, key="none"),
        Route("GET", "/v1/rl/task", "first messages and tools of the episode", do.task),
        Route("POST", "/v1/rl/tool", "run a tool that was called", do.tool, RunTool),
        Route("POST", "/v1/rl/answer", "answer the environment", do.answer, GiveAnswer),
        *(
            replace(route, key="control")
            for route in (
                Route("POST", control, "open a session", do.open_session, OpenSession),
                Route("GET", control, "the open sessions", do.list_sessions),
                Route("POST", f"{control}/{{id}}/reward", "add a reward", do.reward, GiveReward),
                Route("POST", f"{control}/{{id}}/end", "end a session", do.end, EndSession),
                Route("POST", "/v1/rl/pause", "tell calls to come back later", do.pause, Nothing),
                Route("POST", "/v1/rl/resume", "accept calls again", do.resume, Nothing),
            )
        ),
    ]


def _episode(session: Session) -> EpisodeHandle:
    if session.episode is None:
        raise ApiError(404, "this session plays no episode: there is no task, only the policy")
    return session.episode


def _id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


_MODEL = {"id": MODEL, "object": "model", "created": 0, "owned_by": "areal-gym"}


def openapi(table: list[Route]) -> dict[str, Any]:
    """Return the OpenAPI description of these routes, for `/openapi.json`."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for route in table:
        operation: dict[str, Any] = {
            "summary": route.summary,
            "responses": {"default": {"description": "a reply, or an error"}},
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
