"""Commands of a place, executed by its keeper (`sandbox/worker/place_keeper.py`) over a socket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from areal_gym.errors import SandboxError
from areal_gym.places.base import CommandResult

OUTPUT_BYTES = 1 << 20
"""The bound of each output of a command."""
KILLED = 137
"""The exit code of a command that was killed at its deadline."""
_CHUNK_BYTES = 1 << 16
_KILL_S = 5.0
_GRACE_S = 0.05
_LISTEN_S = 30.0
_NOT_RUNNABLE = 126


class Output:
    """One output of a command: read as it comes, kept up to a bound."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._read, self.write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read, False)
        self.text = bytearray()
        self.closed = self._loop.create_future()
        self._loop.add_reader(self._read, self._on_data)

    def _on_data(self) -> None:
        try:
            data = os.read(self._read, _CHUNK_BYTES)
        except BlockingIOError:
            return
        self.text += data[: max(0, OUTPUT_BYTES - len(self.text))]
        if not data:
            self.close()

    def close(self) -> None:
        """Stop reading. Idempotent."""
        if not self.closed.done():
            self.closed.set_result(None)
            self._loop.remove_reader(self._read)
            os.close(self._read)


class Commands:
    """The commands of one keeper, over the socket `control`; belongs to the running loop."""

    def __init__(self, control: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._control = control
        self._numbers = itertools.count(1)
        self._ends: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.is_alive = True
        self._loop.add_reader(control, self._on_event)

    async def run(
        self, argv: Sequence[str], details: Mapping[str, object], timeout_s: float
    ) -> CommandResult | None:
        """Run a command; None if its outputs stayed open after it was killed at its deadline."""
        number = next(self._numbers)
        outputs = [Output(), Output()]
        end = self._ends[number] = self._loop.create_future()
        try:
            self._order(number, {"argv": list(argv), **details}, outputs)
            is_timed_out = False
            done, _ = await asyncio.wait({end}, timeout=timeout_s)
            if not done:
                is_timed_out = True
                self._send({"order": "kill", "number": number})
                done, _ = await asyncio.wait({end}, timeout=_KILL_S)
                if not done:
                    return None
            event = end.result()
            if "error" in event and not event.get("is_full"):
                raise SandboxError(f"{argv[0]!r} could not be started: {event['error']}")
            await asyncio.wait([output.closed for output in outputs], timeout=_GRACE_S)
        except asyncio.CancelledError:
            self._send({"order": "kill", "number": number})
            raise
        finally:
            del self._ends[number]
            for output in outputs:
                output.close()
        stdout, stderr = (bytes(output.text) for output in outputs)
        if "error" in event:  # the place is full of processes that it left behind
            text = f"{argv[0]}: {event['error']}\n".encode()
            return CommandResult(exit_code=_NOT_RUNNABLE, stdout=stdout, stderr=stderr + text)
        code = KILLED if is_timed_out else int(event["status"])
        return CommandResult(
            exit_code=code, stdout=stdout, stderr=stderr, is_timed_out=is_timed_out
        )

    async def listen(self, port: int) -> socket.socket:
        """Return a socket that listens on 127.0.0.1:`port` in the keeper's network.

        SandboxError if there is none, or if what the keeper sends is not such a socket.
        """
        number = next(self._numbers)
        end = self._ends[number] = self._loop.create_future()
        try:
            self._send({"order": "listen", "number": number, "port": port})
            async with asyncio.timeout(_LISTEN_S):
                event = await end
        except TimeoutError:
            raise SandboxError(f"the place's keeper does not listen on port {port}") from None
        finally:
            del self._ends[number]
        if "socket" not in event:
            raise SandboxError(f"nothing listens on port {port} inside: {event.get('error')}")
        listener: socket.socket = event["socket"]
        if not _is_listener(listener, port):
            listener.close()
            raise SandboxError(f"the place's keeper has sent another thing than port {port}")
        listener.setblocking(False)
        return listener

    def _order(self, number: int, details: Mapping[str, object], outputs: Sequence[Output]) -> None:
        file = os.memfd_create("order", os.MFD_CLOEXEC)
        writes = [output.write for output in outputs]
        try:
            with open(file, "wb", closefd=False) as order:
                order.write(json.dumps(details).encode("utf-8", "surrogateescape"))
            message = json.dumps({"order": "run", "number": number}).encode()
            socket.send_fds(self._control, [message], [file, *writes])
        except OSError as error:
            raise SandboxError(f"the place is gone: {error}") from error
        finally:
            for fd in (file, *writes):
                os.close(fd)

    def _send(self, order: Mapping[str, object]) -> None:
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(order).encode())

    def _on_event(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, 4096, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        try:
            event = json.loads(data) if data else None
            end = self._ends.get(event["number"]) if event else None
            if event and end and not end.done() and fds and event["event"] == "listening":
                event["socket"] = socket.socket(fileno=fds[0])
                fds.clear()
        except (OSError, ValueError, TypeError, KeyError):
            event = end = None
        for fd in fds:
            os.close(fd)
        if event is None:
            self.close("the place has ended")
        elif end is not None and not end.done():
            end.set_result(event)

    def close(self, reason: str) -> None:
        """Give up: commands that still run raise SandboxError with `reason`. Idempotent."""
        if not self.is_alive:
            return
        self.is_alive = False
        self._loop.remove_reader(self._control)
        self._control.close()
        for end in self._ends.values():
            if not end.done():
                end.set_exception(SandboxError(reason))


def _is_listener(listener: socket.socket, port: int) -> bool:
    """Return whether a socket from a place is what was asked for; its own code may have sent it."""
    try:
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(
            listens
            and (listener.family, listener.type) == (socket.AF_INET, socket.SOCK_STREAM)
            and listener.getsockname() == ("127.0.0.1", port)
        )
    except OSError:
        return False
