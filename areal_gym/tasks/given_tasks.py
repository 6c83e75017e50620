"""Make the task source of an environment from its argument `tasks=`: data, or a source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from areal_gym.errors import DataError, UsageError, choices
from areal_gym.tasks.base import TEST_SHARE, Draft, TaskSource
from areal_gym.tasks.large_row_tasks import LargeRowTasks
from areal_gym.tasks.opening import describe, open_splits
from areal_gym.tasks.row_checks import row_filter
from areal_gym.tasks.row_tasks import RowTasks
from areal_gym.tasks.rows import Rows, SelectedRows, SourceRow

P = ParamSpec("P")
T = TypeVar("T")

SETTINGS = ("data", "test", "fields", "where", "skip_broken", "heldout")
MOST_IN_MEMORY = 50_000
"""Up to this number of rows, all are read and checked when they are opened, see `RowTasks`."""
FEW_ROWS = 20
"""With fewer rows nothing is held out, because one or two tasks measure nothing."""

MakeDraft = Callable[[SourceRow], Draft]


def open_tasks(given: Any, make_draft: MakeDraft) -> TaskSource:
    """Return the task source for the argument `tasks=` of an environment.

    `given` is a TaskSource; or data in any form that `open_rows` accepts; or a mapping of settings:

        data         the rows; if they have several splits, `test` (or `validation`) is held out
        test         held-out rows
        fields       columns by field, if their names differ: {"question": "problem"}
        where        conditions that rows must fulfil: {"level": {"max": 3}}
        skip_broken  whether to leave out rows of which no task can be made
        heldout      the share that is held out if there is no test split [0.1]; 0 trains on all

    The source's `notes` describe what was held out.
    """
    if is_source(given):
        return cast(TaskSource, given)
    settings = _settings(given)
    locations = [settings["data"], settings.get("test")]
    if not all(isinstance(location, str | Path | None) for location in locations):
        return _opened(make_draft, **settings)
    return _opened_once(make_draft, tuple(map(_state, locations)), **settings)


def is_source(given: Any) -> bool:
    """Return whether the object is a task source."""
    return all(callable(getattr(given, name, None)) for name in ("draw", "at", "num_tasks"))


def _settings(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping) or "data" not in given:
        names = given if isinstance(given, Mapping) and "train" not in given else ()
        wrong = [name for name in names if name in SETTINGS]
        if wrong:
            raise UsageError(
                f"tasks has {wrong[0]!r}, but no data",
                hints=['such as {"data": "questions.jsonl", "where": {"level": 1}}'],
            )
        return {"data": given}
    for name in given:
        if name not in SETTINGS:
            raise UsageError(f"tasks has no setting {name!r}", hints=choices(name, SETTINGS))
    return dict(given)


def read_once(function: Callable[P, T]) -> Callable[P, T]:
    """Cache the function's results, so the many environments of a run read their data only once."""
    # The arguments are stored, too, so that no other object gets the address in a key's repr.
    memory: dict[str, tuple[object, T]] = {}

    @wraps(function)
    def remembered(*args: P.args, **kwargs: P.kwargs) -> T:
        key = repr((args, kwargs))
        if key not in memory:
            memory[key] = (args, kwargs), function(*args, **kwargs)
        return memory[key][1]

    return remembered


def _opened(
    make_draft: MakeDraft,
    *,
    data: Any,
    test: Any = None,
    fields: Mapping[str, str] | None = None,
    where: Mapping[str, Any] | None = None,
    skip_broken: bool = False,
    heldout: float | None = None,
) -> TaskSource:
    if heldout is not None and not (isinstance(heldout, int | float) and 0 <= heldout < 1):
        raise UsageError(f"heldout = {heldout!r}: it is a share, from 0 to below 1")
    if fields:
        make_draft = _renamed(make_draft, dict(fields))
    name = describe(data)
    train, held_out = _splits(data, test)
    if held_out is not None and heldout:
        raise UsageError("heldout and a test split: give one of them")
    is_selected = row_filter(where)
    num_rows = len(train) + (0 if held_out is None else len(held_out))
    share = TEST_SHARE if heldout is None else float(heldout)
    if num_rows > MOST_IN_MEMORY:
        if where:
            train = _selected(train, is_selected)
            held_out = None if held_out is None else _selected(held_out, is_selected)
        source: Any = LargeRowTasks(
            name, train, make_draft, test=held_out, heldout=share, skip_broken=skip_broken
        )
    else:
        source = RowTasks(
            name,
            train,
            make_draft,
            test=held_out,
            skip_broken=skip_broken,
            is_meant=is_selected,
            heldout=share,
            few_rows=FEW_ROWS if heldout is None else 0,
        )
    source.notes = _notes(source, name, held_out is not None, share)
    return cast(TaskSource, source)


@read_once
def _opened_once(make_draft: MakeDraft, states: object, **settings: Any) -> TaskSource:
    return _opened(make_draft, **settings)


def _state(location: str | Path | None) -> tuple[int, int] | None:
    """Return the size and the modification time of a file, which change when it is replaced."""
    try:
        state = Path(location or "").expanduser().stat()
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns


def _splits(data: Any, test: Any) -> tuple[Rows, Rows | None]:
    """Return the training rows, and the held-out rows if the data has them."""
    splits = open_splits(data)
    train = splits.get("train")
    held_out = splits.get("test", splits.get("validation"))
    if test is not None:
        tests = open_splits(test)
        held_out = tests.get("test", next(iter(tests.values())))
    if train is None and held_out is None:
        raise DataError(
            f"{describe(data)} has no split train or test, but {', '.join(splits)}",
            hints=[f"name one: {data}:{next(iter(splits))}" if isinstance(data, str) else None],
        )
    if train is None:
        # The data has only a test split, for evaluation.
        assert held_out is not None
        train = SelectedRows(held_out, np.zeros(0, np.int64))
    return train, held_out


def _selected(rows: Rows, is_selected: Callable[[SourceRow], bool]) -> Rows:
    chosen = [index for index, row in enumerate(rows) if is_selected(row)]
    return SelectedRows(rows, np.array(chosen, np.int64))


def _renamed(make_draft: MakeDraft, fields: dict[str, str]) -> MakeDraft:
    def renamed(row: SourceRow) -> Draft:
        data = dict(row.data)
        for name, column in fields.items():
            if column not in data:
                raise DataError(
                    f"{row.where}: no field {column!r}, which is to be read as {name!r}",
                    hints=choices(column, data),
                )
            data[name] = row.data[column]
        return make_draft(row._replace(data=data))

    return renamed


def _notes(source: TaskSource, name: str, has_test: bool, share: float) -> tuple[str, ...]:
    num_train, num_test = (source.num_tasks(split) or 0 for split in ("train", "test"))
    if has_test or (num_test and share == 0):
        return ()
    if num_test:
        return (
            f"{name}: {num_test:,} of {num_train + num_test:,} rows are held out for evaluation "
            "(choose them yourself with a test split)",
        )
    return (f"{name}: {num_train:,} rows, and none is held out: all are trained on",)
