"""One place on an environment of Harbor, which has commands and copies of files, and no more.

What a place promises beyond that is made of commands of its image, as its root: sh, timeout, head,
mktemp, find and tar. Outputs go over files, so that a process that is left behind holds no stream.
"""

from __future__ import annotations

import asyncio
import io
import math
import posixpath
import secrets
import shlex
import socket
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal_gym.errors import GymError, SandboxError
from areal_gym.places.base import CommandResult, FileChanges, PlaceImage
from areal_gym.places.keeper_commands import KILLED, OUTPUT_BYTES

_GRACE_S = 60.0
_TRANSFER_S = 600.0
_TOOLS = ("timeout", "head", "mktemp", "find", "tar", "mkdir", "chmod", "rm", "touch", "sleep")
_ENGINES_OWN = {b"/etc/hosts", b"/etc/hostname", b"/etc/resolv.conf"}
_STARTED = "/var/tmp/.areal-gym-started"
# $1: where outputs go, $2: seconds; then the command. Only the command's user reaches the folder:
# what runs beside it as another user cannot put links there, which this shell would follow.
# `timeout` gives the command a process group of its own, and kills that.
_RUN = f"""\
d=$1; limit=$2; shift 2
mkdir -m 700 "$d" || exit 125
timeout -s KILL "$limit" "$@" </dev/null >"$d/1" 2>"$d/2"
echo $? >"$d/code"
head -c {OUTPUT_BYTES} "$d/1" >"$d/out"; head -c {OUTPUT_BYTES} "$d/2" >"$d/err"
"""
# Kills all processes but those that were there at the start, this one, and what runs it.
_KILL_ALL = """\
keep=" $1 $$ "
p=$$
while [ -r /proc/$p/status ]; do
  while read -r key value rest; do
    if [ "$key" = PPid: ]; then p=$value; break; fi
  done </proc/$p/status
  [ "$p" -gt 0 ] || break
  keep="$keep$p "
done
n=0
while [ $n -lt 50 ]; do
  n=$((n + 1)); left=
  for path in /proc/[0-9]*; do
    pid=${path#/proc/}
    case "$keep" in *" $pid "*) continue;; esac
    state=
    while read -r key value rest; do
      if [ "$key" = State: ]; then state=$value; break; fi
    done 2>/dev/null </proc/$pid/status || continue
    case "$state" in ""|Z|X) continue;; esac
    kill -9 "$pid" 2>/dev/null && left=1
  done
  [ -n "$left" ] || exit 0
  [ $n -lt 5 ] || sleep 0.1 2>/dev/null || sleep 1  # what was killed is not gone at once
done
exit 1
"""
# Prints the paths for which a condition of find holds, with a NUL behind each.
_FIND = (
    f"find / -xdev \\( -path /proc -o -path /sys -o -path /dev -o -path {_STARTED} -o "
    "-path '/tmp/areal-gym.*' \\) -prune -o"
)


@contextmanager
def harbor_errors(what: str) -> Iterator[None]:
    """Turn what a backend raises, which may be anything, into SandboxErrors."""
    try:
        yield
    except GymError:
        raise
    except Exception as error:
        raise SandboxError(f"{what}: {error or type(error).__name__}") from error


async def stop_environment(environment: Any) -> None:
    """Stop and delete one of Harbor's environments; SandboxError if it does not end in time."""
    with harbor_errors("the end of a place"):
        async with asyncio.timeout(2 * _GRACE_S):
            await environment.stop(delete=True)


