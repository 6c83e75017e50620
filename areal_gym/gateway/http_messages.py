"""Requests and replies of the gateway as HTTP: secrets, bodies, JSON, errors."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ValidationError

from areal_gym.gateway.error_replies import ApiError, as_api_error
from areal_gym.utils.http_servers.aiohttp_site import RequestBodyError


def key_of(request: web.Request) -> str:
    """Return the secret in a request, as OpenAI's and Anthropic's clients send it.

    Raises:
        ApiError: there is none.
    """
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    if key := request.headers.get("x-api-key", "").strip():
        return key
    raise ApiError(
        401, "no key: send Authorization: Bearer KEY, or x-api-key: KEY", code="missing_api_key"
    )


def parse_body(model: type[BaseModel], body: bytes) -> Any:
    """Parse the body of a request.

    Raises:
        ApiError: it is not JSON, or does not fit the route.
    """
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ApiError(
            400, f"{where}: {first['msg']}" if where else first["msg"], param=where or None
        ) from None


def json_response(content: dict[str, Any], *, status: int = 200) -> web.Response:
    """Return a JSON reply, in ASCII: a sampled text may hold what UTF-8 cannot."""
    return web.Response(
        status=status, body=json.dumps(content).encode(), content_type="application/json"
    )


def server_sent_event(event: dict[str, Any]) -> bytes:
    """Encode one event of a stream; an event with a `type` is named by it."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n".encode()


@web.middleware
async def error_middleware(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Reply to failed requests in the shape that the client's library expects."""
    try:
        return await handler(request)
    except RequestBodyError as error:
        failed = ApiError(error.status, error.message)
    except web.HTTPException as error:
        status = error.status if error.status in (404, 405) else 400
        failed = ApiError(status, f"{request.method} {request.path}: {error.reason}")
    except ConnectionError:
        raise  # the client has gone
    except Exception as error:
        failed = as_api_error(error)
    is_anthropic = request.path.startswith("/v1/messages")
    response = json_response(
        failed.to_anthropic() if is_anthropic else failed.to_openai(), status=failed.status
    )
    if failed.retry_after_s is not None:
        response.headers["Retry-After"] = str(failed.retry_after_s)
    return response
