"""A database shared by many episodes: a record is copied when an episode first writes to it.

`Tables` is parsed once per process and never changes. A `Database` lays one episode's writes over
it. What the benchmark hashes is the JSON text of all records with sorted keys; two databases over
the same tables are equal in that sense exactly when `changes()` is equal, which costs as much as
was written, not as much as there is.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

Record = dict[str, Any]


def sorted_text(value: Any) -> str:
    """Return the text that is hashed: JSON with sorted keys, dates as `str` writes them."""
    return json.dumps(value, sort_keys=True, default=str)


class Tables:
    """Tables of records by key, never changed.

    Args:
        tables: table name -> key -> record.
        lists: names of tables that are JSON lists, in the order of their keys, not objects.
    """

    def __init__(
        self, tables: Mapping[str, Mapping[str, Record]], *, lists: frozenset[str] = frozenset()
    ) -> None:
        self.tables = tables
        self.lists = lists
        self._texts: dict[tuple[str, str], str] = {}

    def text(self, table: str, key: str) -> str:
        """Return the record's sorted text, computed once."""
        text = self._texts.get((table, key))
        if text is None:
            text = self._texts[table, key] = sorted_text(self.tables[table][key])
        return text

    @cached_property
    def digest(self) -> str:
        """The hash of the tables as they are."""
        return hashlib.sha256(Database(self).text().encode()).hexdigest()


class Database:
    """One episode's view of the tables: reads go through, writes stay here."""

    def __init__(self, base: Tables) -> None:
        self.base = base
        self._own: dict[tuple[str, str], Record] = {}
        self._new: dict[str, list[str]] = {}
        self._hashed: tuple[dict[tuple[str, str], str], str] | None = None

    def find(self, table: str, key: Any) -> Record | None:
        """Return the record for reading only; None if the table does not have it."""
        own = self._own.get((table, key))
        return self.base.tables[table].get(key) if own is None else own

    def require(self, table: str, key: Any, complaint: str) -> Record:
        """Return the record for reading only.

        Raises:
            ValueError: the table does not have it; `complaint` is the message.
        """
        record = self.find(table, key)
        if record is None:
            raise ValueError(complaint)
        return record

    def edit(self, table: str, key: str) -> Record:
        """Return the episode's own copy of the record for writing."""
        own = self._own.get((table, key))
        if own is None:
            own = self._own[table, key] = copy.deepcopy(self.base.tables[table][key])
        return own

    def add(self, table: str, key: str, record: Record) -> None:
        """Add a record, or replace one."""
        if self.find(table, key) is None:
            self._new.setdefault(table, []).append(key)
        self._own[table, key] = record

    def keys(self, table: str) -> Iterator[str]:
        """Yield the base's keys in their order, then the new ones."""
        yield from self.base.tables[table]
        yield from self._new.get(table, ())

    def records(self, table: str) -> Iterator[Record]:
        """Yield all records for reading only, in the order of `keys`."""
        base = self.base.tables[table]
        own = self._own
        if not own:
            yield from base.values()
            return
        for key in self.keys(table):
            yield own.get((table, key)) or base[key]

    def changes(self) -> dict[tuple[str, str], str]:
        """Return the sorted texts of the records that differ from the base."""
        changed = {}
        for (table, key), record in self._own.items():
            text = sorted_text(record)
            if key not in self.base.tables[table] or text != self.base.text(table, key):
                changed[table, key] = text
        return changed

    def text(self) -> str:
        """Return the whole database's sorted text."""
        changed = self.changes()
        return "{" + ", ".join(self._table_text(t, changed) for t in sorted(self.base.tables)) + "}"

    def digest(self) -> str:
        """Return the SHA-256 of `text`: the benchmark's hash of the database."""
        changed = self.changes()
        if not changed:
            return self.base.digest
        if self._hashed is None or self._hashed[0] != changed:
            self._hashed = changed, hashlib.sha256(self.text().encode()).hexdigest()
        return self._hashed[1]

    def _table_text(self, table: str, changed: Mapping[tuple[str, str], str]) -> str:
        is_list = table in self.base.lists
        keys = list(self.keys(table)) if is_list else sorted(self.keys(table))
        texts = [changed.get((table, key)) or self.base.text(table, key) for key in keys]
        if is_list:
            return f"{json.dumps(table)}: [{', '.join(texts)}]"
        rows = [f"{json.dumps(key)}: {text}" for key, text in zip(keys, texts, strict=True)]
        return f"{json.dumps(table)}: {{{', '.join(rows)}}}"
