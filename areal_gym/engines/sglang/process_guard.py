"""Runs a command and ends it, with all that it started, when whoever asked for it is gone.

Run by `LaunchedServer` as a script in a session of its own; nothing is imported but the standard
library. Standard input is a pipe from the parent: its end, for whatever reason (a close, an
exception, Ctrl-C, kill -9), is the order to end the command. What the command started shares our
process group, which is killed as a whole.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

_GRACE_S = 2.0
"""For the command to end by itself after SIGTERM."""


def _end(command: subprocess.Popen[bytes]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        command.wait(_GRACE_S)
    os.killpg(0, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Run the command in `arguments` until it ends, or until standard input does."""
    command = subprocess.Popen(arguments, stdin=subprocess.DEVNULL)
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
