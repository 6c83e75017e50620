"""The gateway's table of routes, and its OpenAPI description."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import BaseModel, Field

from areal_gym.chat import Tokenizer
from areal_gym.gateway.anthropic_messages import AnthropicMessage, MessagesRequest
from areal_gym.gateway.completions import Completion, CompletionRequest
from areal_gym.gateway.http_messages import ApiError, json_response, parse_body
from areal_gym.gateway.openai_chat import Chat, ChatRequest, TextCompletion, TextCompletionRequest
from areal_gym.gateway.openai_responses import Response, ResponseRequest
from areal_gym.gateway.pictures import PictureReader, Text
from areal_gym.gateway.reply_formats import ReplyFormat
from areal_gym.gateway.session import EpisodeHandle, Session
from areal_gym.gateway.session_registry import MODEL, SessionRegistry
from areal_gym.images.openai_parts import openai_content
from areal_gym.types import Message
from areal_gym.utils.http_servers.aiohttp_site import Handler, read_body
from areal_gym.version import __version__

Reward = Annotated[float, Field(allow_inf_nan=False)]
Key = Literal["session", "control", "none"]


class OpenSession(BaseModel):
    """An external program opens an episode."""

    task: str | None = None
    """The task's name; advantages compare sessions of the same task."""


class GiveReward(BaseModel):
    """A reward for an answer, added to earlier ones."""

    reward: Reward
    answer_id: str | None = None
    """The `id` of the answer; by default, it is the newest one."""


class EndSession(BaseModel):
    """The program has finished."""

    reward: Reward | None = None
    """The reward of the newest answer."""
    error: str | None = None
    """The program's error, if it has failed; the session is then not trained on."""


class RunTool(BaseModel):
    """Run a tool of the environment that the policy has called."""

    call_id: str


class GiveAnswer(BaseModel):
    """The program answers the environment with a text."""

    content: Text


class Nothing(BaseModel):
    """An empty body, which is not read."""


