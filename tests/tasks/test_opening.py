"""`open_rows`: every form of data, and what is said about each kind of broken data."""

import csv
import gzip
import json
import threading

import datasets
import numpy as np
import pandas
import pytest

from areal_gym.errors import DataError, GymError, NothingToDoError, UsageError
from areal_gym.tasks import Rows, line_files, open_rows, open_splits, rows, tables

ROWS = [{"prompt": f"What is {n}+{n}?", "answer": str(2 * n)} for n in range(7)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def csv_text(delimiter=",", **kwargs):
    lines = [f"prompt{delimiter}answer", *(delimiter.join(row.values()) for row in ROWS)]
    return "\n".join(lines) + "\n"


def as_file(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


FORMS = {
    "list": lambda _: ROWS,
    "tuple": lambda _: tuple(ROWS),
    "generator": lambda _: (dict(row) for row in ROWS),
    "map": lambda _: map(dict, ROWS),
    "pandas": lambda _: pandas.DataFrame(ROWS),
    "dataset": lambda _: datasets.Dataset.from_list(ROWS),
    "dataset dict": lambda _: datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)),
    "arrow": lambda _: datasets.Dataset.from_list(ROWS).data.table,
    "splits": lambda _: {"train": ROWS, "test": ROWS[:1]},
    "q.jsonl": lambda folder: as_file(folder / "q.jsonl", LINES),
    "text path": lambda folder: str(as_file(folder / "q.jsonl", LINES)),
    "no last line break": lambda folder: as_file(folder / "q.jsonl", LINES.rstrip()),
    "Windows": lambda folder: as_file(folder / "q.jsonl", "\ufeff" + LINES.replace("\n", "\r\n")),
    "blank lines": lambda folder: as_file(folder / "q.jsonl", LINES.replace("\n", "\n\n \t \n")),
    "q.jsonl.gz": lambda folder: as_file(folder / "q.jsonl.gz", gzip.compress(LINES.encode())),
    "q.JSONL": lambda folder: as_file(folder / "q.JSONL", LINES),
    "q.json": lambda folder: as_file(folder / "q.json", json.dumps(ROWS, indent=1)),
    "q.csv": lambda folder: as_file(folder / "q.csv", csv_text()),
    "q.csv.gz": lambda folder: as_file(folder / "q.csv.gz", gzip.compress(csv_text().encode())),
    "q.tsv": lambda folder: as_file(folder / "q.tsv", csv_text("\t")),
    "semicolons": lambda folder: as_file(folder / "q.csv", "\ufeff" + csv_text(";")),
    "blank CSV lines": lambda folder: as_file(
        folder / "q.csv", csv_text().replace("\n", "\r\n\r\n")
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_rows(tmp_path, form):
    opened = open_rows(FORMS[form](tmp_path))
    assert isinstance(opened, Rows)
    assert [dict(row.data) for row in opened] == ROWS
    assert (len(opened), opened.columns) == (7, ("prompt", "answer"))
    assert opened[-1] == opened[6] == list(opened)[6]
    assert len({row.label for row in opened}) == len({row.where for row in opened}) == 7
    with pytest.raises(IndexError):
        opened[7]


@pytest.mark.parametrize("limit", [0, 10**9])
def test_parquet_is_read_from_memory_and_from_a_temporary_file(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(tables, "_MAX_IN_MEMORY", limit)
    monkeypatch.setattr(tables, "_BATCH", 3)
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "q.parquet")
    assert [row.data for row in open_rows(tmp_path / "q.parquet")] == ROWS


def test_folders_have_splits_by_file_name_or_as_saved(tmp_path):
    for name, part in {
        "train-0.jsonl": ROWS[:4],
        "train-1.jsonl": ROWS[4:],
        "test.jsonl": ROWS[:2],
    }.items():
        as_file(tmp_path / name, "".join(json.dumps(row) + "\n" for row in part))
    splits = open_splits(tmp_path)
    assert {name: len(part) for name, part in splits.items()} == {"test": 2, "train": 7}
    assert [row.data for row in open_rows(tmp_path)] == ROWS
    assert open_rows(tmp_path)[4].where == f"{tmp_path}/train-1.jsonl, line 1"
    saved = datasets.DatasetDict(
        train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS[:3])
    )
    saved.save_to_disk(tmp_path / "saved")
    assert [len(part) for part in open_splits(tmp_path / "saved").values()] == [7, 3]
    assert len(open_rows(str(tmp_path / "saved"), split="test")) == 3
    saved["test"].save_to_disk(tmp_path / "one")
    assert len(open_rows(tmp_path / "one")) == 3
    with pytest.raises(DataError, match="no split 'tset'") as caught:
        open_rows(tmp_path, split="tset")
    assert caught.value.hints[0] == "did you mean 'test'?"


def test_missing_values_of_pandas_are_none_and_numbers_are_plain():
    frame = pandas.DataFrame(
        {"n": np.array([1, 2]), "x": [0.5, None], "t": ["a", None], "l": [[1], [2]]}, index=[5, 9]
    )
    data = [dict(row.data) for row in open_rows(frame)]
    assert data == [
        {"n": 1, "x": 0.5, "t": "a", "l": [1]},
        {"n": 2, "x": None, "t": None, "l": [2]},
    ]
    assert type(data[0]["n"]) is int


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("q.jsonl", LINES + "{", "line 8: not JSON"),
        ("q.jsonl", LINES + "\n\n[1]\n", "line 10: a row is an object, not list"),
        ("q.jsonl", LINES.encode() + b'{"prompt": "\xff"}', "line 8: not UTF-8"),
        ("q.jsonl", LINES.encode("utf-16"), "line 1: not UTF-8"),
        ("q.jsonl", b"[" * 100_000, "line 1: nested too deeply"),
        ("q.json", LINES, "not JSON: Extra data"),
        ("q.json", '{"data": []}', "holds one dict; a list of objects is needed"),
        ("q.json", '[{"a": 1}, 2]', "row 2: a row is an object, not int"),
        ("q.csv", "a,b\n1,2\n3\n", "row 2: 1 cells, but 2 columns are named"),
        ("q.csv", "a,b\n1,2,3\n", "row 1: 3 cells, but 2 columns are named"),
        ("q.csv", "a,a\n1,2\n", "column 'a' occurs twice"),
        ("q.csv", "a,\n1,2\n", "a column has no name"),
        ("q.csv", b"a,b\n1,\xff\n", "row 1: not UTF-8"),
        ("q.csv", 'a,b\n1,2\n3,"open\n4,5\n', "row 2: not CSV: unexpected end of data"),
        ("q.parquet", b"PAR1", "cannot read"),
        ("q.jsonl.gz", b"not gzip", "cannot read"),
        ("q.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:-12], "cannot read"),
        ("q.txt", "text", "unknown kind of file"),
    ],
)
def test_broken_files_are_refused_with_row_or_line(tmp_path, name, content, problem):
    path = as_file(tmp_path / name, content)
    with pytest.raises(DataError, match=problem) as caught:
        open_rows(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("q.jsonl", text) for text in ("", "\n \n")),
        *(("q.json", text) for text in ("", "[]")),
        *(("q.csv", text) for text in ("", "a,b\n", "a,b")),
    ],
)
def test_no_rows_are_nothing_to_do(tmp_path, name, content):
    with pytest.raises(NothingToDoError, match="has no rows"):
        open_rows(as_file(tmp_path / name, content))


