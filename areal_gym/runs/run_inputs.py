"""The user's files that a run is made of: rewards, tools, environments, data.

    plugins.json, "inputs"   each file that the settings name: path, hash, copy
    inputs/                  copies: of code always, of data that are small or lie in the cache only

A run goes on where the originals are gone: `with_copies` puts the copies in their place. What was
defined in a notebook has no file, and its name says so (`utils.session_objects`).
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_gym.config import RunConfig
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.run_dir.run_files import RunFiles
from areal_gym.utils.cache import cache_directory
from areal_gym.utils.files import readable_disk_errors
from areal_gym.utils.session_objects import is_session_name

MOST_COPIED = 2**24
"""Bytes of a data file up to which it is copied into the run's directory; of others, the hash of
the beginning and the size are noted."""


def save_inputs(directory: RunDir, config: RunConfig) -> list[str]:
    """Copy the files that the environment's settings name, and note their hashes.

    Returns what is to be said: what has changed since the run began, and what the command line
    cannot go on with.
    """
    remarks: list[str] = []
    before = {row["file"]: row for row in directory.read_provenance().get("inputs", [])}
    rows: list[dict[str, Any]] = []
    for file in dict.fromkeys(_files(config)):
        size, digest = _fingerprint(file)
        row = {"file": str(file), "bytes": size, "sha256": digest, "copy": None}
        old = before.get(str(file))
        if old is not None and old["sha256"] != digest:
            remarks.append(f"warning: {file} has changed since the run began")
        is_copied = size <= MOST_COPIED or file.is_relative_to(cache_directory())
        if is_copied and not file.is_relative_to(directory.inputs_dir.absolute()):
            row["copy"] = str(_copy(file, directory.inputs_dir, digest).relative_to(directory.path))
        rows.append(row if row["copy"] or old is None else {**row, "copy": old["copy"]})
    named = {row["file"] for row in rows}
    rows += [row for file, row in before.items() if file not in named]
    if rows:
        directory.add_provenance(inputs=rows)
    objects = [text for text in _texts(config) if is_session_name(text)]
    if objects:
        remarks.append(
            f"{', '.join(text.partition(':')[2] for text in dict.fromkeys(objects))}: defined in "
            "this Python session, without a file; the command line cannot resume or evaluate this "
            "run, areal_gym.train(mode='resume', ...) can if it is given them again"
        )
    return remarks


def with_copies(config: RunConfig, run: Path) -> tuple[RunConfig, list[str]]:
    """Return the settings of a run with copies in place of files that are gone, and remarks."""
    places: dict[str, str] = {}
    for row in RunFiles(run).read_provenance().get("inputs", []):
        copy = None if row.get("copy") is None else run / str(row["copy"])
        if copy is not None and copy.is_file() and not Path(row["file"]).exists():
            places[row["file"]] = str(copy.absolute())
    if not places:
        return config, []
    env = config.env.model_copy(
        update={
            "id": _replaced(config.env.id, places),
            "kwargs": _replaced(config.env.kwargs, places),
        }
    )
    if env == config.env:
        return config, []
    remarks = [f"{file} is gone; its copy in {run} is used" for file in places]
    return config.model_copy(update={"env": env}), remarks


def _texts(config: RunConfig) -> Iterator[str]:
    yield from _leaves([config.env.id, config.env.kwargs])


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _leaves([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)


def _files(config: RunConfig) -> Iterator[Path]:
    for text in _texts(config):
        file, separator, _ = text.rpartition(".py:")
        path = Path(f"{file}.py" if separator else text)
        if path.is_absolute() and path.is_file():
            yield path


def _replaced(value: Any, places: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        file, separator, name = value.rpartition(".py:")
        if separator:
            place = places.get(f"{file}.py")
            return value if place is None else f"{place}:{name}"
        return places.get(value, value)
    if isinstance(value, Mapping):
        return {_replaced(key, places): _replaced(item, places) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(item, places) for item in value]
    return value


def _fingerprint(file: Path) -> tuple[int, str]:
    """Return the size and a hash: of the whole file if it is small, else of its beginning."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        digest = hashlib.sha256(stream.read(MOST_COPIED))
    if size > MOST_COPIED:
        digest.update(str(size).encode())
    return size, digest.hexdigest()


def _copy(file: Path, folder: Path, digest: str) -> Path:
    """Copy a file beside those of the same name; return where it is."""
    place = folder / digest[:8] / file.name
    with readable_disk_errors(place):
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            draft = place.with_name(f".{file.name}.draft")
            shutil.copyfile(file, draft)
            draft.replace(place)
    return place
