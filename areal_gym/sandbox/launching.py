"""Starts the servers of the package `worker` as clean interpreters of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

# A fixed hash seed gives sets of strings the same order in every interpreter, so that episodes
# repeat. One thread, because a process with more cannot be forked safely. One memory arena: glibc
# reserves up to 128 MB of address space per thread, which would count towards the memory limit.
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}

# What it needs to know is in a variable: other processes can read a command line.
_BOOT = """
import importlib, json, os, socket, sys
folder, module, control, parent, settings = json.loads(os.environ.pop("WORKER"))
sys.path.insert(0, folder)
server = importlib.import_module("worker." + module)
del sys.path[0]
server.main(socket.socket(fileno=control), parent, settings)
"""


def launch_worker(
    module: str, settings: dict[str, Any]
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a module of `worker` with `settings`; return the message socket to it, and its process.

    The process is a fresh interpreter: it shares no memory, files or environment with this one. It
    gets a pidfd of this process, so that it notices its end.
    """
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.pidfd_open(os.getpid())
    fds = (theirs.fileno(), parent)
    order = json.dumps([str(Path(__file__).parent), module, *fds, settings])
    process = subprocess.Popen(
        [os.path.realpath(sys.executable), "-P", "-s", "-S", "-X", "utf8", "-c", _BOOT],
        env={**ENVIRONMENT, "WORKER": order},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=fds,
        cwd="/",
    )
    theirs.close()
    os.close(parent)
    return control, process
