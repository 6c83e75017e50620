"""The tags and the note that users add to a run, and the trash for deleted runs.

RUN/notes.json            {"tags": ["baseline"], "note": "learning rate too high"}
PARENT/.trash/RUN-TIME/   a deleted run with all its files; moving it back restores it
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from areal_gym.errors import DataError, InfrastructureError, UsageError
from areal_gym.run_dir.run_files import RunFiles
from areal_gym.run_dir.run_status import DirectoryLock
from areal_gym.utils.files import read_json, readable_disk_errors, to_json, write_atomic

TRASH = ".trash"
MAX_TAGS = 32
MAX_TAG_CHARS = 64
MAX_NOTE_CHARS = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNotes:
    """The tags and the note of a run."""

    tags: Sequence[str] = ()
    note: str = ""

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Self:
        """Make notes from a request or a file; raise DataError if a value is not valid."""
        tags, note = row.get("tags", []), row.get("note", "")
        if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
            raise DataError('tags are a list of texts, such as {"tags": ["baseline"]}')
        if not isinstance(note, str):
            raise DataError(f"a note is a text, not a {type(note).__name__}")
        tags = list(dict.fromkeys(" ".join(tag.split()) for tag in tags if tag.strip()))
        if len(tags) > MAX_TAGS or any(len(tag) > MAX_TAG_CHARS for tag in tags):
            raise DataError(f"at most {MAX_TAGS} tags of {MAX_TAG_CHARS} characters are kept")
        if len(note) > MAX_NOTE_CHARS:
            raise DataError(f"a note has at most {MAX_NOTE_CHARS:,} characters, not {len(note):,}")
        return cls(tags=tags, note=note)

    @classmethod
    def read(cls, run: RunFiles) -> Self:
        """Read the notes of a run, which may be empty; raise DataError for a damaged file."""
        try:
            return cls.from_dict(read_json(run.notes_file))
        except FileNotFoundError:
            return cls()

    def save(self, run: RunFiles) -> None:
        """Write the notes to the run's directory; delete the file if they are empty."""
        with readable_disk_errors(run.path):
            if not self.tags and not self.note:
                run.notes_file.unlink(missing_ok=True)
            else:
                write_atomic(run.notes_file, to_json(asdict(self), indent=2) + "\n")


def move_to_trash(run: RunFiles) -> Path:
    """Move a run to the `.trash` folder beside it, and return its new path.

    Raises:
        UsageError: the run is running.
        InfrastructureError: a process is writing to it, or the directory cannot be moved.
    """
    if run.status == "running":
        raise UsageError(
            f"{run.path.name} is running, and is not deleted",
            hints=["stop it first: Ctrl-C in its terminal"],
        )
    with contextlib.ExitStack() as stack:
        lock = DirectoryLock(run.path)  # a run that is being moved cannot be resumed
        stack.callback(lock.release)
        try:
            trash = run.path.parent / TRASH
            trash.mkdir(exist_ok=True)
            stem = f"{run.path.name}-{time.strftime('%Y%m%d-%H%M%S')}"
            names = (stem, *(f"{stem}-{n}" for n in range(2, 1000)))
            moved = next(trash / name for name in names if not os.path.lexists(trash / name))
            run.path.rename(moved)
        except OSError as error:
            raise InfrastructureError(
                f"{run.path} cannot be moved to {run.path.parent / TRASH}: {error.strerror}",
                hints=["delete it yourself: rm -r DIRECTORY"],
            ) from error
    return moved
