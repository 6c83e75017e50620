"""The command line: it parses, calls and renders; nothing is decided here."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `areal-gym` with these arguments (default: the process's own) and exit."""
    from areal_gym.cli.app import run
    from areal_gym.cli.output import EXIT_INTERRUPTED

    code = run(argv)
    if code == EXIT_INTERRUPTED:  # whoever presses Ctrl-C again need not see how Python ends
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)
