"""Downloads the benchmark's data: pinned commit, checked checksums, resumable."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_gym.envs.tau2.benchmark_data import manifest, pulled_data
from areal_gym.errors import InfrastructureError

if TYPE_CHECKING:
    import aiohttp

BASE_URL = "https://raw.githubusercontent.com"
"""Start of the files' URLs: `BASE_URL/OWNER/REPOSITORY/COMMIT/data/PATH`."""

_NUM_TRIES = 4
_CHUNK = 1 << 16
_WAIT_S = 0.5
"""Wait before the second try; doubled for each later one."""
_TIMEOUT_S = 60.0
"""Longest time without a byte."""

Progress = Callable[[str, int, int], None]
"""Called with a file, the bytes of all files that are here, and the bytes of all files."""


def pull(
    target: Path | None = None,
    *,
    base_url: str = BASE_URL,
    force: bool = False,
    on_progress: Progress | None = None,
) -> Path:
    """Download the missing files and return their folder, which `TAU2_DATA_DIR` may name.

    The folder is by default the one where environments look. A file that was cut off is continued;
    one that has another checksum is fetched anew, once; `force` fetches everything anew. A failure
    of the server or of the disk, and files of a wrong checksum, are an InfrastructureError.
    """
    folder = target or pulled_data()
    if force:
        shutil.rmtree(folder / "tau2", ignore_errors=True)
    try:
        asyncio.run(_pull_all(folder, base_url.rstrip("/"), on_progress))
    except OSError as error:
        raise InfrastructureError(f"cannot write to {folder}: {error}") from error
    return folder


async def _pull_all(folder: Path, base_url: str, on_progress: Progress | None) -> None:
    import aiohttp

    facts = manifest()
    total = sum(row["bytes"] for row in facts["files"])
    have = 0

    def count(path: str, before: int, here: int) -> None:
        if on_progress is not None:
            on_progress(path, before + here, total)

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT_S, sock_read=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        for row in facts["files"]:
            file = folder / row["path"]
            if not (file.exists() and _digest(file) == row["sha256"]):
                url = f"{base_url}/{facts['repository']}/{facts['commit']}/data/{row['path']}"
                await _pull_file(session, url, file, row, partial(count, row["path"], have))
            have += row["bytes"]
            count(row["path"], have, 0)


def pull_one(
    source: str,
    url: str,
    file: Path,
    *,
    num_bytes: int,
    sha256: str,
    on_progress: Progress | None = None,
) -> None:
    """Download one file unless it is here, like `pull`; `source` is its name in messages."""

    async def pull_it() -> None:
        import aiohttp

        def count(here: int) -> None:
            if on_progress is not None:
                on_progress(file.name, here, num_bytes)

        row = {"bytes": num_bytes, "sha256": sha256}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_TIMEOUT_S, sock_read=_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await _pull_file(session, url, file, row, count, source)

    if file.exists() and _digest(file) == sha256:
        return
    try:
        asyncio.run(pull_it())
    except OSError as error:
        raise InfrastructureError(f"cannot write {file}: {error}") from error


async def _pull_file(
    session: aiohttp.ClientSession,
    url: str,
    file: Path,
    row: dict[str, Any],
    on_bytes: Callable[[int], None],
    source: str = "tau2",
) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    trouble = ""
    for number in range(_NUM_TRIES):
        if number:
            await asyncio.sleep(_WAIT_S * 2 ** (number - 1))
        trouble = await _try(session, url, part, row["bytes"], on_bytes)
        if trouble:
            continue
        if _digest(part) == row["sha256"]:
            part.replace(file)
            return
        part.unlink()
        trouble = "its checksum is another one"
    again = f"again, it goes on where it stopped: areal-gym data pull {source}"
    elsewhere = f"from elsewhere: areal-gym data pull {source} --base-url URL"
    raise InfrastructureError(f"cannot fetch {url}: {trouble}", hints=[again, elsewhere])


async def _try(
    session: aiohttp.ClientSession,
    url: str,
    part: Path,
    num_bytes: int,
    on_bytes: Callable[[int], None],
) -> str:
    """Download the missing rest of a part; return the problem, or "" on success."""
    import aiohttp

    here = part.stat().st_size if part.exists() else 0
    if here >= num_bytes:
        return ""
    headers = {"Range": f"bytes={here}-"} if here else {}
    try:
        async with session.get(url, headers=headers) as response:
            if response.status not in (200, 206):
                return f"HTTP {response.status}"
            if response.status == 200:  # a server that knows no ranges sends all of it
                here = 0
            with part.open("ab" if here else "wb") as out:
                async for chunk in response.content.iter_chunked(_CHUNK):
                    out.write(chunk)
                    here += len(chunk)
                    on_bytes(here)
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if here >= num_bytes else f"it ends after {here:,} of {num_bytes:,} bytes"


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
