"""Names the line of a call that keeps every thread from running or ends the process, on stderr.

A regular expression that explodes holds the interpreter's lock: no time limit fires, and neither
Ctrl-C nor SIGTERM is handled. The watch of faulthandler is a thread in C, which needs no lock: it
is put off every few seconds, and where that is not possible, it writes the stacks of all threads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time

_LIMIT_S = 30.0
_BEAT_S = 5.0

_lock = threading.Lock()
_watching_process: int | None = None


def watch_for_stalls(limit_s: float = _LIMIT_S) -> None:
    """Begin to watch this process, if nothing watches it yet; a fork has to begin again.

    After `limit_s` in which no other thread could run, and as often again, the stacks go to stderr.
    """
    global _watching_process
    with _lock:
        if _watching_process == os.getpid():
            return
        _watching_process = os.getpid()
    beat_s = min(_BEAT_S, limit_s / 2)
    thread = threading.Thread(
        target=_put_off, args=(limit_s, beat_s), name="areal-gym-stalls", daemon=True
    )
    thread.start()


def _put_off(limit_s: float, beat_s: float) -> None:
    stderr = sys.__stderr__
    if stderr is None:  # a service, where nothing can be written
        return
    with contextlib.suppress(ValueError, OSError, RuntimeError):  # it was closed, or has no number
        if not faulthandler.is_enabled():
            faulthandler.enable(stderr)  # abort() and segmentation faults
        while True:
            faulthandler.dump_traceback_later(limit_s, repeat=True, file=stderr)
            time.sleep(beat_s)
