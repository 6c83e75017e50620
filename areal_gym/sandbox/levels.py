"""The default minimum level of the process sandbox.

It is the strongest level seen on this machine: by `areal-gym doctor`, which records it, or earlier
in this process. A weaker sandbox (another user's limits, a container, a changed kernel setting) is
refused unless the weaker level is requested explicitly.
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
"""The environment variable that sets the level, weaker or stronger than the default."""
_FILE = "sandbox-level.json"
_noted = SandboxLevel.FILTERED


def default_min_level() -> SandboxLevel:
    """Return the minimum level of sandboxes that were not given one.

    Raises:
        ConfigError: the environment variable does not name a level.
    """
    value = os.environ.get(MIN_LEVEL_VARIABLE)
    if value is not None:
        if value not in list(SandboxLevel):
            message = f"{MIN_LEVEL_VARIABLE} = {value!r} is not a sandbox level"
            raise ConfigError(message, hints=[f"levels: {', '.join(SandboxLevel)}"])
        return SandboxLevel(value)
    return max(_noted, _recorded_level(), key=lambda level: level.rank)


def note_level(level: SandboxLevel) -> None:
    """Remember in this process that a sandbox reached this level."""
    global _noted
    _noted = max(_noted, level, key=lambda each: each.rank)


def write_level(level: SandboxLevel) -> None:
    """Record the level of this machine, replacing an earlier record."""
    with suppress(OSError):  # without a writable directory, only this process remembers
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"machine": _machine(), "level": level}))


def _recorded_level() -> SandboxLevel:
    with suppress(OSError, ValueError, LookupError, TypeError):
        record = json.loads(_file().read_text())
        if record["machine"] == _machine():
            return SandboxLevel(record["level"])
    return SandboxLevel.NONE


def _file() -> Path:
    # Imported on use: the sandbox also runs with the standard library only.
    from areal_gym.utils.cache import cache_directory

    return cache_directory() / _FILE


def _machine() -> list[str]:
    """Return what a record is valid for: this machine, kernel, user and set of namespaces."""
    spaces = []
    for name in ("user", "mnt", "pid"):
        with suppress(OSError):
            spaces.append(os.readlink(f"/proc/self/ns/{name}"))
    return [platform.node(), platform.release(), str(os.geteuid()), *spaces]
