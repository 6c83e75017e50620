"""Split the command lines in settings, and quote paths for those in messages."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def command_words(command: str | Sequence[object] | None) -> list[str]:
    """Return the words of a command line; a string is split as a shell does."""
    return shlex.split(command) if isinstance(command, str) else [str(c) for c in command or ()]


def quoted(path: object) -> str:
    """Return a path as it is typed in a shell, in quotes if necessary."""
    return shlex.quote(str(path))
