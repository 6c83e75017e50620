"""Send raw bytes to a server on this machine."""

import asyncio
import contextlib
import random

PATIENCE_S = 60.0
"""A server that has neither answered nor hung up after this time hangs."""


async def exchange(port, raw, *, ends=True, host="127.0.0.1"):
    """Send bytes; return everything until the server hangs up."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(raw)
            await writer.drain()
            if ends:
                writer.write_eof()
        answer = b""
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                while chunk := await reader.read(65536):
                    answer += chunk
        return answer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def statuses(answer):
    """Return the status codes in an answer."""
    return [
        int(line[9:12])
        for line in answer.split(b"\r\n")
        if line.startswith(b"HTTP/1.") and line[9:12].isdigit()
    ]


def request(method, path, body=b"", headers=()):
    """Return a well-formed request that asks the server to close the connection."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body


ODD_HEADERS = (
    b"Content-Encoding: gzip", b"Content-Encoding: deflate", b"Content-Encoding: br",
    b"Content-Encoding: zstd", b"Content-Encoding: \xff", b"Content-Encoding: gzip, gzip",
    b"Content-Type: application/json; charset=no-such", b"Content-Type: \xff/\xfe; charset=\xff",
    b"Content-Type: multipart/form-data; boundary=x", b"Content-Type: ",
    b"Host: [", b"Host: ]", b"Host: [::1", b"Host: 127.0.0.1:99999", b"Host: \xb2",
    b"Host: a b", b"Host: ", b"Host: 127.0.0.1:x", b"Host: //", b"Host: [v1.x]:7",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip",
    b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding: \xb2", b"Content-Length: -1", b"Content-Length: \xc2\xb2",
    b"Content-Length: 99999999999999999999", b"Content-Length: 1\r\nContent-Length: 2",
    b"Content-Length: +1", b"Content-Length: 1_0", b"Expect: 100-continue", b"Expect: a miracle",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
    b"Range: bytes=0-", b"Range: bytes=5-1,\xb2", b"If-Modified-Since: never", b"Cookie: =;;=\xff",
    b"Cookie: a=\"\\", b"Authorization: Bearer \xff\xfe", b"Authorization: Basic",
    b"Authorization:",
    b"x-api-key: \xff", b"Origin: null", b"Accept: \xff;q=nan", b"X" * 9000 + b": y",
    b"x: " + b"y" * 9000, b": empty", b" folded", b"no colon", b"a\x00b: c", b"x: a\x00b",
    b"X-Forwarded-For: \xff", b"X-Forwarded-Host: [", b"Forwarded: for=[", b"Connection: \xff",
    b"Accept-Encoding: gzip;q=\xb2", b"x-stainless-retry-count: \xb2", b"Mcp-Session-Id: \xff",
    b"Mcp-Protocol-Version: 9999", b"Last-Event-ID: \xb2", b"Proxy-Connection: keep-alive",
)  # fmt: skip
ODD_METHODS = (
    b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"PATCH", b"OPTIONS", b"TRACE", b"CONNECT",
    b"PRI", b"BREW", b"get", b"", b"G\xffT", b"X" * 200, b"POST\t",
)  # fmt: skip
ODD_VERSIONS = (
    b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.",
    b"HTTP/\xb2.1", b"", b"ICY/1.1", b"HTTP/1.1 ", b"HTTP/9.9",
)  # fmt: skip
ODD_PATHS = (
    b"/", b"//", b"/%", b"/%2e%2e/%2e%2e/etc/passwd", b"/../../etc/passwd", b"/\xff", b"/%ff",
    b"/%00", b"*", b"http://[/", b"http://127.0.0.1/", b"//[::1/x", b"127.0.0.1:1", b"/?=&%&%zz",
    b"/#x", b"/" + b"a" * 9000, b"?", b"/;x", b"http://\xb2/", b"/\xc2\xb2?after=\xc2\xb2",
    b"http://a:b@c:99999/", b"/%2f%2f", b"/a\\b", b"/\t", b"https://[::1]:x/", b"", b"/ /",
)  # fmt: skip


def odd_request(rng: random.Random, paths, bodies):
    """Return a request with malformed framing, made around real routes and bodies."""
    path = rng.choice(paths).encode() if rng.random() < 0.7 else rng.choice(ODD_PATHS)
    method = rng.choice(ODD_METHODS)
    if rng.random() < 0.5:
        method = rng.choice((b"GET", b"POST", b"DELETE"))
    body = rng.choice(bodies)
    lines = [method + b" " + path + b" " + rng.choice(ODD_VERSIONS)]
    if rng.random() < 0.8:
        lines.append(b"Host: 127.0.0.1")
    lines += rng.sample(ODD_HEADERS, rng.randrange(4))
    if rng.random() < 0.3:
        body = chunked(rng, body)
        lines.append(b"Transfer-Encoding: chunked")
    elif rng.random() < 0.8:
        lines.append(b"Content-Length: %d" % (len(body) + rng.choice((0, 0, 0, 5, -3))))
    rng.shuffle(lines[1:])
    end = rng.choice((b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r"))
    raw = end.join(lines) + end + end + body
    mishap = rng.random()
    if mishap < 0.15:
        return raw[: rng.randrange(len(raw) + 1)]
    if mishap < 0.3:
        spoilt = bytearray(raw)
        for _ in range(rng.randrange(1, 5)):
            spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
        return bytes(spoilt)
    if mishap < 0.4:
        return raw + raw
    return raw


def chunked(rng: random.Random, body):
    """Return a chunked body, often with wrong chunk sizes."""
    size = rng.choice(
        (b"%x" % len(body),) * 3
        + (b"-1", b"zz", b"\xb2", b"ffffffffffffffffff", b"", b"0x5", b"5;a=\xff", b" 5")
    )
    return size + b"\r\n" + body + b"\r\n" + rng.choice((b"0\r\n\r\n", b"", b"0\r\nx: y\r\n\r\n"))
