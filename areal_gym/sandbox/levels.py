"""The weakest level of the process sandbox that is accepted when nothing else is asked for.

It is the strongest that was found here: by `areal-gym doctor`, which writes it down, or earlier in
this process. A sandbox that comes out weaker than that (another user's limits, a container, a
kernel's setting that was changed) is refused until somebody asks for the weaker level.
"""

from __future__ import annotations

import json
import os
import platform
from contextlib import suppress
from pathlib import Path

from areal_gym.errors import ConfigError
from areal_gym.sandbox.base import SandboxLevel

MIN_LEVEL_VARIABLE = "AREAL_GYM_SANDBOX_MIN_LEVEL"
"""The environment variable that asks for a level, weaker or stronger than the default."""
_FILE = "sandbox-level.json"
_noted = SandboxLevel.FILTERED


def default_min_level() -> SandboxLevel:
    """Returns the level that a sandbox must have which was given none.

    Raises:
        ConfigError: the environment variable names no level.
    """
    asked = os.environ.get(MIN_LEVEL_VARIABLE)
    if asked is not None:
        if asked not in list(SandboxLevel):
            raise ConfigError(
                f"{MIN_LEVEL_VARIABLE} = {asked!r} is no level of the sandbox",
                hints=[f"levels: {', '.join(SandboxLevel)}"],
            )
        return SandboxLevel(asked)
    return max(_noted, _written(), key=lambda level: level.rank)


def note_level(level: SandboxLevel) -> None:
    """Remember, in this process, that a sandbox came out this strong."""
    global _noted
    _noted = max(_noted, level, key=lambda each: each.rank)


def write_level(level: SandboxLevel) -> None:
    """Write down what was found on this machine; what stood there is replaced."""
    with suppress(OSError):  # without a place to write, this process alone remembers
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"machine": _machine(), "level": level}))


def _written() -> SandboxLevel:
    try:
        found = json.loads(_file().read_text())
        if found["machine"] == _machine():
            return SandboxLevel(found["level"])
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return SandboxLevel.NONE


def _file() -> Path:
    # On use: the sandbox also runs under interpreters that have nothing but the standard library.
    from areal_gym.utils.cache import cache_directory

    return cache_directory() / _FILE


def _machine() -> list[str]:
    """What a finding holds for: this machine, kernel, user and set of namespaces."""
    spaces = []
    for name in ("user", "mnt", "pid"):
        with suppress(OSError):
            spaces.append(os.readlink(f"/proc/self/ns/{name}"))
    return [platform.node(), platform.release(), str(os.geteuid()), *spaces]
