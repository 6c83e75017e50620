"""The parent's side of the server of local places: orders, answers, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import os
import secrets
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from areal_gym.errors import SandboxError
from areal_gym.sandbox.launching import launch_worker
from areal_gym.sandbox.worker.groups import remove_groups

_START_S = 60.0
_MESSAGE_BYTES = 1 << 16


async def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Wait for a message on a non-blocking socket; ConnectionError when the other side is gone."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            message, fds, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 4)
        except BlockingIOError:
            ready = asyncio.Event()
            loop.add_reader(channel, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_reader(channel)
            continue
        if not message:
            raise ConnectionError("the other side is gone")
        event: dict[str, Any] = json.loads(message)
        return event, fds


class LocalServer:
    """One server process; belongs to the running loop."""

    def __init__(
        self, control: socket.socket, process: subprocess.Popen[bytes], group: str
    ) -> None:
        self._control = control
        self._process = process
        self._group = group
        self._owner = os.getpid()
        self.protections: tuple[str, ...] = ()
        self.num_users = 1
        self.is_alive = True
        control.setblocking(False)

    @classmethod
    async def start(cls, layers: Path, memory_mb: int) -> Self:
        """Start a server whose image layers are in a folder, or raise SandboxError."""
        group = f"{os.getpid()}-{secrets.token_hex(8)}"
        settings = {
            "layers": str(layers),
            "group": group,
            "memory_mb": memory_mb,
            "user": _user_name(),
        }
        server = cls(*launch_worker("place_server", settings), group)
        try:
            async with asyncio.timeout(_START_S):
                event, _ = await receive(server._control)
        except BaseException as error:
            refusal = server._refusal() if isinstance(error, OSError) else None
            server.close()
            if refusal is not None:
                raise refusal from None
            raise
        server.protections = tuple(event["protections"])
        server.num_users = int(event["num_users"])
        return server

    def _refusal(self) -> SandboxError:
        assert self._process.stderr is not None
        self._process.kill()  # where it still tries
        text = self._process.stderr.read().decode(errors="replace").strip()
        reason = text.splitlines()[-1] if text else "its server did not start"
        return SandboxError(
            f"this machine gives no local place: {reason}",
            hints=(
                "local places need Linux 5.12, and root or user namespaces (unprivileged: "
                "sysctl kernel.unprivileged_userns_clone, kernel.apparmor_restrict_"
                "unprivileged_userns, user.max_user_namespaces)",
                "or use an engine: the place 'docker'",
            ),
        )

    async def ask(
        self, order: str, fds: Sequence[int] = (), **details: object
    ) -> tuple[dict[str, Any], list[int]]:
        """Send an order and wait for its answer; an error of the server is a SandboxError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            ours.setblocking(False)
            with theirs:
                self.send(order, [theirs.fileno(), *fds], **details)
            try:
                answer, given = await receive(ours)
            except OSError:
                raise SandboxError(f"the server of local places was lost ({order})") from None
        if "error" in answer:
            raise SandboxError(f"{order} in a local place: {str(answer['error']).strip()}")
        return answer, given

    def send(self, order: str, fds: Sequence[int], **details: object) -> None:
        """Send an order whose answer goes to the first of `fds`."""
        if not self.is_alive:
            raise SandboxError("the server of local places has ended")
        message = json.dumps({"order": order, **details}).encode()
        # Orders are small and read at once: blocking here costs microseconds.
        self._control.settimeout(5.0)
        try:
            socket.send_fds(self._control, [message], list(fds))
        except OSError as error:
            self.close()
            raise SandboxError(f"the server of local places was lost: {error}") from error
        self._control.setblocking(False)

    def close(self) -> None:
        """End the server and all its places, and wait for that. Idempotent."""
        if not self.is_alive or os.getpid() != self._owner:
            return
        self.is_alive = False
        self._control.close()
        with self._process as process:  # which closes its error output
            try:
                process.wait(10.0)  # it ends its places when its socket closes
            except subprocess.TimeoutExpired:
                process.kill()
        remove_groups(self._group)  # only a killed server leaves them


def _user_name() -> str:
    with contextlib.suppress(KeyError, OSError):
        return getpass.getuser()
    return str(os.getuid())
