"""A listening socket inside another process's network namespace."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading

from areal_gym.errors import SandboxError
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
