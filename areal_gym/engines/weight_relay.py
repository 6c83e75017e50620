"""A relay, which keeps the policy's weights in files beside servers and receives only changes.

    trainer's ranks --changes over HTTP--> relay: patches its files --> servers of its machine

It runs on each machine with servers, which load the files from its directory::

    python -m areal_gym.engines.weight_relay --directory /dev/shm/policy --port 30100

`trainer.weight_sync=delta` sends to it. A publication begins with the id of the weights that it is
based on. If the relay has another base, it refuses, and the trainer sends all weights. Each tensor
has a checksum. A relay that was restarted, or whose last publication did not end, has no base.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from aiohttp import web
from pydantic import Field

from areal_gym.engines.server_requests import Name, Request, errors_as_json, read_request
from areal_gym.errors import ConfigError, DataError, GymError
from areal_gym.utils.changed_elements import apply_changes, as_bits, checksum
from areal_gym.utils.http_servers.addresses import http_address
from areal_gym.utils.http_servers.aiohttp_site import HttpSite, RequestBodyError
from areal_gym.utils.http_servers.connections import ConnectionLimits

_BODY_S = 3600.0
"""The limit of a request in seconds; all weights of a large model take long."""
_PIECE_BYTES = 2**22
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors
ITEM_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2},
    **{"I16": 2, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1},
}
"""The bytes of an element, by safetensors' names of types."""


class _Begin(Request):
    id: Annotated[str, Field(min_length=1, max_length=200)]
    base: Name | None = None


class _Commit(Request):
    id: Name
    num_parts: Annotated[int, Field(ge=1, le=2**15)]


class _Part(Request):
    id: Name
    number: Annotated[int, Field(ge=0, lt=2**15)]
    kind: Literal["whole", "changes"]


class WeightRelay:
    """Keeps weights in `directory`. Use it as an asynchronous context manager.

    Raises:
        ConfigError: the directory has other weights, which servers would load as well.
    """

    def __init__(self, directory: Path, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.directory = directory.absolute()
        self._host = host
        self._port = port
        self._site: HttpSite | None = None
        self._id: str | None = None
        """The id of the weights in the files; None while they are incomplete."""
        self._next: str | None = None
        """The id of the publication that has begun."""
        self._received: set[int] = set()
        self.directory.mkdir(parents=True, exist_ok=True)
        others = {file.name for file in self.directory.glob("*.safetensors")}
        others -= {file.name for file in self.directory.glob("part-*.safetensors")}
        if others:
            raise ConfigError(
                f"{self.directory} has other weights: {', '.join(sorted(others)[:3])}",
                hints=["name a new or empty directory: --directory DIR"],
            )

    @property
    def url(self) -> str:
        """The relay's base URL."""
        return http_address(self._host, self._port)

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 40, middlewares=[errors_as_json])
        app.router.add_get("/weights", self._state)
        app.router.add_post("/weights/begin", self._begin)
        app.router.add_post("/weights/part", self._part)
        app.router.add_post("/weights/commit", self._commit)
        self._site = HttpSite(app, limits=ConnectionLimits(body_s=_BODY_S, write_s=_BODY_S))
        self._port = await self._site.start(self._host, self._port)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._site is not None:
            await self._site.aclose()

    async def _state(self, request: web.Request) -> web.Response:
        return web.json_response({"id": self._id, "directory": str(self.directory)})

    async def _begin(self, request: web.Request) -> web.Response:
        body = await read_request(_Begin, request)
        if body.base is not None and body.base != self._id:
            message = f"the relay has the weights {self._id}, and the changes are of {body.base}"
            raise RequestBodyError(message, status=409)
        self._id, self._next, self._received = None, body.id, set()
        return web.json_response({"success": True})

    async def _part(self, request: web.Request) -> web.Response:
        try:
            part = _Part.model_validate(dict(request.query), strict=False)
        except ValueError as error:
            raise RequestBodyError(f"invalid query: {error}") from None
        self._require_begun(part.id)
        file = self.directory / f"part-{part.number:05d}.safetensors"
        with _refusing():
            if part.kind == "whole":
                draft = file.with_suffix(".draft")
                with draft.open("wb") as stream:
                    async for piece in request.content.iter_chunked(_PIECE_BYTES):
                        await asyncio.to_thread(stream.write, piece)
                await asyncio.to_thread(check_whole, draft)
                draft.replace(file)
            else:
                await asyncio.to_thread(patch, file, await request.read())
        self._require_begun(part.id)
        self._received.add(part.number)
        return web.json_response({"success": True})

    async def _commit(self, request: web.Request) -> web.Response:
        body = await read_request(_Commit, request)
        self._require_begun(body.id)
        missing = set(range(body.num_parts)) - self._received
        if missing:
            raise RequestBodyError(f"parts {sorted(missing)} have not arrived", status=409)
        kept = {f"part-{number:05d}.safetensors" for number in self._received}
        for file in self.directory.glob("part-*"):
            if file.name not in kept:  # an earlier trainer had more ranks
                file.unlink()
        self._id, self._next = body.id, None
        return web.json_response({"success": True, "directory": str(self.directory)})

    def _require_begun(self, id: str) -> None:
        if id != self._next:
            raise RequestBodyError(
                f"the publication {id} is not the one that has begun", status=409
            )


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise RequestBodyError(error.message) from None
    except OSError as error:
        raise RequestBodyError(f"cannot write the weights: {error}", status=507) from None


