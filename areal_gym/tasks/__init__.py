"""The tasks of environments: reading data, making tasks from it, and dividing tasks into splits.

open_rows(data)     the rows of any data: lists, pandas, datasets, files, folders, the hub
TaskSource          the interface that environments use: `draw(rng, split)`, `at(index, split)`
GeneratedTasks      an endless source; a function makes each problem
open_tasks(data, f) a source of the tasks that the function `f` makes from rows
RowTasks            a source that reads all rows at once; tasks are distinct and split by their keys
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
