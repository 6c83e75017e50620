"""Downloads the data of a benchmark: a pinned file with a checksum, or a data set of the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from areal_gym.envs.benchmarks.benchmark import Benchmark, DataFile, pulled_benchmarks
from areal_gym.envs.tau2.pull import BASE_URL, pull_one
from areal_gym.errors import DataError
from areal_gym.tasks import open_splits
from areal_gym.utils.files import readable_disk_errors, to_json, write_atomic

Progress = Callable[[str, int, int], None]


def pull_benchmark(
    benchmark: Benchmark,
    target: Path | None = None,
    *,
    base_url: str = BASE_URL,
    force: bool = False,
    on_progress: Progress | None = None,
) -> Path:
    """Download the file of a benchmark and return it.

    Raises:
        DataError: the hub does not give the data set.
        InfrastructureError: a failure of the server or the disk, or another checksum.
    """
    data = benchmark.data
    assert data is not None
    file = (target or pulled_benchmarks()) / data.place
    if force:
        file.unlink(missing_ok=True)
    if data.url:
        url = base_url.rstrip("/") + data.url.removeprefix(BASE_URL)
        facts = {"num_bytes": data.num_bytes, "sha256": data.sha256}
        pull_one(benchmark.id, url, file, **facts, on_progress=on_progress)  # type: ignore[arg-type]
    elif not file.exists():
        _pull_hub(benchmark, data, file)
    return file


def _pull_hub(benchmark: Benchmark, data: DataFile, file: Path) -> None:
    name = data.hub + (f":{data.subset}" if data.subset else "")
    splits = open_splits(name)
    if data.split not in splits:
        raise DataError(f"{name} has no split {data.split!r}, but {', '.join(splits)}")
    rows = [dict(row.data) for row in splits[data.split]]
    if len(rows) != benchmark.num_tasks:
        raise DataError(
            f"{name} has {len(rows)} rows, and {benchmark.id} has {benchmark.num_tasks}",
            hints=["the data set has changed: its numbers do not compare with others"],
        )
    text = "".join(to_json(row) + "\n" for row in rows)
    sha256 = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    facts = {"hub": data.hub, "subset": data.subset, "split": data.split, "sha256": sha256}
    with readable_disk_errors(file):
        write_atomic(file, text)
        write_atomic(file.with_name(f"{file.name}.source.json"), to_json(facts, indent=2))
