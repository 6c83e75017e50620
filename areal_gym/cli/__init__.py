"""The command line: it parses, calls and renders; nothing is decided here."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `areal-gym` with these arguments (default: the process's own) and exit."""
    try:
        from areal_gym.cli.app import run
    except KeyboardInterrupt:  # this early, nobody else renders it
        sys.exit(130)
    code = run(argv)
    if code == 130:  # whoever presses Ctrl-C again need not see how Python ends
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)
