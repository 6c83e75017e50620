"""The command line: parses arguments, calls the library and prints results."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from areal_gym.utils.garbage import collect_rarely

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `areal-gym` with these arguments, by default the process's own, and exit."""
    collect_rarely()
    try:
        from areal_gym.cli.app import run
    except KeyboardInterrupt:  # too early for render_error
        sys.exit(130)
    code = run(argv)
    if code == 130:  # a second Ctrl-C must not print a traceback at exit
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)
