"""Errors as the APIs of OpenAI and Anthropic write them."""

from __future__ import annotations

from typing import Any

from areal_gym.errors import AgentError, EngineError, EpisodeError, GrammarError, UsageError
from areal_gym.recording import ContextFullError

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


class ApiError(Exception):
    """A reply with another status than 200.

    Args:
        status: the HTTP status.
        message: for people.
        code: for programs, one of OpenAI's.
        param: the field of the request that is at fault.
        retry_after_s: when to retry.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """The error's type in both APIs."""
        return _TYPES.get(self.status, "api_error")

    def to_openai(self) -> dict[str, Any]:
        """Return `{"error": {...}}`."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def to_anthropic(self) -> dict[str, Any]:
        """Return `{"type": "error", "error": {...}}`."""
        return {"type": "error", "error": {"type": self.type, "message": self.message}}


def as_api_error(error: Exception) -> ApiError:
    """Return the reply to a failed call."""
    match error:
        case ApiError():
            return error
        case ContextFullError():
            return ApiError(400, str(error), code="context_length_exceeded", param="messages")
        case GrammarError():
            return ApiError(400, f"the engine refuses: {error}", code="unsupported_value")
        case EngineError():
            return ApiError(503, f"the policy could not be sampled: {error}", code="engine_error")
        case UsageError() | AgentError():
            return ApiError(400, str(error))
        case EpisodeError():
            return ApiError(503, f"the episode has failed: {error}", code="episode_error")
        case _:
            return ApiError(500, f"a bug in the gateway: {error!r}", code="internal_error")
