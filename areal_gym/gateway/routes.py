"""What the gateway answers to."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

from aiohttp import web

from areal_gym.gateway.errors import ApiError
from areal_gym.gateway.openai_chat import Chat, ChatRequest
from areal_gym.gateway.server import MODEL, Gateway, json_response, parse

__all__ = ["routes_of"]


def routes_of(gateway: Gateway) -> list[web.RouteDef]:
    """All routes."""

    async def chat(request: web.Request) -> web.StreamResponse:
        session = gateway.session_of(request)
        body = await request.read()
        asked = parse(ChatRequest, body)
        format = Chat(_id("chatcmpl"), asked, session.recorder.renderer.tokenizer)
        return await gateway.call(request, session, body, asked.to_ask(), format)

    async def models(request: web.Request) -> web.Response:
        gateway.session_of(request)
        return json_response({"object": "list", "data": [_model()]})

    async def model(request: web.Request) -> web.Response:
        gateway.session_of(request)
        if request.match_info["id"] != MODEL:
            raise ApiError(404, f"no model {request.match_info['id']!r}; there is: {MODEL}")
        return json_response(_model())

    async def health(request: web.Request) -> web.Response:
        return json_response({"status": "paused" if gateway.is_paused else "ok"})

    return [
        web.post("/v1/chat/completions", chat),
        web.get("/v1/models", models),
        web.get("/v1/models/{id}", model),
        web.get("/health", health),
    ]


def _id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def _model() -> dict[str, object]:
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "areal-gym"}
