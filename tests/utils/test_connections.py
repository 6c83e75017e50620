"""Connections of every server are bounded in time and number, and closed with it."""

import asyncio
import gc
import socket
import warnings

import pytest
from aiohttp import web

from areal_gym.utils.http_servers.aiohttp_site import HttpSite, read_body
from areal_gym.utils.http_servers.asgi_site import serve_asgi
from areal_gym.utils.http_servers.connections import ConnectionLimits, stop_listening
from tests._support.raw_http import PATIENCE_S, exchange, request, statuses

pytest.importorskip("uvicorn", reason="needs the extra viewer")

QUICK = ConnectionLimits(header_s=0.4, body_s=0.4, write_s=0.4, idle_s=0.4)
SIZE = 64 * 2**20


class AiohttpUnderTest:
    """An application that echoes bodies, or answers with more than a client reads."""

    def __init__(self, limits):
        app = web.Application()
        app.router.add_post("/", self._echo)
        app.router.add_get("/", self._flood)
        self._site = HttpSite(app, limits=limits, handler_cancellation=True)
        self.num_abandoned = 0

    async def _echo(self, request):
        try:
            return web.Response(body=await read_body(request))
        except ValueError as error:
            return web.Response(status=error.status)

    async def _flood(self, request):
        response = web.StreamResponse()
        try:
            await response.prepare(request)
            for _ in range(SIZE // 2**16):
                await response.write(bytes(2**16))
        except (ConnectionError, asyncio.CancelledError):
            self.num_abandoned += 1
            raise
        return response

    async def __aenter__(self):
        self.port = await self._site.start("127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc_info):
        await self._site.aclose()


class UvicornUnderTest:
    """The same application under uvicorn."""

    def __init__(self, limits):
        self._limits = limits
        self.num_abandoned = 0
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(512)
        self.port = self._listener.getsockname()[1]

    async def _app(self, scope, receive, send):
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["method"] == "GET":
            for _ in range(SIZE // 2**16):
                if (await self._is_gone(receive)) is True:
                    self.num_abandoned += 1
                    return
                await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
        await send({"type": "http.response.body", "body": body})

    async def _is_gone(self, receive):
        try:
            async with asyncio.timeout(0.001):
                return (await receive())["type"] == "http.disconnect"
        except TimeoutError:
            return False

    async def __aenter__(self):
        self._serving = asyncio.create_task(
            serve_asgi(self._app, self._listener, limits=self._limits)
        )
        return self

    async def __aexit__(self, *exc_info):
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._listener.close()


BOTH = pytest.mark.parametrize("make", [AiohttpUnderTest, UvicornUnderTest])


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)


async def closed(port, first, *, drip=b""):
    """Send bytes, then drip more of them; return the answer when the server hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def dripping():
        while drip:
            writer.write(drip)
            await asyncio.sleep(0.05)

    writer.write(first)
    task = asyncio.create_task(dripping())
    try:
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await reader.read()
            except ConnectionError:
                return b""
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


HEADER = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
SLOW = {
    "no bytes": (b"", b""),
    "an unfinished header": (HEADER, b""),
    "a dripping header": (HEADER + b"x: y", b"z"),
    "half a request line": (b"PO", b""),
    "a missing body": (HEADER + b"Content-Length: 9\r\n\r\n", b""),
    "a dripping body": (HEADER + b"Content-Length: 100000\r\n\r\n", b"x"),
    "dripping chunks": (HEADER + b"Transfer-Encoding: chunked\r\n\r\nfffff\r\n", b"x"),
    "idle after an answer": (HEADER + b"Content-Length: 1\r\n\r\nx", b""),
    "a dripping second header": (HEADER + b"Content-Length: 1\r\n\r\nxPOST / HT", b"T"),
}


async def until_answered(port, status):
    async with asyncio.timeout(PATIENCE_S):
        while statuses(await exchange(port, request("POST", "/", b"x"), ends=False)) != [status]:
            await asyncio.sleep(0.02)


@BOTH
def test_slow_clients_are_disconnected(make):
    async def use():
        async with make(QUICK) as server:
            answers = await asyncio.gather(
                *(closed(server.port, first, drip=drip) for first, drip in SLOW.values())
            )
            for name, answer in zip(SLOW, answers, strict=True):
                # On a busy machine even a timely request may come too late.
                is_answered = "after" in name or "second" in name
                expected = {200, 408} if is_answered else {408}
                assert set(statuses(answer)) <= expected, (name, answer)

    asyncio.run(use())


@BOTH
def test_clients_that_do_not_read_are_disconnected(make):
    async def use():
        async with make(QUICK) as server:
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                await until(lambda: server.num_abandoned)

    asyncio.run(use())


@BOTH
def test_connections_beyond_the_limit_get_503(make):
    limits = ConnectionLimits(header_s=300.0, max_connections=3)

    async def use():
        async with make(limits) as server:
            held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
            try:
                await until_answered(server.port, 503)
                held.pop().close()
                await until_answered(server.port, 200)
            finally:
                for client in held:
                    client.close()

    asyncio.run(use())


@BOTH
def test_websocket_upgrades_are_answered(make):
    raw = request(
        "POST", "/", b"x", [("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13")]
    ).replace(b"Connection: close", b"Connection: Upgrade")

    async def use():
        async with make(ConnectionLimits(idle_s=0.5, body_s=0.5)) as server:
            answer = await exchange(server.port, raw, ends=False)
            assert all(status < 500 for status in statuses(answer)), answer

    asyncio.run(use())


@BOTH
@pytest.mark.parametrize("num_turns", range(4))
def test_closing_server_leaks_no_connection(make, num_turns):
    """Clients connect until the last moment, and every connection is closed."""

    async def use():
        clients = [socket.socket() for _ in range(40)]
        try:
            async with make(ConnectionLimits()) as server:
                await exchange(server.port, request("POST", "/", b"x"), ends=False)
                for client in clients:
                    client.connect(("127.0.0.1", server.port))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
        finally:
            for client in clients:
                client.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(use())
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


def test_stop_listening_attaches_accepted_connections():
    """A plain asyncio server is closed between accept and transport."""
    received = []

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport):
            received.append(transport)

    async def use():
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Protocol, "127.0.0.1", 0, backlog=100)
        clients = [socket.create_connection(server.sockets[0].getsockname()) for _ in range(20)]
        # The loop's own callback for a new connection.
        key = loop._selector.get_key(server.sockets[0].fileno())
        key.data[0]._run()
        await stop_listening([server])
        assert len(received) == 20
        for transport in received:
            transport.close()
        for client in clients:
            client.close()
        await asyncio.sleep(0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(use())
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
