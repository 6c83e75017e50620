"""Blocking HTTP requests from a trainer's rank to servers, in threads.

Bodies are streamed, so that the weights in them are in memory once, however often they are sent.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from areal_gym.errors import EngineError, EngineUnreachableError

_QUICK_S = 30.0


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a request, in pieces."""

    pieces: Sequence[bytes | memoryview]
    content_type: str = "application/json"

    @staticmethod
    def of_json(content: object) -> Body:
        """Return a JSON body in one piece."""
        return Body([json.dumps(content).encode()])

    @property
    def num_bytes(self) -> int:
        """The length of the body."""
        return sum(memoryview(piece).nbytes for piece in self.pieces)


def request(
    method: str, url: str, route: str, body: Body | None = None, *, timeout_s: float
) -> dict[str, Any]:
    """Send a request and return the JSON object that answers it.

    Raises:
        EngineUnreachableError: no answer came within `timeout_s`.
        EngineError: the server refused; the message quotes it.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=timeout_s)
    headers = {}
    if body is not None:
        headers = {"Content-Type": body.content_type, "Content-Length": str(body.num_bytes)}
    try:
        connection.request(
            method, parts.path.rstrip("/") + route, iter(body.pieces) if body else None, headers
        )
        response = connection.getresponse()
        raw = response.read()
    except TimeoutError as error:
        message = f"{url}{route} gave no answer within {timeout_s:g} s"
        raise EngineUnreachableError(message) from error
    except (OSError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
        raise EngineUnreachableError(f"no answer from {url}{route}: {reason}") from error
    finally:
        connection.close()
    return _read(f"{url}{route}", response.status, raw)


def _read(place: str, status: int, raw: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(raw) if raw else {}
    except ValueError:
        answer = raw[:300].decode("utf-8", "replace")
    if status == 200 and not isinstance(answer, dict):
        return {}
    if status == 200 and answer.get("success") is not False:
        return dict(answer)
    reason = answer
    while isinstance(reason, dict):
        reason = reason.get("message") or reason.get("error") or reason.get("detail") or "no reason"
    raise EngineError(f"{place} refused (HTTP {status}): {reason}")


def on_each(
    urls: Iterable[str], act: Callable[[str], object]
) -> tuple[dict[str, Any], dict[str, EngineError]]:
    """Run `act` for all URLs at once; return the answers and the failures, by URL."""
    urls = list(urls)
    answers: dict[str, Any] = {}
    failures: dict[str, EngineError] = {}
    with ThreadPoolExecutor(max(1, len(urls)), thread_name_prefix="areal-gym-post") as threads:
        for url, future in [(url, threads.submit(act, url)) for url in urls]:
            try:
                answers[url] = future.result()
            except EngineError as error:
                failures[url] = error
    return answers, failures


def server_info(url: str) -> dict[str, Any]:
    """Return a server's current settings, which a restart may change.

    Raises:
        EngineError: the server does not answer.
    """
    info = request("GET", url, "/server_info", timeout_s=_QUICK_S)
    return {**info, **(info.get("internal_states") or [{}])[0]}


def own_address(url: str) -> str:
    """Return the address of this machine that the host of `url` can reach.

    Raises:
        EngineError: there is no route to the host.
    """
    parts = urlsplit(url)
    try:
        kind, _, _, _, address = socket.getaddrinfo(
            parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing; it only chooses the route
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(f"no route from {socket.gethostname()} to {url}: {error}") from error
