"""Command lines that settings give as a text or as a list of words."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def command_words(command: str | Sequence[object] | None) -> list[str]:
    """Return the words of a command line; a text is split as a shell splits it."""
    return shlex.split(command) if isinstance(command, str) else [str(c) for c in command or ()]
