"""The list of runs as a page asks for it again and again: only the cards that changed are sent.

A card is read again only when the size or the time of a file that it shows has changed. What was
not read yet is sent as a stub (name and time), so that thousands of runs are there at once and
are filled in by the next answers.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from areal_gym.viewer.catalog import Catalog, Run

_MAX_GONE = 10_000
_LOOK_AGAIN_S = 1.0
"""While runs are unread, how old the list of directories may be: it takes as long as 200 cards."""


@dataclass(slots=True)
class _Entry:
    run: Run
    stamp: object
    card: dict[str, Any]
    number: int
    """The change at which the card became what it is."""
    is_read: bool = False


class RunListing:
    """Numbers the changes of all cards, and returns those after a cursor. Several threads may ask.

    `card` reads the card of a run; it must not raise. One answer reads runs for `budget_s` of CPU
    time, and at least one: a page shows the newest ones after the first answer.
    """

    def __init__(
        self, catalog: Catalog, card: Callable[[Run], dict[str, Any]], *, budget_s: float = 0.2
    ) -> None:
        self._catalog, self._card, self._budget_s = catalog, card, budget_s
        self._entries: dict[Path, _Entry] = {}
        self._gone: list[tuple[int, str]] = []
        self._number = 0
        self._epoch = secrets.token_hex(4)
        """Distinguishes this server's cursors from those of an earlier one."""
        self._oldest = 0
        """Cursors before this one know of runs whose end has been forgotten."""
        self._runs: list[Run] = []
        self._looked_s = -math.inf
        self._num_unread = 0
        self._lock = Lock()

    def changes(self, cursor: str = "") -> dict[str, Any]:
        """Return what has changed since `cursor`, which an earlier answer gave.

        `cards` are new or changed; a stub has `is_stub`. `gone` are the names of runs that are no
        longer there. `is_whole` says that the page must forget what it has: the cursor is of
        another server, or none. `num_unread` stubs are left for the next answers.
        """
        with self._lock:
            now_s = time.monotonic()
            if not self._num_unread or now_s - self._looked_s > _LOOK_AGAIN_S:
                self._runs, self._looked_s = self._catalog.runs(), now_s
                self._note_changes(self._runs)
            unread = [entry for entry in self._entries.values() if not entry.is_read]
            unread.sort(key=lambda entry: entry.run.changed_s, reverse=True)
            self._num_unread = len(unread) - self._read(unread)
            epoch, _, digits = cursor.partition("-")
            known = int(digits) if digits.isdecimal() and len(digits) < 16 else 0
            is_whole = epoch != self._epoch or known < self._oldest
            known = 0 if is_whole else known
            names = {run.name for run in self._runs}
            return {
                "cursor": f"{self._epoch}-{self._number}",
                "is_whole": is_whole,
                "cards": [e.card for e in self._entries.values() if e.number > known],
                "gone": sorted({name for n, name in self._gone if n > known} - names),
                "num_unread": self._num_unread,
            }

    def _note_changes(self, runs: list[Run]) -> None:
        paths = {run.path for run in runs}
        for path in [path for path in self._entries if path not in paths]:
            self._forget(self._entries.pop(path).card)
        for run in runs:
            stamp, entry = (run.name, run.stamp()), self._entries.get(run.path)
            if entry is None:
                self._number += 1
                stub = {**Run.EMPTY_CARD, "name": run.name, "is_stub": True}
                stub["is_evaluation"] = run.is_evaluation
                stub["changed_s"] = run.changed_s
                self._entries[run.path] = _Entry(run, stamp, stub, self._number)
            elif entry.stamp != stamp:
                if entry.card["name"] != run.name:
                    self._forget(entry.card)
                entry.stamp, entry.is_read = stamp, False

    def _read(self, unread: list[_Entry]) -> int:
        start_s = time.thread_time()
        for place, entry in enumerate(unread):
            if place and time.thread_time() - start_s > self._budget_s:
                return place
            card = self._card(entry.run)
            entry.is_read = True
            if card != entry.card:
                self._number += 1
                entry.card, entry.number = card, self._number
        return len(unread)

    def _forget(self, card: dict[str, Any]) -> None:
        self._number += 1
        self._gone.append((self._number, card["name"]))
        if len(self._gone) > _MAX_GONE:
            self._oldest = self._gone.pop(0)[0]
