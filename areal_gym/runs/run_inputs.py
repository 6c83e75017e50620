"""The user's files that a run depends on: rewards, tools, environments, data.

    plugins.json, "inputs"   for each file that the settings name: path, hash, copy
    inputs/                  copies of code, with modules that it imports from its folder, and of
                             data that is small or only in the cache

A run can be resumed without the originals: `with_copies` replaces them by the copies. Objects that
were defined in a notebook have no file, as their names tell (`utils.session_objects`).
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
"""Data files of at most this many bytes are copied into the run's directory; of larger ones, the
size and a hash of the beginning are recorded."""


def save_inputs(directory: RunDir, config: RunConfig) -> list[str]:
    """Copy the files that the environment's settings name, and record their hashes.

    Returns remarks for people: which files have changed since the run began, and which objects the
    command line cannot load.
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
    """Return a run's settings with copies in place of missing files, and remarks about them."""
    rows = [row for row in RunFiles(run).read_provenance().get("inputs", []) if row.get("copy")]
    missing = [row for row in rows if not Path(row["file"]).exists()]
    # All code of a folder is replaced together.
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
        f"{row['file']} is missing; its copy in {run} is used"
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
        for item in value:
            yield from _leaves(item)


def _files(config: RunConfig) -> Iterator[Path]:
    for text in _texts(config):
        file, separator, _ = text.rpartition(".py:")
        path = Path(f"{file}.py" if separator else text)
        if path.is_absolute() and path.is_file():
            yield path


def _places(named: Iterable[Path]) -> Iterator[tuple[Path, tuple[Path, bool]]]:
    """Yield each file with the place of its copy, and whether the settings name it.

    Code from one folder stays together with the modules that it imports from there, in a folder
    named by their contents, so that changed modules get another folder.
    """
    groups: dict[Path, list[Path]] = {}
    for file in named:
        groups.setdefault(file.parent if file.suffix == ".py" else file, []).append(file)
    for folder, files in groups.items():
        modules = [module for file in files if file.suffix == ".py" for module in neighbours(file)]
        every_file = list(dict.fromkeys([*files, *modules]))
        digests = "".join(_fingerprint(file)[1] for file in every_file)
        digest = (digests if len(every_file) == 1 else sha256(digests.encode()).hexdigest())[:8]
        for file in every_file:
            within = file.relative_to(folder) if modules else file.name
            yield file, (Path(digest) / within, file in files)


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
    """Return a file's size and hash; the hash of a large file covers its beginning and size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        digest = sha256(stream.read(MOST_COPIED))
    if size > MOST_COPIED:
        digest.update(str(size).encode())
    return size, digest.hexdigest()


def _copy(file: Path, place: Path) -> Path:
    """Copy a file unless its copy exists; return the copy's path."""
    with readable_disk_errors(place):
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            draft = place.with_name(f".{file.name}.draft")
            shutil.copyfile(file, draft)
            draft.replace(place)
    return place
