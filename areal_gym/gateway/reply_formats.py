"""The interface of the APIs' reply formats, and sending a stream of events."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from aiohttp import web

from areal_gym.gateway.completions import Completion, PolicyRequest
from areal_gym.gateway.http_messages import as_api_error, server_sent_event
from areal_gym.gateway.text_stream import Delta, deltas_of


class ReplyFormat(ABC):
    """The reply format of an API, for one request."""

    stream_end = b""
    """The last bytes of a stream."""

    def __init__(self, id: str, request: PolicyRequest) -> None:
        self.id = id
        self.request = request
        self.is_stream = bool(request.stream)
        self.created = time.time()

    @abstractmethod
    def body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the body of a reply that is not a stream."""

    def first_events(self) -> Iterable[dict[str, Any]]:
        """Return the events before the first text."""
        return ()

    @abstractmethod
    def text_events(self, index: int, deltas: Sequence[Delta]) -> Iterable[dict[str, Any]]:
        """Return the events for new text of choice `index`."""

    @abstractmethod
    def last_events(self, completions: Sequence[Completion]) -> Iterable[dict[str, Any]]:
        """Return the events after the last text."""


TextQueue = asyncio.Queue[tuple[int, list[Delta]] | None]
"""Pairs of a choice's index and its new text; None at the end."""


async def send_stream(
    request: web.Request,
    completing: Awaitable[list[Completion]],
    texts: TextQueue,
    format: ReplyFormat,
) -> web.StreamResponse:
    """Send text while it is sampled: `completing` samples and puts new text into `texts`.

    Raises:
        Exception: sampling failed before the first text, so the reply can still have its status.
    """
    task = asyncio.ensure_future(completing)
    task.add_done_callback(lambda _: texts.put_nowait(None))
    try:
        new_text = await texts.get()
        if new_text is None and task.exception() is not None:
            await task
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        events = list(format.first_events())
        streamed = set()
        while new_text is not None:
            streamed.add(new_text[0])
            events += format.text_events(*new_text)
            if texts.empty():
                await response.write(b"".join(map(server_sent_event, events)))
                events = []
            new_text = await texts.get()
        try:
            completions = await task
            for index, completion in enumerate(completions):
                if index not in streamed:  # the reply to a retry, which is not sampled again
                    events += format.text_events(index, deltas_of(completion.message))
            events += format.last_events(completions)
        except Exception as error:
            events.append(as_api_error(error).body())
        await response.write(b"".join(map(server_sent_event, events)) + format.stream_end)
        await response.write_eof()
        return response
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
