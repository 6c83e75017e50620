"""Sources of tasks, the benchmark's files or the built-in generator, and of the tools' texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from areal_gym.envs.tau2.benchmark_data import DOMAINS, Case, Domain, find_data, load_domain
from areal_gym.envs.tau2.domain_state import ToolInfo, Tools, load_tools
from areal_gym.envs.tau2.mock import library_domain, library_tasks
from areal_gym.envs.tau2.simulation import is_solved_by_inaction
from areal_gym.errors import DataError, UsageError, choices
from areal_gym.tasks import asked_for, choose_task
from areal_gym.types import Task


class Benchmark:
    """Tasks from the benchmark's files."""

    def __init__(self, domain: Domain) -> None:
        self.version = domain.version
        """The version of the tasks; it changes when scores stop being comparable."""
        self.tools = domain.tools
        self._domain = domain
        self._tasks: dict[tuple[str, str], Task] = {}

    def num_tasks(self, split: str) -> int | None:
        """Return the number of tasks in the split."""
        return len(self._domain.splits[asked_for({"split": split}, self._domain.splits)[0]])

    def sample(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Return the task that `options` names by `split` and `index`, or a random one."""
        split, index = asked_for(options, self._domain.splits)
        ids = self._domain.splits[split]
        if index is None:
            index = int(rng.integers(len(ids)))
        if index >= len(ids):
            raise UsageError(f"split {split!r} of tau2/{self._domain.name} has {len(ids)} tasks")
        return self._task(ids[index], split)

    def case_of(self, task: Task) -> tuple[Domain, Case]:
        """Return the domain's data and the task; raise DataError if it is of another version."""
        case = self._domain.cases.get(str(task.data.get("task_id")))
        if case is None or task.data.get("version") != self._domain.version:
            available = f"tau2/{self._domain.name} {self._domain.version}"
            hint = "the data here is of another version than the task"
            raise DataError(f"task {task.id!r} is not one of {available}", hints=[hint])
        return self._domain, case

    def _task(self, task_id: str, split: str) -> Task:
        if (task_id, split) not in self._tasks:
            domain = self._domain
            data = {
                **{"domain": domain.name, "version": domain.version, "task_id": task_id},
                "solved_by_inaction": is_solved_by_inaction(domain, domain.cases[task_id]),
            }
            task = Task(id=f"{domain.name}@{domain.version}/{task_id}", data=data, split=split)
            self._tasks[task_id, split] = task
        return self._tasks[task_id, split]


class Library:
    """Generated tasks of the built-in domain, with the methods of `Benchmark`."""

    version = "1"

    def __init__(self) -> None:
        self.tools = load_tools("mock")

    def num_tasks(self, split: str) -> int | None:
        """Return None: the tasks are generated."""
        return library_tasks().num_tasks(split)

    def sample(self, rng: np.random.Generator, options: Mapping[str, Any]) -> Task:
        """Return the task that `options` names by `split` and `index`, or a random one."""
        return choose_task(library_tasks(), rng, options)

    def case_of(self, task: Task) -> tuple[Domain, Case]:
        """Return the task as a domain of its own with one case."""
        return library_domain(task.data)


@cache
def _shared_benchmark(domain: str, folder: Path, texts: Path | None) -> Benchmark:
    loaded = load_domain(domain, folder)
    return Benchmark(replace(loaded, tools=read_tools(texts, domain)) if texts else loaded)


def source_of(
    domain: str, data_dir: str | None = None, tool_texts: str | None = None
) -> Benchmark | Library:
    """Return the tasks of a domain; all environments share those of the benchmark.

    Another domain, or texts for the library's tools, are a UsageError; missing data is a DataError.
    """
    if domain == "mock":
        if tool_texts:
            message = "tau2/mock takes no tool_texts: its tools are not the benchmark's"
            raise UsageError(message, hints=[f"those of these are: {', '.join(DOMAINS)}"])
        return Library()
    if domain not in DOMAINS:
        raise UsageError(f"no tau2 domain {domain!r}", hints=choices(domain, ("mock", *DOMAINS)))
    data = find_data(data_dir)
    return _shared_benchmark(domain, data, find_tool_texts(tool_texts, data))


# ---- descriptions of the tools from a file -------------------------------------------------------

# For runs with the benchmark's exact prompt. A file changes descriptions only: what the tools are
# called and what they take is compared.
_WAYS = (
    "it should hold, as JSON: domain -> assistant, user -> tool -> openai_schema",
    "with neither tool_texts=FILE nor tau2/tool_schemas.json in the data, our own words are used",
)


def find_tool_texts(given: str | None, data: Path) -> Path | None:
    """Return the given file, else `tau2/tool_schemas.json` of the data, else None."""
    if given:
        return Path(given).expanduser().resolve()
    file = data / "tau2" / "tool_schemas.json"
    return file if file.exists() else None


@cache
def read_tools(file: Path, domain: str) -> Tools:
    """Return the domain's tools, described by a file; other differences are a DataError."""
    try:
        rows = json.loads(file.read_bytes())[domain]
        return {
            side: {
                name: _described(info, rows[side][name]["openai_schema"])
                for name, info in tools.items()
            }
            for side, tools in load_tools(domain).items()
        }
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}", hints=_WAYS) from None
    except (KeyError, TypeError) as error:
        raise DataError(f"{file} lacks something of tau2/{domain}: {error}", hints=_WAYS) from None
    except ValueError as error:  # also JSONDecodeError, UnicodeDecodeError
        raise DataError(f"{file}: {error}", hints=_WAYS) from None


def without_descriptions(schema: Any) -> Any:
    """Return a JSON schema without the descriptions for its reader."""
    if isinstance(schema, dict):
        return {
            key: without_descriptions(value)
            for key, value in schema.items()
            if not (key == "description" and isinstance(value, str))
        }
    return [without_descriptions(value) for value in schema] if isinstance(schema, list) else schema


def _described(info: ToolInfo, schema: dict[str, Any]) -> ToolInfo:
    name = info.tool.name
    if without_descriptions(schema) != without_descriptions(info.schema):
        raise ValueError(f"its {name!r} takes other arguments than ours")
    return ToolInfo.of(schema, info.kind, info.mutates)
