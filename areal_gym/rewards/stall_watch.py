"""Write the stacks of all threads to stderr if a call blocks every thread or ends the process.

A regular expression that takes exponential time holds the interpreter lock: no time limit takes
effect, and neither Ctrl-C nor SIGTERM is handled. The timer of `faulthandler` runs in C and does
not need the lock. A thread restarts it every few seconds; when that thread cannot run any more, the
timer expires and writes the stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time

_LIMIT_S = 30.0
_RESTART_S = 5.0

_lock = threading.Lock()
_watching_process: int | None = None


def watch_for_stalls(limit_s: float = _LIMIT_S) -> None:
    """Start to watch this process, unless it is watched already; a forked process starts anew.

    Whenever no other thread could run for `limit_s` seconds, the stacks are written to stderr.
    """
    global _watching_process
    with _lock:
        if _watching_process == os.getpid():
            return
        _watching_process = os.getpid()
    restart_s = min(_RESTART_S, limit_s / 2)
    thread = threading.Thread(
        target=_restart_timer, args=(limit_s, restart_s), name="areal-gym-stalls", daemon=True
    )
    thread.start()


def _restart_timer(limit_s: float, restart_s: float) -> None:
    stderr = sys.__stderr__
    if stderr is None:  # a service without stderr
        return
    # stderr may be closed, or may not be a file with a descriptor.
    with contextlib.suppress(ValueError, OSError, RuntimeError):
        if not faulthandler.is_enabled():
            faulthandler.enable(stderr)  # reports abort() and segmentation faults
        while True:
            faulthandler.dump_traceback_later(limit_s, repeat=True, file=stderr)
            time.sleep(restart_s)
