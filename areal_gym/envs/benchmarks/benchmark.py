"""A known benchmark, and where its data lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_gym.envs.questions import DATA_DIR_VARIABLE
from areal_gym.errors import DataError
from areal_gym.utils.cache import cache_directory

_SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One file of a benchmark: its place, and where `areal-gym data pull` gets it from."""

    place: str
    """Below the directory of data, with its suffix: `gsm8k/test.jsonl`."""
    url: str = ""
    """A pinned version; "" for a data set on the hub."""
    num_bytes: int = 0
    sha256: str = ""
    hub: str = ""
    """A data set on the Hugging Face hub: its newest version, which `data pull` writes down."""
    subset: str | None = None
    split: str = "train"

    @property
    def source(self) -> str:
        """The place that it comes from, for people."""
        if self.url:
            return self.url
        return f"hub: {self.hub}{f':{self.subset}' if self.subset else ''}, split {self.split}"

    def find(self, benchmark: str) -> Path:
        """Return the file: below AREAL_GYM_DATA, or where `data pull` has put it.

        Raises:
            DataError: it is in neither place.
        """
        stem = self.place.partition(".")[0]
        given = os.environ.get(DATA_DIR_VARIABLE)
        folders = [Path(given)] if given else []
        folders.append(pulled_benchmarks())
        for folder in folders:
            for suffix in _SUFFIXES:
                if (file := folder / (stem + suffix)).is_file():
                    return file
        raise DataError(
            f"the data of the benchmark {benchmark!r} are not here",
            hints=[
                f"get them: areal-gym data pull {benchmark}",
                f"or say where {self.place} lies: export {DATA_DIR_VARIABLE}=DIR",
            ],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A known benchmark: its data, how it is asked, sampled and graded, and what that means."""

    id: str
    env: str
    """The id of the environment that asks and grades."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    data: DataFile | None = None
    """None: the environment finds its data itself."""
    split: str = "test"
    num_tasks: int
    is_greedy: bool = False
    """One sample at temperature 0."""
    num_samples: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int
    """Per turn."""
    max_context: int
    prompt: str
    """How it is asked, for people."""
    grader: str
    compares_with: str
    """Which published numbers it may be compared with, and what differs."""
    licence: str
    tested: str
    """What has been run with the real data; "untested here" where nothing has."""

    def settings(self) -> dict[str, Any]:
        """Return the settings of an evaluation, by dotted key.

        Raises:
            DataError: its data are not here.
        """
        kwargs = dict(self.env_kwargs)
        if self.data is not None:
            # Both splits are the same file: its rows are held out, and none is left to train on.
            file = str(self.data.find(self.id))
            kwargs["tasks"] = {"data": file, "test": file, **kwargs.get("tasks", {})}
        settings: dict[str, Any] = {
            "env.id": self.env,
            "env.kwargs": kwargs,
            "eval.split": self.split,
            "eval.num_tasks": self.num_tasks,
            "rollout.max_new_tokens": self.max_new_tokens,
            "engine.max_context": self.max_context,
        }
        if not self.is_greedy:
            settings |= {
                "eval.num_samples": self.num_samples,
                "rollout.temperature": self.temperature,
                "rollout.top_p": self.top_p,
            }
        return settings

    @property
    def sampling(self) -> str:
        """The sampling, for people."""
        if self.is_greedy:
            how = "greedy"
        else:
            how = f"{self.num_samples} x temperature {self.temperature:g}, top_p {self.top_p:g}"
        return f"{how}, {self.max_new_tokens:,} tokens"


def pulled_benchmarks() -> Path:
    """Return the directory into which `areal-gym data pull` downloads benchmarks."""
    return cache_directory() / "data" / "benchmarks"