def check_whole(file: Path) -> None:
    """Compare a safetensors file's tensors with the checksums in its metadata.

    Raises:
        DataError: the file is damaged.
    """
    raw, header = _mapped(file)
    checksums = header.pop("__metadata__", {})

    def check(item: tuple[str, Any]) -> None:
        name, row = item
        _require_sum(name, _bits(raw, row), str(checksums.get(name)))

    _in_threads(check, list(header.items()))


def patch(file: Path, body: bytes) -> None:
    """Apply changes to a safetensors file.

    `body` is the length of a JSON header in 8 bytes, the header, and the changes of each tensor.

    Raises:
        DataError: the changes are damaged or of other weights; the file is then unusable.
    """
    rows, start = _header(body)
    if not file.is_file():
        raise DataError(f"there is no {file.name} to change")
    raw, header = _mapped(file)
    items = []
    for row in rows.get("tensors", ()):
        end = start + int(row["num_bytes"])
        items.append((row, body[start:end]))
        start = end

    def apply(item: tuple[dict[str, Any], bytes]) -> None:
        row, changes = item
        place = header.get(row["name"])
        if place is None:
            raise DataError(f"{file.name} has no tensor {row['name']}")
        bits = _bits(raw, place)
        apply_changes(bits, int(row["num_changed"]), changes)
        _require_sum(row["name"], bits, row["sha256"])

    _in_threads(apply, items)


def _require_sum(name: str, bits: Any, expected: str) -> None:
    if checksum(bits) != expected:
        raise DataError(f"{name} is not what was sent: its checksum differs")


def _in_threads(act: Callable[[Any], None], items: Sequence[Any]) -> None:
    with ThreadPoolExecutor(thread_name_prefix="areal-gym-relay") as threads:
        for _ in threads.map(act, items):
            pass


def _mapped(file: Path) -> tuple[Any, dict[str, Any]]:
    """Return a file's tensors as bytes that can be changed in place, and its header."""
    try:
        whole = np.memmap(file, dtype=np.uint8, mode="r+")
    except ValueError:
        raise DataError(f"{file.name} is empty") from None
    header, start = _header(whole)
    return whole[start:], header


def _header(raw: Any) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(bytes(raw[:8]), "little")
    if len(raw) < 8 + length or length > _MAX_HEADER_BYTES:
        raise DataError("the header is incomplete")
    try:
        header = json.loads(bytes(raw[8 : 8 + length]))
    except ValueError:
        raise DataError("the header is not JSON") from None
    if not isinstance(header, dict):
        raise DataError("the header is not an object")
    return header, 8 + length


def _bits(raw: Any, row: dict[str, Any]) -> Any:
    try:
        (start, end), itemsize = row["data_offsets"], ITEM_BYTES[row["dtype"]]
        if not 0 <= start <= end <= len(raw):
            raise DataError(f"bytes {start} to {end} of {len(raw)}")
        return as_bits(raw[start:end], itemsize)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"a damaged header: {error!r}") from None


async def _serve(options: argparse.Namespace) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)

    def wait_for_parent() -> None:
        os.read(0, 1)
        with suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(ended.set)

    if options.temporary:
        threading.Thread(target=wait_for_parent, daemon=True).start()
    async with WeightRelay(options.directory, host=options.host, port=options.port) as relay:
        print(f"weights for servers in {relay.directory}, changes at {relay.url}", flush=True)
        await ended.wait()
    if options.temporary:
        shutil.rmtree(relay.directory)


def main(arguments: Sequence[str] | None = None) -> int:
    """Keep weights in a directory until the process gets a signal to end."""
    parser = argparse.ArgumentParser(
        prog="python -m areal_gym.engines.weight_relay",
        description="Keep the policy's weights beside servers, and receive only what has changed.",
    )
    parser.add_argument("--directory", type=Path, required=True, help="where servers load from")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=30100)
    parser.add_argument(
        "--temporary",
        action="store_true",
        help="end when standard input closes, and remove the directory at the end",
    )
    try:
        asyncio.run(_serve(parser.parse_args(arguments)))
    except (GymError, OSError) as error:
        print(error, *getattr(error, "hints", ()), sep="\n  ", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