@pytest.mark.parametrize("data", [[], iter(()), pandas.DataFrame({"a": []})])
def test_empty_objects_are_nothing_to_do(data):
    with pytest.raises(NothingToDoError, match="rows has no rows"):
        open_rows(data)


@pytest.mark.parametrize("data", [5, None, b"rows", {}, {"prompt": 5}, lambda: ROWS])
def test_objects_without_rows_are_refused_with_the_known_forms(data):
    with pytest.raises(UsageError) as caught:
        open_rows(data)
    assert "a list of dicts" in "".join(caught.value.hints)


@pytest.mark.parametrize("row", ["text", 5, None, ["a"]])
def test_a_row_that_is_no_object_is_named(row):
    for data in ([*ROWS, row], iter([*ROWS, row])):
        with pytest.raises(DataError, match="rows, row 8: a row is an object"):
            open_rows(data)


@pytest.mark.parametrize("kind", [RuntimeError, OSError])
def test_an_iterable_that_raises_names_the_row_before_it(kind):
    def broken():
        yield from ROWS
        raise kind("the disk is on fire")

    with pytest.raises(DataError, match=f"rows failed after row 7: {kind.__name__}: the disk"):
        open_rows(broken())


def test_a_stream_that_does_not_end_is_refused(monkeypatch):
    monkeypatch.setattr(rows, "_MAX_SPOOLED", 2**17)
    with pytest.raises(DataError, match="does not end"):
        open_rows({"n": n} for n in iter(int, 1))


def test_large_streams_lie_in_a_file_that_threads_share(monkeypatch):
    monkeypatch.setattr(rows, "_MAX_IN_MEMORY", 1000)
    opened = open_rows({"n": n, "raw": b"x" * 50} for n in range(500))
    wrong = []

    def read(seed):
        for index in np.random.default_rng(seed).integers(500, size=500):
            if opened[int(index)].data["n"] != index:
                wrong.append(index)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert wrong == []


def test_missing_files_get_suggestions(tmp_path):
    as_file(tmp_path / "prompts.jsonl", LINES)
    with pytest.raises(DataError, match="No such file") as caught:
        open_rows(str(tmp_path / "promts.jsonl"))
    assert "prompts.jsonl" in caught.value.hints[0]
    with pytest.raises(DataError, match="No such file"):
        open_rows("nowhere.jsonl")  # not an id of the hub
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has no file of data"):
        open_rows(tmp_path / "empty")