class HarborPlace:
    """A started environment of Harbor.

    Args:
        environment: a `harbor.environments.base.BaseEnvironment`.
        image: its image.
        on_close: called once with this place when it has ended.
    """

    def __init__(
        self, environment: Any, image: PlaceImage, on_close: Callable[[HarborPlace], None]
    ) -> None:
        self._environment = environment
        self._image = image
        self._on_close = on_close
        self._own_pids = ""
        """The processes of the backend: those that were there before any command."""
        self._paths = b""
        """The paths of the image, compressed; kept here because a program could change a list."""
        self._folder = ""
        self._is_frozen = False
        self._is_closed = False

    async def prepare(self) -> None:
        """Learn what is there before the first command; SandboxError if tools are missing."""
        needed = " ".join(_TOOLS)
        missing = await self._exec(
            f"for name in {needed}; do command -v $name >/dev/null || echo $name; done"
        )
        if missing.strip():
            raise SandboxError(
                f"a place of Harbor needs {needed} in its image; missing: {missing.split()}"
            )
        script = "for path in /proc/[0-9]*; do echo ${path#/proc/}; done"
        first, second = [set((await self._exec(script)).split()) for _ in range(2)]
        self._own_pids = " ".join(sorted(first | second))  # a backend may still be starting some
        folder = await self._exec(
            "d=$(mktemp -d /tmp/areal-gym.XXXXXX) && chmod 711 $d && mkdir -m 700 $d/own && "
            "mkdir -m 1733 $d/run && echo $d"
        )
        self._folder = folder.strip()
        self._paths = zlib.compress(await self._find("-true"))
        await self._exec(f"touch {_STARTED}")

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | int | None = None,
        timeout_s: float,
    ) -> CommandResult:
        """Run a command; at its deadline its process group is killed."""
        self._is_frozen = False
        folder = f"{self._folder}/run/{secrets.token_hex(8)}"
        limit_s = max(1, math.ceil(timeout_s))
        script = shlex.join(["/bin/sh", "-c", _RUN, "sh", folder, str(limit_s), *argv])
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        with harbor_errors(f"{argv[0]!r} in a place"):
            async with asyncio.timeout(limit_s + 2 * _GRACE_S):
                result = await self._environment.exec(
                    script,
                    cwd=cwd or self._image.workdir,
                    env={**self._image.env, **(env or {})},
                    timeout_sec=limit_s + int(_GRACE_S),
                    user=user,
                )
        took_s = loop.time() - start_s
        try:
            code = (await self._download(f"{folder}/code")).strip()
        except SandboxError:
            text = ((result.stderr or "") + (result.stdout or "")).strip()[-400:]
            raise SandboxError(f"{argv[0]!r} could not be started: {text}") from None
        stdout, stderr = [await self._download(f"{folder}/{name}") for name in ("out", "err")]
        await self._exec(f"rm -rf {folder}")
        is_timed_out = int(code) in (124, KILLED) and took_s >= limit_s
        return CommandResult(
            exit_code=KILLED if is_timed_out else int(code),
            stdout=stdout,
            stderr=stderr,
            is_timed_out=is_timed_out,
        )

    async def put(self, tar: bytes, path: str) -> None:
        """Unpack an archive below a folder, which is made; SandboxError if a link leads there."""
        path = posixpath.normpath("/" + path)
        name = self._new_file()
        with tempfile.TemporaryDirectory() as folder, harbor_errors(f"files for {path}"):
            (Path(folder) / "put.tar").write_bytes(tar)
            await self._environment.upload_file(Path(folder) / "put.tar", name)
        links = "".join(
            f"if [ -L {shlex.quote(each)} ]; then echo {shlex.quote(each)}; exit 0; fi\n"
            for each in _parents(path)
        )
        target = shlex.quote(path)
        output = await self._exec(
            f"trap 'rm -f {name}' EXIT\n{links}mkdir -p {target} && "
            f"tar -xpf {name} --numeric-owner -C {target} && echo"
        )
        if output.strip():
            raise SandboxError(f"{output.strip()} is a link in the place: not followed")

    async def listen(self, port: int) -> socket.socket:
        """Raise SandboxError: nothing on this machine is reached from there."""
        raise SandboxError(
            "programs in places of Harbor cannot reach the gateway of this machine",
            hints=("the shell agent needs no network: leave agent.kwargs.where=task out",),
        )

    async def freeze(self) -> None:
        """End all processes that are not the backend's own; the files stay."""
        script = shlex.join(["/bin/sh", "-c", _KILL_ALL, "sh", self._own_pids])
        await self._exec(script, "the place's processes were not ended")
        self._is_frozen = True

    async def changes(self) -> FileChanges:
        """Return how the files differ from those at the start, by their times of change."""
        self._require_frozen()
        before = set(zlib.decompress(self._paths).split(b"\0"))
        now = (await self._find("-true")).split(b"\0")
        newer = (await self._find(f"-cnewer {_STARTED} \\! -type d")).split(b"\0")
        written = {path for path in now if path not in before} | set(newer)
        there = set(now)
        removed = {path for path in before if path not in there}
        return FileChanges(
            written=_outermost(written - {b"", *_ENGINES_OWN}), removed=_outermost(removed)
        )

    async def take(self, paths: Sequence[str], *, max_bytes: int) -> bytes:
        """Return an archive of paths; no link is followed on the way to them."""
        self._require_frozen()
        name = self._new_file()
        words = []
        for path in paths:
            path = posixpath.normpath("/" + path)
            tests = [f"[ ! -L {shlex.quote(each)} ]" for each in _parents(posixpath.dirname(path))]
            here = f"{{ [ -e {shlex.quote(path)} ] || [ -L {shlex.quote(path)} ]; }}"
            relative = shlex.quote("./" + path.lstrip("/"))
            words.append(f'if {" && ".join([*tests, here])}; then set -- "$@" {relative}; fi')
        await self._exec(
            "set --\n" + "\n".join(words) + f"\ncd / && if [ $# -gt 0 ]; then "
            f'tar -cf - --numeric-owner -- "$@" 2>/dev/null | head -c {max_bytes + 1} >{name}; '
            f"else : >{name}; fi"
        )
        raw = await self._download(name)
        await self._exec(f"rm -f {name}")
        return await asyncio.to_thread(_renamed, raw, max_bytes)

    async def aclose(self) -> None:
        """Stop and delete the environment. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._on_close(self)
        await stop_environment(self._environment)

    # ---- the backend's commands -----------------------------------------------------------------

    def _new_file(self) -> str:
        """Return an unused path that only root reaches."""
        return f"{self._folder}/own/{secrets.token_hex(8)}"

    def _require_frozen(self) -> None:
        if not self._is_frozen:
            raise SandboxError("files are read from a frozen place only: await place.freeze()")

    async def _exec(self, script: str, failure: str = "a command of the place failed") -> str:
        """Run a script as root and return what it prints; SandboxError if it fails."""
        with harbor_errors(failure):
            async with asyncio.timeout(_TRANSFER_S):
                result = await self._environment.exec(
                    shlex.join(["/bin/sh", "-c", script]),
                    cwd="/",
                    timeout_sec=int(_TRANSFER_S),
                    user="root",
                )
        if result.return_code != 0:
            text = ((result.stderr or "") + (result.stdout or "")).strip()[-400:]
            raise SandboxError(f"{failure}: code {result.return_code}: {text}")
        return str(result.stdout or "")

    async def _download(self, path: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder, harbor_errors(f"{path} of a place"):
            target = Path(folder) / "file"
            await self._environment.download_file(path, target)
            return await asyncio.to_thread(target.read_bytes)

    async def _find(self, condition: str) -> bytes:
        """Return the paths with a condition, each with a NUL behind it."""
        name = self._new_file()
        await self._exec(f"{_FIND} {condition} -print0 >{name} 2>/dev/null; test -s {name}")
        paths = await self._download(name)
        await self._exec(f"rm -f {name}")
        return paths


def _parents(path: str) -> list[str]:
    """Return the folders on the way to `path` and itself, outermost first, without the root."""
    names = [name for name in path.split("/") if name]
    return ["/" + "/".join(names[: n + 1]) for n in range(len(names))]


def _outermost(paths: set[bytes]) -> tuple[str, ...]:
    """Return the paths that are not below another one of them, sorted."""
    kept: list[str] = []
    for path in sorted(path.decode("utf-8", "surrogateescape") for path in paths):
        if not any(path.startswith(f"{parent}/") for parent in kept[-1:]):
            kept.append(path)
    return tuple(kept)


def _renamed(raw: bytes, max_bytes: int) -> bytes:
    """Return an archive whose names have no `./`, or what the limit leaves of it."""
    is_whole = len(raw) <= max_bytes
    buffer = io.BytesIO()
    archive = tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
    try:
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as source:
            for member in source:
                member.name = posixpath.normpath(member.name).lstrip("/")
                if member.islnk():
                    member.linkname = posixpath.normpath(member.linkname).lstrip("/")
                if archive.offset + member.size + 512 > max_bytes:
                    return buffer.getvalue()[:max_bytes]
                archive.addfile(member, source.extractfile(member) if member.isreg() else None)
    except (tarfile.TarError, EOFError, OSError):
        is_whole = not raw
    if not is_whole:  # an archive that cannot be read to its end
        return buffer.getvalue()[:max_bytes]
    archive.close()
    return buffer.getvalue()
