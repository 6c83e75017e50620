"""Keeps each group's state on disk, so that a killed run loses no group and trains none twice.

    issued -> scored -> taken          handed to the trainer; trained once a checkpoint holds it
       |         +----> dropped        too old
       +--------------> dropped        failed, or rejected by a filter

Each change is one line in `journal.jsonl`, written at once, so that it survives a killed process.
Only complete groups are written with their trajectories, so the cost does not grow with turns or
history.

A checkpoint says which groups are settled: trained or dropped (`RolloutRunner.state()`). A resumed
run looks up all others here. Complete groups are trained on as they are, even if an update that was
lost had used them; unfinished groups are played again; dropped groups stay dropped. Once a
checkpoint is saved, `Journal.checkpoint` deletes the lines of settled groups.

Lines are not synced to disk one by one: a power cut may lose the newest ones, and their groups are
played again. The same holds for lines that a `BackgroundJournal` has not written when its process
is killed.
"""

from __future__ import annotations

import errno
import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from areal_gym.errors import TrainError
from areal_gym.rollout.group_json import dump_row, pack_group, unpack_group
from areal_gym.types import Group
from areal_gym.utils.background_writer import BackgroundWriter
from areal_gym.utils.files import MOST_BYTES, append_bytes, readable_disk_errors


@dataclass(slots=True)
class KnownGroup:
    """The journal's record of one group."""

    options: Mapping[str, Any]
    """The options that its task was drawn with."""
    group: Group | None = None
    """Its trajectories, if it is complete and was not dropped."""
    dropped: str | None = None
    """The reason why it was dropped."""
    rewards_G: Sequence[float] | None = None
    """The rewards of its members, if known."""


class Journal:
    """An append-only file of the states of groups, with one writer; also a context manager.

    Args:
        file: `journal.jsonl` of a run directory; created if missing. A line that a killed process
            has left incomplete, and everything after it, is moved to `journal.jsonl.torn`.

    Raises:
        TrainError: the disk is full or not writable. All methods that write raise it, too.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lines: dict[int, list[tuple[int, int]]] = {}
        """The lines of each group: (offset, length)."""
        self._known: dict[int, KnownGroup] = {}
        with readable_disk_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            self._descriptor = os.open(file, flags, 0o644)
        self._size = 0
        self._read()
        self.num_torn = os.fstat(self._descriptor).st_size - self._size
        """Bytes that were cut off."""
        if self.num_torn:
            torn = os.pread(self._descriptor, MOST_BYTES, self._size)
            append_bytes(file.with_name(f"{file.name}.torn"), torn)
            os.ftruncate(self._descriptor, self._size)

    def take_known(self) -> dict[int, KnownGroup]:
        """Return the groups that the file held when it was opened, by number; only once."""
        known, self._known = self._known, {}
        return known

    # ---- for the runner ----------------------------------------------------------------

    def issued(self, index: int, options: Mapping[str, Any]) -> None:
        """Record that a group has started."""
        self._record(index, {"event": "issued", "group": index, "options": options})

    def scored(self, index: int, group: Group) -> None:
        """Record that a group is complete and waits to be trained on."""
        self._record(index, {"event": "scored", "group": index, "packed": pack_group(group)})

    def dropped(self, index: int, reason: str, rewards_G: Sequence[float] | None = None) -> None:
        """Record that a group will never be trained on."""
        row = {"event": "dropped", "group": index, "reason": reason, "rewards": rewards_G}
        # Its trajectories are not needed any more, so the first of its lines is enough.
        self._lines[index] = self._lines.get(index, [])[:1]
        self._record(index, row)

    def taken(self, indices: Iterable[int], step: int) -> None:
        """Record that groups were handed to the trainer for this step."""
        self._record(None, {"event": "taken", "step": step, "groups": list(indices)})

    # ---- for the trainer --------------------------------------------------------------

    def checkpoint(self, state: Mapping[str, Any]) -> None:
        """Delete the lines of groups that are settled by a saved `RolloutRunner.state()`."""
        unfinished = set(state["unfinished"])
        temporary = self.file.with_name(f".{self.file.name}.{os.getpid()}.tmp")
        with readable_disk_errors(self.file):
            temporary.unlink(missing_ok=True)
            new = Journal(temporary)
            new.file = self.file  # the path that errors name
            try:
                for index in sorted(self._lines):
                    if index >= state["next_group"] or index in unfinished:
                        for offset, length in self._lines[index]:
                            new._append(index, os.pread(self._descriptor, length, offset))
                os.fsync(new._descriptor)
                os.replace(temporary, self.file)
            except BaseException:
                new.close()
                temporary.unlink(missing_ok=True)
                raise
        os.close(self._descriptor)
        self._descriptor, self._lines, self._size = new._descriptor, new._lines, new._size

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---- inside -------------------------------------------------------------------------------

    def _record(self, index: int | None, row: Mapping[str, Any]) -> None:
        self._append(index, dump_row(row) + b"\n")

    def _append(self, index: int | None, line: bytes) -> None:
        try:
            with readable_disk_errors(self.file):
                if os.write(self._descriptor, line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except TrainError:
            os.ftruncate(self._descriptor, self._size)  # else the next line would follow half a one
            raise
        if index is not None:
            self._lines.setdefault(index, []).append((self._size, len(line)))
        self._size += len(line)

    def _read(self) -> None:
        with open(self._descriptor, "rb", closefd=False) as stream:
            for line in stream:
                try:
                    self._learn(json.loads(line) if line.endswith(b"\n") else None, len(line))
                # A machine that crashed may leave anything; the directory may be untrusted.
                except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                    return
                self._size += len(line)

    def _learn(self, row: Any, length: int) -> None:
        if row["event"] == "taken":
            return
        index = operator.index(row["group"])
        known = self._known.get(index, KnownGroup({}))
        if row["event"] == "issued":
            known = KnownGroup(row["options"])
        elif row["event"] == "scored":
            known.group = unpack_group(row["packed"])
            known.rewards_G = known.group.rewards_G
        elif row["event"] == "dropped":
            known.group, known.dropped = None, row["reason"]
            known.rewards_G = row["rewards"]
        self._known[index] = known
        self._lines.setdefault(index, []).append((self._size, length))


class BackgroundJournal(Journal):
    """A journal whose lines a thread writes, in order, so that the event loop never waits for disk.

    Raises:
        TrainError: an earlier line could not be written. All methods that write raise it.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        self._writer = BackgroundWriter("journal")

    def issued(self, index: int, options: Mapping[str, Any]) -> None:
        """Record that a group has started."""
        self._writer.start(partial(super().issued, index, options))

    def scored(self, index: int, group: Group) -> None:
        """Record that a group is complete and waits to be trained on."""
        self._writer.start(partial(super().scored, index, group))

    def dropped(self, index: int, reason: str, rewards_G: Sequence[float] | None = None) -> None:
        """Record that a group will never be trained on."""
        self._writer.start(partial(super().dropped, index, reason, rewards_G))

    def taken(self, indices: Iterable[int], step: int) -> None:
        """Record that groups were handed to the trainer for this step."""
        self._writer.start(partial(super().taken, list(indices), step))

    def checkpoint(self, state: Mapping[str, Any]) -> None:
        """Delete the lines of groups that are settled by a saved `RolloutRunner.state()`."""
        self._writer.start(partial(super().checkpoint, state))

    def finish(self) -> None:
        """Block until every line is written."""
        self._writer.finish()

    def close(self) -> None:
        """Close the file after every line is written. Idempotent."""
        self._writer.close()
        super().close()
