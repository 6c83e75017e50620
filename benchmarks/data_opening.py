"""Opening a million rows: `python benchmarks/data_opening.py [--rows N] [--json]`.

Rows of about 200 bytes, opened by `areal_gym.tasks.open_rows` and made a task source, each in a
process of its own:

    open     seconds and MB of peak growth to count the rows and look at some of them
    tasks    the same for the task source of `math`, with held-out tasks
    row      microseconds to read a random row
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from areal_gym.envs.questions import answer_draft
from areal_gym.tasks import open_rows, open_tasks

KINDS = ("jsonl", "csv", "parquet")
NUM_READ = 20_000


def rows(num_rows: int) -> Iterator[dict[str, str]]:
    """Yield questions of about 200 bytes, some with quotes and commas."""
    rng = random.Random(0)
    for number in range(num_rows):
        words = " ".join(f"word{rng.randrange(10_000)}" for _ in range(15))
        yield {"question": f'{words}, and "{number}"?', "answer": str(number)}


def write(file: Path, num_rows: int) -> None:
    """Write the rows in the format of the file's name."""
    if file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pylist(list(rows(num_rows)))
        pyarrow.parquet.write_table(table, file)
        return
    with file.open("w", newline="") as stream:
        if file.suffix == ".csv":
            writer = csv.DictWriter(stream, ["question", "answer"])
            writer.writeheader()
            writer.writerows(rows(num_rows))
        else:
            stream.writelines(json.dumps(row) + "\n" for row in rows(num_rows))


def peak_mb() -> float:
    """Return the largest resident size of this process so far."""
    # Not `ru_maxrss`: a process inherits that of the one that started it.
    (line,) = (row for row in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in row)
    return int(line.split()[1]) / 1024


def measured(function: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return the result, the seconds and the growth of the peak in MB."""
    before, start = peak_mb(), time.perf_counter()
    result = function()
    return result, time.perf_counter() - start, peak_mb() - before


def measure(file: Path) -> dict[str, Any]:
    """Open the file in this process, which has done nothing else."""
    if file.suffix == ".parquet":
        import pyarrow.parquet  # noqa: F401  (its import is not the data's)
    data, open_s, open_mb = measured(lambda: open_rows(file))
    rng = random.Random(1)
    places = [rng.randrange(len(data)) for _ in range(NUM_READ)]
    _, read_s, _ = measured(lambda: [data[place] for place in places])
    source, tasks_s, tasks_mb = measured(lambda: open_tasks(str(file), answer_draft))
    return {
        **{"kind": file.suffix[1:], "rows": len(data), "file_mb": file.stat().st_size / 2**20},
        **{"open_s": open_s, "open_mb": open_mb, "row_us": 1e6 * read_s / NUM_READ},
        **{"tasks_s": tasks_s, "tasks_mb": tasks_mb, "num_heldout": source.num_tasks("test")},
    }


def main() -> None:
    """Print one line for each kind of file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.file is not None:
        print(json.dumps(measure(arguments.file)))
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            file = Path(folder) / f"rows.{kind}"
            write(file, arguments.rows)
            command = [sys.executable, __file__, "--file", str(file)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            results.append(json.loads(done.stdout))
            file.unlink()
    if arguments.json:
        aim = {"open_s": 2.0, "open_mb": 200.0}
        print(json.dumps({"benchmark": "data_opening", "results": results, "aim": aim}))
        return
    print("kind          rows  file MB  open s     MB  tasks s     MB  row us")
    for row in results:
        print(
            f"{row['kind']:8}{row['rows']:>10,}{row['file_mb']:>9.0f}{row['open_s']:>8.2f}"
            f"{row['open_mb']:>7.0f}{row['tasks_s']:>9.2f}{row['tasks_mb']:>7.0f}{row['row_us']:>8.1f}"
        )
    print("aim: a million rows open in under 2 s and under 200 MB")


if __name__ == "__main__":
    main()
