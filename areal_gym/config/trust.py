"""Decide which settings of a run directory need the user's consent.

A run directory is data, perhaps from another person; `train --resume`, `eval --run`, `serve --run`
and `replay` take their settings from it. Most settings are numbers and names. Some start programs,
import modules, open files by name, or reach other machines: an agent's command, a function, a
server's address. These are accepted if this user has run with the same ones before (a note in the
cache records it), if the command line repeats them, or with `--trust`.

A recipe that is named with `-c` counts as chosen by the user.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_gym.config.run_config import RunConfig
from areal_gym.config.settings_model import flat
from areal_gym.errors import UsageError
from areal_gym.utils.cache import cache_directory
from areal_gym.utils.http_servers.addresses import is_loopback
from areal_gym.utils.markup import short

_WORD = re.compile(r"[\w+-]{0,64}")
"""A text that cannot name a file, module or address."""
_ID = re.compile(r"[\w./+-]*(:[\w./+-]*)?")
"""An id of a plugin, or of an adapter with its argument; another colon could name code."""
_CODE = re.compile(r"[^:]*[.].*:")
"""Matches ids of environments that import code: `FILE.py:CLASS`, `package.module:CLASS`."""
_STRICT = ("agent.", "engine.kwargs", "loggers.", "trainer.weight_sync.kwargs")
"""Below these keys, even a plain word may name a program."""
_PROTECTIVE = re.compile(r"sandbox|min_level|image|runtime|backend")
"""Matches names of arguments that choose how untrusted code is contained."""


def powerful_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings, by dotted key, that can start programs or reach outside the run."""
    return dict(_powerful(config))


def remember_settings(config: RunConfig) -> None:
    """Record in the cache, if it is writable, that this user has run with these settings."""
    if powerful := powerful_settings(config):
        file = _note_of(powerful)
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()


def require_chosen(config: RunConfig, source: Path, given: Sequence[str]) -> None:
    """Refuse settings of the file `source` that this user has not chosen.

    `given` are dotted keys that the user has set; they cover the keys below them.

    Raises:
        UsageError: one of them would start a program, import a module or reach another machine.
    """
    powerful = powerful_settings(config)
    if not powerful or _note_of(powerful).exists():
        return
    unknown = {
        key: value
        for key, value in powerful.items()
        if not any(key == name or key.startswith(f"{name}.") for name in given)
    }
    if unknown:
        shown = ", ".join(f"{key} = {short(value, 60)!r}" for key, value in unknown.items())
        key, value = next(iter(unknown.items()))
        raise UsageError(
            f"{source} has settings that can start programs, read files or reach other machines, "
            f"and you have not run with them before: {shown}",
            hints=[
                "if you trust its author: repeat the command with --trust",
                f"or set them yourself: {key}={json.dumps(value, ensure_ascii=False)}",
            ],
        )


def _powerful(config: RunConfig) -> Iterator[tuple[str, Any]]:
    tree = config.model_dump(mode="json")
    for key, value in flat(tree):
        last = key.rpartition(".")[2]
        if "kwargs" in key.split(".") and not key.startswith("rollout.template_kwargs"):
            if not _is_harmless(key, value):
                yield key, value
        elif (last == "id" and not _is_id(str(value))) or (last == "url" and value):
            yield key, value
    if config.cluster.address not in (None, "local"):
        yield "cluster.address", config.cluster.address
    if not is_loopback(config.gateway.rpartition(":")[0]):
        yield "gateway", config.gateway
    if config.model.trust_remote_code:
        yield "model.trust_remote_code", True
    for name in ("file", "heldout_file"):
        if (value := getattr(config.data, name)) is not None:
            yield f"data.{name}", value
    for name in ("advantage_kwargs", "loss_kwargs"):
        for key, value in flat(tree["trainer"][name], f"trainer.{name}"):
            if not _is_harmless(key, value):
                yield key, value


def _is_id(text: str) -> bool:
    return bool(_ID.fullmatch(text)) and not _CODE.match(text)


def _is_harmless(key: str, value: Any) -> bool:
    if isinstance(value, Mapping):  # an empty one
        return not value
    if isinstance(value, list):
        return all(_is_harmless(key, item) for item in value)
    if not isinstance(value, str):
        return value is None or isinstance(value, bool | int | float)
    name = key.rpartition(".")[2]
    if key.startswith("env.") and name == "id":
        return _is_id(value)
    if _PROTECTIVE.search(name):
        return value in ("process", "docker")
    return bool(_WORD.fullmatch(value)) and not key.startswith(_STRICT)


def _note_of(powerful: Mapping[str, Any]) -> Path:
    text = json.dumps(powerful, sort_keys=True, ensure_ascii=True)
    return cache_directory() / "settings" / hashlib.sha256(text.encode()).hexdigest()[:32]
