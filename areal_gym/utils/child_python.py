"""Starts Python processes that import what this one imports."""

from __future__ import annotations

import os
import sys


def python_argv(*arguments: str) -> list[str]:
    """Return the command of a Python process: `python_argv("-m", "areal_gym", "--help")`.

    Unlike that of `python -c` and `python -m`, its path does not begin with the working directory,
    where a file named `random.py` or `datasets.py` would be taken for the module of that name.
    """
    return [sys.executable, "-P", *arguments]


def import_path() -> dict[str, str]:
    """Return the environment variable with which a child process finds this one's modules."""
    return {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
