"""Read HTTP requests and write replies: keys, bodies, JSON, and the error formats of both APIs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ValidationError

from areal_gym.errors import AgentError, EngineError, EpisodeError, GrammarError, UsageError
from areal_gym.recording import ContextFullError
from areal_gym.utils.http_servers.aiohttp_site import Handler, RequestBodyError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(eq=False)
class ApiError(Exception):
    """A reply whose status is not 200."""

    status: int
    message: str
    code: str | None = None
    """OpenAI's error code, for programs."""
    param: str | None = None
    """The field of the request that is wrong."""
    retry_after_s: int | None = None

    def __str__(self) -> str:
        return self.message

    def body(self, *, is_anthropic: bool = False) -> dict[str, Any]:
        """Return the reply's body in the format of OpenAI's API or of Anthropic's."""
        error = {"message": self.message, "type": _TYPES.get(self.status, "api_error")}
        if is_anthropic:
            return {"type": "error", "error": error}
        return {"error": {**error, "param": self.param, "code": self.code}}


def as_api_error(error: Exception) -> ApiError:
    """Return the reply for an exception that a call has raised."""
    match error:
        case ApiError():
            return error
        case ContextFullError():
            return ApiError(400, str(error), code="context_length_exceeded", param="messages")
        case GrammarError():
            return ApiError(400, f"the engine refuses: {error}", code="unsupported_value")
        case EngineError():
            return ApiError(503, f"the policy could not be sampled: {error}", code="engine_error")
        case RequestBodyError():
            return ApiError(error.status, error.message)
        case UsageError() | AgentError():
            return ApiError(400, str(error))
        case EpisodeError():
            return ApiError(503, f"the episode has failed: {error}", code="episode_error")
        case _:
            return ApiError(500, f"a bug in the gateway: {error!r}", code="internal_error")


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Reply to failed requests in the format that the client's library expects."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        status = error.status if error.status in (404, 405) else 400
        failed = ApiError(status, f"{request.method} {request.path}: {error.reason}")
    except ConnectionError:
        raise  # the client has closed the connection
    except Exception as error:
        failed = as_api_error(error)
    body = failed.body(is_anthropic=request.path.startswith("/v1/messages"))
    response = json_response(body, status=failed.status)
    if failed.retry_after_s is not None:
        response.headers["Retry-After"] = str(failed.retry_after_s)
    return response


def key_of(request: web.Request) -> str:
    """Return the key that OpenAI's or Anthropic's client sent; raise ApiError if there is none."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    if key := request.headers.get("x-api-key", "").strip():
        return key
    raise ApiError(
        401, "no key: send Authorization: Bearer KEY, or x-api-key: KEY", code="missing_api_key"
    )


def parse_body(model: type[BaseModel], body: bytes) -> Any:
    """Parse a request's body; raise ApiError if it is not JSON or does not fit `model`."""
    try:
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ApiError(
            400, f"{field}: {first['msg']}" if field else first["msg"], param=field or None
        ) from None


def json_response(content: Mapping[str, Any], *, status: int = 200) -> web.Response:
    """Return a JSON reply in ASCII, because sampled text may not be encodable as UTF-8."""
    return web.Response(
        status=status, body=json.dumps(content).encode(), content_type="application/json"
    )


def server_sent_event(event: dict[str, Any]) -> bytes:
    """Encode one event of a stream; the event's `type`, if it has one, becomes its name."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n".encode()
