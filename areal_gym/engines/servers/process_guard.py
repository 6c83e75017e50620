"""Runs a command and ends it, with all its children, when the parent process ends.

`LaunchedServer` runs this as a script in a session of its own; it imports only the standard
library. Standard input is a pipe from the parent. When it closes, for any reason (a close, an
exception, Ctrl-C, kill -9), the command is ended. The command's children share this process group,
which is killed as a whole. On Linux, the command is also killed when this process is, so that no
server outlives its guard unseen.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

_GRACE_S = 2.0
"""Seconds in which the command may end by itself after SIGTERM."""
_PR_SET_PDEATHSIG = 1


def _end_with_guard() -> None:
    """Let the kernel kill this process, the command, when its parent dies; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(command: subprocess.Popen[bytes]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        command.wait(_GRACE_S)
    os.killpg(0, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Run the command in `arguments` until it ends or standard input closes."""
    command = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, preexec_fn=_end_with_guard)
    ended = threading.Event()

    def wait_for_command() -> None:
        code = command.wait()
        print(f"areal-gym: the server ended with exit code {code}", flush=True)
        ended.set()

    def wait_for_parent() -> None:
        os.read(0, 1)
        ended.set()

    for wait in (wait_for_command, wait_for_parent):
        threading.Thread(target=wait, daemon=True).start()
    ended.wait()
    _end(command)


if __name__ == "__main__":
    main(sys.argv[1:])
