"""Loggers for tests, and their plugin: a file, one that fails, one that is not installed."""

import json
from collections.abc import Iterable

from areal_gym.plugins import LoggerSpec, hookimpl


class ToFile:
    def __init__(self, indent: int = 0) -> None:
        self._indent = indent

    def open(self, directory, *, name, config, first_step):
        self._file = directory / "rows.jsonl"
        self._write({"open": name, "steps": config["steps"], "first_step": first_step})
        return f"see {self._file}"

    def log(self, step, metrics):
        self._write({"at": step, **metrics})

    def close(self):
        self._write({"closed": True})

    def _write(self, row):
        with self._file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")


class Failing(ToFile):
    def __init__(self, where: str = "log") -> None:
        super().__init__()
        self._where = where

    def open(self, directory, *, name, config, first_step):
        if self._where == "open":
            raise OSError("nobody there\nsecond line")
        return super().open(directory, name=name, config=config, first_step=first_step)

    def log(self, step, metrics):
        if self._where == "log":
            raise OSError("nobody there\nsecond line")
        super().log(step, metrics)


@hookimpl
def register_loggers() -> Iterable[LoggerSpec]:
    yield LoggerSpec(
        id="file", entry_point="tests._support.loggers_plugin:ToFile", summary="a file"
    )
    yield LoggerSpec(
        id="failing", entry_point="tests._support.loggers_plugin:Failing", summary="fails"
    )
    yield LoggerSpec(
        id="absent",
        entry_point="tests._support.loggers_plugin:ToFile",
        summary="needs what is not there",
        requires=("no_such_package",),
        extra="absent",
    )
