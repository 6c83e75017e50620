"""Finds the task folders of a data set, and makes the task source of an environment from them.

A data set is one task folder, a folder of task folders, or a `registry.json`, whose tasks are in
git repositories. A file `splits.json` beside the tasks, `{"train": [...], "test": [...]}` with
globs of task names, says what is held out; otherwise a hash of the task's id decides.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal_gym.envs.harbor.task_downloads import checkout, downloaded
from areal_gym.envs.harbor.task_folder import TASK_FILE, HarborTask, load_task
from areal_gym.errors import (
    DataError,
    GymError,
    NothingToDoError,
    SandboxError,
    UsageError,
    choices,
)
from areal_gym.tasks import Draft, RowTasks, TaskSource
from areal_gym.tasks.base import SPLITS, TEST_SHARE
from areal_gym.tasks.given_tasks import FEW_ROWS, read_once
from areal_gym.tasks.rows import SourceRow
from areal_gym.utils.files import path_hints

REGISTRY = "registry.json"
SPLIT_FILE = "splits.json"
_MOST_SHOWN = 20
_MARKS = (TASK_FILE, "instruction.md", "environment", "steps")
"""Names by which a folder without `task.toml` is seen to be meant as a task."""


@dataclass(frozen=True, kw_only=True)
class TaskFolders:
    """The tasks of a data set, and why others cannot be used."""

    name: str
    tasks: tuple[HarborTask, ...]
    problems: tuple[tuple[str, GymError], ...]
    """Folder and error of each task that cannot be used."""
    splits: Mapping[str, Sequence[str]]
    """Globs of the names in each split, of `splits.json`."""

    def split_of(self, task: HarborTask) -> str | None:
        """Return the split that `splits.json` says; None: a hash of the id decides."""
        names = (task.id, task.folder.name)
        for split, globs in self.splits.items():
            if any(fnmatch.fnmatchcase(name, glob) for name in names for glob in globs):
                return split
        return None


def find_tasks(path: str | Path, *, dataset: str | None = None) -> TaskFolders:
    """Read all tasks of a data set; tasks with problems are collected in `problems`.

    Args:
        path: a task folder, a folder of them, or a `registry.json` (or the folder that has one);
            or a git repository, which is downloaded once (`task_downloads`).
        dataset: which of the registry's data sets: NAME or NAME@VERSION.

    Raises:
        DataError: there is no such place, or it has no tasks.
    """
    place = downloaded(str(path)) or Path(path).expanduser()
    if not place.exists():
        hints = path_hints(place) or [
            "give a task folder, a folder of them, a registry.json, or a repository: OWNER/NAME@REF"
        ]
        raise DataError(f"there is no task at {place}", hints=hints)
    registry = place / REGISTRY if place.is_dir() else place
    if registry.is_file() and not (place / TASK_FILE).is_file():
        folders = list(_registered(registry, dataset))
    elif dataset is not None:
        raise DataError(f"dataset={dataset} goes with a {REGISTRY}, which {place} has not")
    else:
        folders = _folders(place)
    tasks: list[HarborTask] = []
    problems: list[tuple[str, DataError]] = []
    places: dict[str, Path] = {}
    for folder in folders:
        try:
            task = load_task(folder)
            if task.id in places:
                raise DataError(f"the task {folder} has the name of {places[task.id]}: {task.id}")
        except DataError as error:
            problems.append((str(folder), error))
            continue
        places[task.id] = folder
        tasks.append(task)
    splits = _read_splits(place) if place.is_dir() else {}
    return TaskFolders(name=str(path), tasks=tuple(tasks), problems=tuple(problems), splits=splits)


def _folders(place: Path) -> list[Path]:
    if not place.is_dir():
        raise DataError(f"{place} is a file; a task is a folder with a {TASK_FILE}")
    if any((place / mark).exists() for mark in _MARKS):
        return [place]
    try:
        children = sorted(path for path in place.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{place} cannot be read ({error.strerror})") from error
    folders = [path for path in children if any((path / mark).exists() for mark in _MARKS)]
    if not folders and (place / "tasks").is_dir():  # as repositories have them
        return _folders(place / "tasks")
    if not folders:
        raise DataError(
            f"{place} has no task",
            hints=[
                f"a task is a folder with {TASK_FILE}, instruction.md, environment/ and tests/",
                "areal-gym new env --kind harbor NAME writes one",
            ],
        )
    return folders


_unbuilt: dict[str, dict[str, SandboxError]] = {}
"""Tasks without an image, by data set and id, that runs of this process leave out."""


def leave_out_unbuilt(
    path: str, failures: Mapping[str, SandboxError], num_tasks: int, *, is_skipped: bool
) -> None:
    """Leave tasks whose images were not built out of sources that are made from now on.

    Raises:
        SandboxError: there are some, and they shall not be skipped; it names each, and why.
    """
    if not failures:
        return
    if is_skipped:
        _unbuilt.setdefault(path, {}).update(failures)
        return
    reasons = _reasons(tuple(failures.items()))
    hints = [*reasons, "leave them out with env.kwargs.skip_broken=true"]
    count = f"{len(failures)} of {num_tasks} tasks of {path} have no image"
    raise SandboxError(f"{count}: {next(iter(failures.values())).message}", hints=hints)


@read_once
def _source(
    path: str,
    dataset: str | None,
    heldout: float | None,
    skip_broken: bool,
    state: object,
    unbuilt: tuple[str, ...],
) -> tuple[TaskSource, Mapping[str, HarborTask]]:
    folders = find_tasks(path, dataset=dataset)
    if unbuilt:
        folders = replace(
            folders,
            tasks=tuple(task for task in folders.tasks if task.id not in unbuilt),
            problems=(*folders.problems, *_unbuilt[path].items()),
        )
    if folders.problems and not skip_broken:
        raise _collected(folders)
    if not folders.tasks:
        raise NothingToDoError(
            f"{path} has no task that can be used", hints=_reasons(folders.problems)
        )
    if heldout is not None and not 0 <= heldout < 1:
        raise UsageError(f"heldout = {heldout!r}: it is a share, from 0 to below 1")
    by_id = {task.id: task for task in folders.tasks}
    rows = [
        SourceRow(
            where=str(task.folder),
            label=task.id,
            data={
                "name": task.id,
                "digest": task.digest,
                "instruction": task.steps[0].instruction,
            },
        )
        for task in folders.tasks
    ]

    def make_draft(row: SourceRow) -> Draft:
        name = str(row.data["name"])
        return Draft(name, row.data, folders.split_of(by_id[name]))

    share = TEST_SHARE if heldout is None else heldout
    source = RowTasks(
        path,
        rows,
        make_draft,
        heldout=0.0 if folders.splits else share,
        few_rows=FEW_ROWS if heldout is None and not folders.splits else 0,
    )
    num_train, num_test = (source.num_tasks(split) or 0 for split in SPLITS)
    notes = [f"{path}: {num_test:,} of {num_train + num_test:,} tasks are held out"]
    for task in folders.tasks:
        notes += [f"{task.id}: {note}" for note in task.notes]
    notes += [f"left out: {reason}" for reason in _reasons(folders.problems)]
    source.notes = tuple(notes)
    return source, by_id


def task_source(
    path: str | Path,
    *,
    dataset: str | None = None,
    heldout: float | None = None,
    skip_broken: bool = False,
) -> tuple[TaskSource, Mapping[str, HarborTask]]:
    """Return the source of a data set's tasks, and the tasks by their ids.

    Raises:
        DataError: a task cannot be used, unless `skip_broken`; the hints name each and why.
    """
    place = downloaded(str(path)) or Path(path).expanduser()
    changed = [
        file.stat().st_mtime_ns
        for file in (place, place / TASK_FILE, place / SPLIT_FILE)
        if file.exists()
    ]
    unbuilt = tuple(_unbuilt.get(str(path), ())) if skip_broken else ()
    return _source(str(path), dataset, heldout, skip_broken, tuple(changed), unbuilt)


def _collected(folders: TaskFolders) -> DataError:
    num_tasks = len(folders.tasks) + len(folders.problems)
    return DataError(
        f"{len(folders.problems)} of {num_tasks} tasks of {folders.name} cannot be used",
        hints=[
            *_reasons(folders.problems),
            "leave them out with env.kwargs.skip_broken=true" if folders.tasks else None,
        ],
    )


def _reasons(problems: Sequence[tuple[str, GymError]]) -> list[str]:
    lines = [line for _, error in problems for line in (str(error), *error.hints)]
    more = len(lines) - _MOST_SHOWN
    return lines[:_MOST_SHOWN] + ([f"... and {more} more lines"] if more > 0 else [])


# ---- files of a data set -------------------------------------------------------------------------


def _read_json(file: Path, is_right: Callable[[Any], bool], shape: str) -> Any:
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON: {error}") from None
    if not is_right(content):
        raise DataError(f"{file} does not hold {shape}")
    return content


def _read_splits(place: Path) -> dict[str, list[str]]:
    file = place / SPLIT_FILE
    if not file.is_file():
        return {}
    shape = '{"train": [names], "test": [names]}'
    splits: dict[str, list[str]] = _read_json(
        file, lambda content: isinstance(content, dict), shape
    )
    for split, names in splits.items():
        if split not in SPLITS:
            raise DataError(f"{file}: no split {split!r}", hints=choices(split, SPLITS))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DataError(f"{file} does not hold {shape}")
    return splits


def _registered(registry: Path, dataset: str | None) -> Iterator[Path]:
    """Yield the folders of a data set of a registry; those of git repositories are fetched."""
    shape = "a list of data sets: [{name, version, tasks: [{name, git_url, git_commit_id, path}]}]"

    def is_registry(content: Any) -> bool:
        return isinstance(content, list) and all(
            isinstance(entry, dict)
            and isinstance(entry.get("name"), str)
            and isinstance(entry.get("tasks"), list)
            and all(isinstance(task, dict) and "path" in task for task in entry["tasks"])
            for entry in content
        )

    entries = _read_json(registry, is_registry, shape)
    labels = {f"{entry['name']}@{entry.get('version', 'latest')}": entry for entry in entries}
    if dataset is None and len(labels) > 1:
        hints = [f"available: {', '.join(labels)}", "such as env.kwargs.dataset=NAME@VERSION"]
        raise DataError(f"{registry} has {len(labels)} data sets; name one", hints=hints)
    chosen = [
        entry
        for label, entry in labels.items()
        if dataset is None or dataset in (label, entry["name"])
    ]
    if not chosen:
        hints = choices(str(dataset), labels)
        raise DataError(f"{registry} has no data set {dataset!r}", hints=hints)
    for task in chosen[-1]["tasks"]:
        url = task.get("git_url")
        root = checkout(url, task.get("git_commit_id")) if url else registry.parent
        folder = (root / str(task["path"])).resolve()
        if not folder.is_relative_to(root.resolve()):
            raise DataError(f"{registry}: the path {task['path']!r} leads out of its repository")
        yield folder
