"""Tasks beside the environment: where they come from, which split they are in, who draws them.

open_rows(data)     rows of anything: lists, pandas, datasets, files, folders, the hub
TaskSource          what an environment is given: `draw(rng, split)`, `at(index, split)`
GeneratedTasks      an endless source: a function that makes one problem
open_tasks(data, f) the same as a source: `f` makes a task of a row
RowTasks            rows that are read whole: distinct, split by their keys
"""

from areal_gym.tasks.base import (
    Draft,
    GeneratedTasks,
    SeedTasks,
    TaskSource,
    asked_for,
    choose_task,
    given_task,
    split_of,
)
from areal_gym.tasks.given_tasks import open_tasks
from areal_gym.tasks.opening import open_rows, open_splits
from areal_gym.tasks.row_tasks import RowTasks, key_of_text, question_of
from areal_gym.tasks.rows import Rows, SourceRow

__all__ = [
    "Draft",
    "GeneratedTasks",
    "RowTasks",
    "Rows",
    "SeedTasks",
    "SourceRow",
    "TaskSource",
    "asked_for",
    "choose_task",
    "given_task",
    "key_of_text",
    "open_rows",
    "open_splits",
    "open_tasks",
    "question_of",
    "split_of",
]
