"""Command lines: those that settings give, and those that messages say."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def command_words(command: str | Sequence[object] | None) -> list[str]:
    """Return the words of a command line; a text is split as a shell splits it."""
    return shlex.split(command) if isinstance(command, str) else [str(c) for c in command or ()]


def quoted(path: object) -> str:
    """Return a path as a person types it in a shell: in quotes where it needs them."""
    return shlex.quote(str(path))