@pytest.mark.parametrize("id", ["nobody/nothing", "nobody/nothing:main:test", "nothing:train"])
def test_hub_ids_offline_say_what_to_do(id):
    with pytest.raises(
        DataError, match=f"cannot load the data set {id.split(':')[0]} from the hub"
    ) as c:
        open_rows(id)
    assert "is there a network?" in c.value.hints[0]


@pytest.mark.parametrize(
    ("is_offline", "reason"),
    [(True, "HF_HUB_OFFLINE is set"), (False, "the hub cannot be reached")],
)
def test_hub_that_is_not_reached_is_told_from_one_that_is_not_asked(
    monkeypatch, is_offline, reason
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(DataError, match=f"{reason}, and the cache has no such data set") as caught:
        open_rows("nobody/nothing")
    assert "Offline" not in str(caught.value)
    assert any("hf download nobody/nothing" in hint for hint in caught.value.hints)


# ---- scanning -----------------------------------------------------------------------------------


CELLS = [
    "plain",
    "a,b",
    'say "hi"',
    "two\nlines",
    "two\r\nlines",
    '"',
    '""',
    "",
    "ü" * 5,
    ",",
    "\n",
]


@pytest.mark.parametrize("chunk", [1, 2, 7, 64, 2**22])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_csv_records_are_found_whatever_they_quote(tmp_path, monkeypatch, chunk, quoting, mark):
    monkeypatch.setattr(line_files, "_CHUNK", chunk)
    table = [{"a b": first, "c": second} for first in CELLS for second in CELLS]
    with (tmp_path / "q.csv").open("w", newline="") as file:
        file.write(mark)
        writer = csv.DictWriter(file, ["a b", "c"], quoting=quoting)
        writer.writeheader()
        writer.writerows(table)
    assert [row.data for row in open_rows(tmp_path / "q.csv")] == table


def test_quotes_inside_of_unquoted_cells_are_text(tmp_path):
    path = as_file(tmp_path / "q.csv", 'size,what\n5" disk,old\n3,"a, b"\n')
    assert [row.data["size"] for row in open_rows(path)] == ['5" disk', "3"]


@pytest.mark.parametrize("chunk", [1, 3, 10, 50])
def test_lines_are_found_across_pieces_of_the_file(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(line_files, "_CHUNK", chunk)
    path = as_file(tmp_path / "q.jsonl", '\n{"a":1}\n   \n\n{"a":22}\r\n \n{"a":"x y"}')
    opened = open_rows(path)
    assert [(row.data["a"], row.label) for row in opened] == [
        (1, "q/2"),
        (22, "q/5"),
        ("x y", "q/7"),
    ]


def test_an_absurd_line_is_refused_with_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(line_files, "MAX_ROW", 1000)
    path = as_file(tmp_path / "q.jsonl", LINES + json.dumps({"prompt": "x" * 2000}) + "\n" + LINES)
    with pytest.raises(DataError, match=r"line 8: 2,015 bytes long; at most 1,000 are read"):
        open_rows(path)
    path = as_file(tmp_path / "q.csv", "a,b\n1,2\n3," + "x" * 2000)
    with pytest.raises(DataError, match=r"row 2: 2,002 bytes long"):
        open_rows(path)
    path = as_file(tmp_path / "q.csv", "a," + "x" * 2000)
    with pytest.raises(DataError, match=r"the names of the columns: 2,002 bytes long"):
        open_rows(path)


def test_a_line_of_zeros_is_refused_and_not_read(tmp_path):
    """What a file looks like that was cut off by a crash: sparse, without a line break."""
    path = as_file(tmp_path / "q.jsonl", LINES)
    with path.open("r+b") as file:
        file.truncate(2**28)
    with pytest.raises(DataError, match="line 8: 268,"):
        open_rows(path)


def test_a_broken_row_far_inside_is_named_when_it_is_read(tmp_path):
    lines = [json.dumps({"n": n}) for n in range(1000)]
    lines[555] = "{"
    opened = open_rows(as_file(tmp_path / "q.jsonl", "\n".join(lines)))
    assert opened[554].data == {"n": 554}
    with pytest.raises(DataError, match="line 556: not JSON"):
        opened[555]


def test_a_file_that_is_overwritten_says_so(tmp_path):
    path = as_file(tmp_path / "q.jsonl", LINES)
    opened = open_rows(path)
    as_file(path, "x" * 1000)
    with pytest.raises(DataError, match="was changed while it was in use"):
        opened[3]


def test_descriptors_are_closed_with_the_rows(tmp_path, recwarn):
    import os

    path = as_file(tmp_path / "q.jsonl.gz", gzip.compress(LINES.encode()))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert open_rows(path)[0]
        with pytest.raises(GymError):
            open_rows(as_file(tmp_path / "bad.jsonl", "{"))
    assert len(os.listdir("/proc/self/fd")) == before
