"""Copies installed packages, with what they require, into the folder of an image."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from areal_gym.places.host_root import distribution_files, find_distributions


def copy_packages(name: str, target: Path, *, paths: Sequence[str]) -> None:
    """Copy a distribution of the folders `paths`; SandboxError if none of them has it."""
    for metadata in find_distributions([name], paths):
        for source, inside in distribution_files(metadata):
            (target / inside).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / inside)  # with its time, which compiled files name
