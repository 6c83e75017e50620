"""A listening socket inside another process's network namespace, or another container's."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from areal_gym.errors import SandboxError
from areal_gym.places.engine_calls import remove_container
from areal_gym.places.keeper_commands import Commands
from areal_gym.places.keeper_socket import FOLDER, KeeperSocket, keeper_entrypoint
from areal_gym.sandbox.image import import_host
from areal_gym.sandbox.worker import kernel

_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1


def listen_inside(pid: int, port: int) -> socket.socket:
    """Return a socket on 127.0.0.1:`port` in the network namespace of `pid`, or raise SandboxError.

    A thread enters the namespace and ends: no other thread of this process ever changes its own.
    """
    made: list[socket.socket | OSError] = []
    thread = threading.Thread(target=_listen, args=(pid, port, made))
    thread.start()
    thread.join()
    (result,) = made
    if isinstance(result, OSError):
        raise SandboxError(
            f"no socket on port {port} in the network namespace of process {pid}: {result}",
            hints=("this needs CAP_SYS_ADMIN, and an engine on this machine",),
        ) from result
    return result


def _listen(pid: int, port: int, made: list[socket.socket | OSError]) -> None:
    listener = None
    try:
        namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            if os.fstat(namespace).st_ino == os.stat("/proc/self/ns/net").st_ino:
                raise PermissionError("the place shares the network of this machine")
            kernel.setns(namespace, kernel.NEWNET)
        finally:
            os.close(namespace)
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(listener, _GET_FLAGS, request))[1]
        if not flags & _UP:
            fcntl.ioctl(listener, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        if listener is not None:
            listener.close()
        made.append(error)
    else:
        made.append(listener)


async def listen_beside(
    container: Any, owner: str, call: Callable[..., Awaitable[Any]], port: int
) -> socket.socket:
    """Return a socket on 127.0.0.1:`port` in the network of a container, without rights over it.

    Another container with the same network makes the socket, hands it over and is removed. Its
    image is made of this interpreter, once, so the first one needs neither Python nor a shell.

    Args:
        container: the engine's container, which runs.
        owner: the label by which what a killed run leaves is known (`owners`).
        call: executes a call to the engine in a thread; an engine's failure is a SandboxError.
        port: the port to listen on.
    """
    keeper = KeeperSocket(owner)
    helper = None
    try:
        helper = await call(_create_beside, container, str(keeper.folder))

        async def is_running() -> bool:
            await call(helper.reload)
            return bool(helper.status == "running")

        connection = await keeper.connect(partial(call, helper.start), is_running)
        if connection is None:
            raise SandboxError("a container beside the place, which would listen, has ended")
        commands = Commands(connection)
        try:
            return await commands.listen(port)
        finally:
            commands.close("the socket was handed over")
    finally:
        keeper.remove()
        if helper is not None:
            await call(remove_container, helper)


def _create_beside(container: Any, folder: str) -> Any:
    """Return a container with the network of another, whose first process is a keeper."""
    name = f"areal-gym-listener:{hashlib.sha256(sys.version.encode()).hexdigest()[:12]}"
    client = container.client
    if not client.images.list(name):
        import_host(client, name)
    return client.containers.create(
        name,
        entrypoint=keeper_entrypoint(),
        command=[],
        volumes={folder: {"bind": FOLDER, "mode": "ro"}},
        network_mode=f"container:{container.id}",
        labels=container.labels,
        user="0:0",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        mem_limit="256m",
        pids_limit=16,
    )
