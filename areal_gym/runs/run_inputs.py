"""The user's files that a run is made of: rewards, tools, environments, data.

    plugins.json, "inputs"   each file that the settings name: path, hash, copy
    inputs/                  copies: of code and of modules that it imports from its folder; of data
                             that are small or lie in the cache only

A run goes on where the originals are gone: `with_copies` puts the copies in their place. What was
defined in a notebook has no file, and its name says so (`utils.session_objects`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from areal_gym.config import RunConfig
from areal_gym.run_dir.run_dir import RunDir
from areal_gym.run_dir.run_files import RunFiles
from areal_gym.utils.cache import cache_directory
from areal_gym.utils.files import readable_disk_errors
from areal_gym.utils.neighbour_modules import neighbours
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
    rows: dict[str, dict[str, Any]] = {}
    named = dict.fromkeys(_files(config))
    for file, (place, is_named) in _places(named):
        size, digest = _fingerprint(file)
        row = {"file": str(file), "bytes": size, "sha256": digest, "copy": None}
        old = before.get(str(file))
        if old is not None and old["sha256"] != digest and str(file) not in rows:
            remarks.append(f"warning: {file} has changed since the run began")
        is_copied = size <= MOST_COPIED or file.is_relative_to(cache_directory())
        if is_copied and not file.is_relative_to(directory.inputs_dir.absolute()):
            copy = _copy(file, directory.inputs_dir / place)
            row["copy"] = str(copy.relative_to(directory.path))
        if is_named or str(file) not in rows:
            rows[str(file)] = row if row["copy"] or old is None else {**row, "copy": old["copy"]}
    rows = {**{file: row for file, row in before.items() if file not in rows}, **rows}
    if rows:
        directory.add_provenance(inputs=[*rows.values()])
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
    rows = [row for row in RunFiles(run).read_provenance().get("inputs", []) if row.get("copy")]
    missing = [row for row in rows if not Path(row["file"]).exists()]
    # Code and its modules stay together.
    folders = {Path(row["copy"]).parts[:2] for row in missing}
    places = {
        str(row["file"]): str((run / row["copy"]).absolute())
        for row in rows
        if Path(row["copy"]).parts[:2] in folders and (run / row["copy"]).is_file()
    }
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
    remarks = [
        f"{row['file']} is gone; its copy in {run} is used"
        for row in missing
        if row["file"] in places
    ]
    return config.model_copy(update={"env": env}), remarks


def digests_of_inputs(config: RunConfig) -> dict[str, str]:
    """Return the hashes of the files that the environment's settings name, by path."""
    return {str(file): _fingerprint(file)[1] for file, _ in _places(dict.fromkeys(_files(config)))}


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


def _places(named: Iterable[Path]) -> Iterator[tuple[Path, tuple[Path, bool]]]:
    """Yield each file with the place of its copy, and whether the settings name it.

    Code of one folder stays together, with the modules that it imports from there: under a name
    made of their contents, so that code whose modules have changed gets another folder.
    """
    groups: dict[Path, list[Path]] = {}
    for file in named:
        groups.setdefault(file.parent if file.suffix == ".py" else file, []).append(file)
    for folder, files in groups.items():
        beside = [each for file in files if file.suffix == ".py" for each in neighbours(file)]
        every = list(dict.fromkeys([*files, *beside]))
        digests = "".join(_fingerprint(each)[1] for each in every)
        digest = (digests if len(every) == 1 else sha256(digests.encode()).hexdigest())[:8]
        for each in every:
            within = each.relative_to(folder) if beside else each.name
            yield each, (Path(digest) / within, each in files)


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
        digest = sha256(stream.read(MOST_COPIED))
    if size > MOST_COPIED:
        digest.update(str(size).encode())
    return size, digest.hexdigest()


def _copy(file: Path, place: Path) -> Path:
    """Copy a file unless it is there already; return where it is."""
    with readable_disk_errors(place):
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            draft = place.with_name(f".{file.name}.draft")
            shutil.copyfile(file, draft)
            draft.replace(place)
    return place
