"""JSON of requests to servers and of their answers."""

from __future__ import annotations

import json
from typing import Any

import orjson


def dump_json(body: dict[str, Any]) -> bytes:
    """Return JSON. orjson takes a tenth of the time, but refuses invalid UTF-8."""
    try:
        return orjson.dumps(body)
    except TypeError:
        return json.dumps(body).encode()


def load_json(body: bytes) -> Any:
    """Parse JSON. orjson takes a third of the time, but refuses NaN, which Python writes."""
    try:
        return orjson.loads(body)
    except ValueError:
        return json.loads(body)


def message_of(answer: Any) -> str:
    """Return the server's own message, whose place differs between families of routes."""
    if isinstance(answer, dict):
        for key in ("error", "message", "error_message", "detail"):
            if answer.get(key):
                inner = answer[key]
                return message_of(inner) if isinstance(inner, dict) else str(inner)
    return json.dumps(answer)[:300] if answer else "no reason given"