Content = Mapping[str, Any]
"""The content of a JSON reply."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A request whose key was checked and whose body was read. Its methods handle the routes."""

    gateway: SessionRegistry
    http: web.Request
    body: bytes
    is_control: bool

    @property
    def session(self) -> Session:
        """The session of the request's key or, in control routes, of the id in the path."""
        if not self.is_control:
            return self.gateway.session_of(self.http)
        if (id := self.http.match_info["id"]) not in self.gateway.sessions:
            raise ApiError(404, f"no session {id!r} is open")
        return self.gateway.sessions[id]

    @property
    def episode(self) -> EpisodeHandle:
        if (episode := self.session.episode) is None:
            message = "this session plays no episode: there is no task, only the policy"
            raise ApiError(404, message)
        return episode

    @property
    def tokenizer(self) -> Tokenizer:
        return self.session.recorder.renderer.tokenizer

    @property
    def role(self) -> str | None:
        """The role in the path, `/role/ROLE/v1/...`."""
        return self.http.match_info.get("role")

    def pictures(self) -> PictureReader:
        """Return a reader for the contents of this request."""
        return PictureReader(self.session.recorder.renderer.vision is not None)

    async def complete(
        self,
        request: CompletionRequest,
        format: ReplyFormat,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> web.StreamResponse:
        call, request = self.gateway.call, replace(request, role=self.role)
        return await call(self.http, self.session, self.body, request, format, on_completion)

    # ---- the policy -----------------------------------------------------------------------------

    async def chat(self, body: ChatRequest) -> web.StreamResponse:
        format = Chat(_id("chatcmpl-"), body, self.tokenizer)
        return await self.complete(body.to_request(self.pictures()), format)

    async def completions(self, body: TextCompletionRequest) -> web.StreamResponse:
        format = TextCompletion(_id("cmpl-"), body, self.tokenizer)
        return await self.complete(body.to_request(), format)

    async def responses(self, body: ResponseRequest) -> web.StreamResponse:
        session, format = self.session, Response(_id("resp_"), body)
        before = session.history(body.previous_response_id)

        def keep(completion: Completion) -> None:
            new = body.messages(self.pictures())
            session.keep_history(format.id, [*before, *new, completion.message])

        return await self.complete(body.to_request(before, self.pictures()), format, keep)

    async def messages(self, body: MessagesRequest) -> web.StreamResponse:
        format = AnthropicMessage(_id("msg_"), body)
        return await self.complete(body.to_request(self.pictures()), format)

    async def models(self, body: None) -> Content:
        return {"object": "list", "data": [_MODEL]}

    async def model(self, body: None) -> Content:
        if (name := self.http.match_info["id"]) != MODEL:
            raise ApiError(404, f"no model {name!r}; available: {MODEL}")
        return _MODEL

    async def health(self, body: None) -> Content:
        return {"status": "paused" if self.gateway.is_paused else "ok"}

    # ---- the episode, for the program that plays it ---------------------------------------------

    async def task(self, body: None) -> Content:
        episode = self.episode
        tools = [tool.schema() for tool in episode.tools]
        messages = [_for_client(message) for message in episode.first_messages]
        task = {"messages": messages, "tools": tools, "is_over": episode.is_over}
        if not episode.roles:
            return task
        urls = {role: self.session.base_url_of(role) for role in episode.roles}
        return {**task, "role": episode.role, "roles": urls}

    async def tool(self, body: RunTool) -> Content:
        return {"content": await self.episode.call_tool(body.call_id)}

    async def answer(self, body: GiveAnswer) -> Content:
        episode = self.episode
        if self.role is not None:
            self.session.require_role(self.role)
            if self.role != episode.role and not episode.is_over:
                message = f"it is not the turn of {self.role!r}, but of {episode.role!r}"
                raise ApiError(400, message, code="not_your_turn")
        messages = await episode.reply(body.content)
        shown = [_for_client(message) for message in messages]
        answer = {"messages": shown, "is_over": episode.is_over}
        return {**answer, "role": episode.role} if episode.roles else answer

    # ---- control --------------------------------------------------------------------------------

    async def open_session(self, body: OpenSession) -> web.Response:
        if self.gateway.is_paused:
            raise ApiError(429, "the gateway is paused; come back later", retry_after_s=1)
        session = self.gateway.claim(body.task)
        opened = {"id": session.id, "api_key": session.api_key, "base_url": session.base_url}
        return json_response(opened, status=201)

    async def list_sessions(self, body: None) -> Content:
        return {"sessions": sorted(self.gateway.sessions), "num_free": len(self.gateway.offers)}

    async def reward(self, body: GiveReward) -> Content:
        self.session.give_reward(body.reward, body.answer_id)
        return {"id": self.session.id}

    async def end(self, body: EndSession) -> Content:
        session = self.session
        if body.reward is not None and body.error is None:
            session.give_reward(body.reward)
        num_calls = session.recorder.num_calls
        session.end(body.error)
        return {"id": session.id, "num_calls": num_calls}

    async def pause(self, body: None) -> Content:
        self.gateway.is_paused = True
        return {"is_paused": True, "num_calls": self.gateway.num_calls}

    async def resume(self, body: None) -> Content:
        self.gateway.is_paused = False
        return {"is_paused": False, "num_calls": self.gateway.num_calls}


def _for_client(message: Message) -> dict[str, Any]:
    return {**message, "content": openai_content(message["content"])}


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the table of routes."""

    method: str
    path: str
    summary: str
    handler: Callable[[_Call, Any], Awaitable[Content | web.StreamResponse]]
    body: type[BaseModel] | None = None
    key: Key = "session"


_SESSIONS, _SESSION = "/v1/rl/sessions", "/v1/rl/sessions/{id}"
ROUTES = [
    Route("POST", "/v1/chat/completions", "OpenAI's chat completions", _Call.chat, ChatRequest),
    Route("POST", "/v1/completions", "continue a text", _Call.completions, TextCompletionRequest),
    Route("POST", "/v1/responses", "OpenAI's responses", _Call.responses, ResponseRequest),
    Route("POST", "/v1/messages", "Anthropic's messages", _Call.messages, MessagesRequest),
    Route("GET", "/v1/models", "the policy, in a list", _Call.models),
    Route("GET", "/v1/models/{id}", "the policy", _Call.model),
    Route("GET", "/health", "whether it serves", _Call.health, key="none"),
    Route("GET", "/v1/rl/task", "first messages and tools of the episode", _Call.task),
    Route("POST", "/v1/rl/tool", "run a tool that was called", _Call.tool, RunTool),
    Route("POST", "/v1/rl/answer", "answer the environment", _Call.answer, GiveAnswer),
    Route("POST", _SESSIONS, "open a session", _Call.open_session, OpenSession, "control"),
    Route("GET", _SESSIONS, "the open sessions", _Call.list_sessions, key="control"),
    Route("POST", f"{_SESSION}/reward", "add a reward", _Call.reward, GiveReward, "control"),
    Route("POST", f"{_SESSION}/end", "end a session", _Call.end, EndSession, "control"),
    Route("POST", "/v1/rl/pause", "tell calls to come back later", _Call.pause, Nothing, "control"),
    Route("POST", "/v1/rl/resume", "accept calls again", _Call.resume, Nothing, "control"),
]

_MODEL = {"id": MODEL, "object": "model", "created": 0, "owned_by": "areal-gym"}


def routes_of(gateway: SessionRegistry) -> list[web.RouteDef]:
    """Return all routes of a gateway, for its web application."""
    description = openapi(ROUTES)

    async def describe(request: web.Request) -> web.Response:
        return json_response(description)

    return [
        *(web.route(row.method, row.path, _handler(gateway, row)) for row in ROUTES),
        *(
            web.route(row.method, f"/role/{{role}}{row.path}", _handler(gateway, row))
            for row in ROUTES
            if row.key == "session"
        ),
        web.get("/openapi.json", describe),
    ]


def _handler(gateway: SessionRegistry, route: Route) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        if route.key == "control":
            gateway.require_control(request)
        elif route.key == "session":
            gateway.session_of(request)
        body, parsed = b"", None
        if route.body not in (None, Nothing):
            body = await read_body(request)
            parsed = parse_body(route.body, body)
        reply = await route.handler(_Call(gateway, request, body, route.key == "control"), parsed)
        return reply if isinstance(reply, web.StreamResponse) else json_response(reply)

    return handle


def _id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def openapi(table: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI description of these routes, which `/openapi.json` serves."""
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
