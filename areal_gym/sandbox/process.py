"""The process sandbox: fork servers on this machine, behind walls that the kernel enforces."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

from areal_gym.errors import SandboxError, UsageError
from areal_gym.sandbox.base import SandboxLevel, SandboxLimits, SandboxReport
from areal_gym.sandbox.forking import ForkingSandbox
from areal_gym.sandbox.levels import MIN_LEVEL_VARIABLE, default_min_level, note_level
from areal_gym.sandbox.worker.cleaning import remove_tree
from areal_gym.sandbox.worker.groups import remove_groups
from areal_gym.sandbox.zygotes import Zygote

__all__ = ["ENVIRONMENT", "ProcessSandbox", "level_of"]

# Sets of strings have one order in every interpreter, so that episodes repeat. One thread: a
# process with more cannot be forked safely. One arena of memory: glibc reserves up to 128 MB of
# address space for each thread's own, which the limit of memory would count.
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}

_BOOT = """
import json, socket, sys
sys.path.insert(0, sys.argv[1])
from worker import zygote
del sys.path[0]
zygote.main(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]), json.loads(sys.argv[4]))
"""

# What each level takes: of every set, one.
_WALLS = {
    SandboxLevel.ISOLATED: (
        ("files", {"private root"}),
        ("processes", {"pid namespace"}),
        ("network", {"network namespace"}),
        ("kernel", {"seccomp"}),
    ),
    SandboxLevel.FILTERED: (
        ("files", {"private root", "landlock"}),
        ("processes", {"pid namespace", "seccomp"}),
        ("network", {"network namespace", "seccomp"}),
    ),
    SandboxLevel.NONE: (),
}


def level_of(protections: Collection[str]) -> SandboxLevel:
    """The strongest level that these protections make."""
    return next(
        level
        for level, walls in _WALLS.items()
        if all(wall & set(protections) for _, wall in walls)
    )


class ProcessSandbox(ForkingSandbox):
    """Runs untrusted Python in forked processes with limits enforced by the kernel.

    A clean interpreter with an empty environment shuts itself in (namespaces, a private root
    directory, Landlock, seccomp: whatever this kernel and user allow, see `report`) and then
    forks a cell for each call: its own uid, processes, temporary directory and limits, no network,
    no descriptors but its own. At the end of a call the cell and all that it started are killed.

    What is covered and what is not: docs/sandbox.md.

    Args:
        num_workers: snippets that execute at a time; more wait in order. Default: one for each
            processor, at most 8.
        limits: for calls that name none.
        modules: imported ahead for snippets that mention one of them; such snippets share a second
            fork server, started when the first of them comes.
        min_level: less than this is refused; by default the strongest that was found on this
            machine, or what AREAL_GYM_SANDBOX_MIN_LEVEL says (see `levels`).
        packages: packages or modules outside of the interpreter's own directories that snippets
            may read and import.
        without: names of protections to leave out ("namespaces" for all of those): for tests of
            what the rest holds.
    """

    backend: ClassVar[str] = "process"

    def __init__(
        self,
        *,
        num_workers: int | None = None,
        limits: SandboxLimits | None = None,
        modules: Sequence[str] = ("numpy", "sympy"),
        min_level: SandboxLevel | str | None = None,
        packages: Sequence[str] = (),
        without: Collection[str] = (),
    ) -> None:
        super().__init__(num_workers=num_workers, limits=limits, modules=modules)
        if min_level is None:
            # Who leaves protections out asks for less.
            min_level = SandboxLevel.FILTERED if without else default_min_level()
        self.min_level = SandboxLevel(min_level)
        self._paths, self._readable = _search_paths(packages)
        self._without = tuple(without)
        self._starting = asyncio.Lock()
        self._zygotes: dict[bool, Zygote] = {}
        # Also at exit of this process, when nobody closed us.
        self._finalizer = weakref.finalize(self, _close_all, self._zygotes)

    def zygotes(self) -> list[Zygote]:
        """The fork servers that there are now."""
        return list(self._zygotes.values())

    async def report(self) -> SandboxReport:
        """What protects this machine from the snippets.

        Raises:
            SandboxError: the sandbox does not start, or this machine gives less than `min_level`.
        """
        protections = (await self._lease("")).protections
        return SandboxReport(
            backend=self.backend, level=level_of(protections), protections=protections
        )

    async def aclose(self) -> None:
        """End every worker. Idempotent."""
        self._is_closed = True
        _close_all(self._zygotes)

    def _forget(self) -> None:
        _close_all(self._zygotes)

    async def _lease(self, code: str) -> Zygote:
        self._claim_loop()
        needs_modules = self._needs_modules(code)
        async with self._starting:
            zygote = self._zygotes.get(needs_modules)
            if zygote is None or not zygote.is_alive:
                zygote = await self._start(self._modules if needs_modules else ())
                self._zygotes[needs_modules] = zygote
        return zygote

    def _release(self, zygote: Zygote) -> None:
        zygote.refill()

    async def _start(self, modules: Sequence[str]) -> Zygote:
        token = secrets.token_hex(8)
        settings = {
            "modules": modules,
            "without": self._without,
            "paths": self._paths,
            "readable": self._readable,
            "scratch": f"{tempfile.gettempdir()}/areal-gym-{token}",
            "is_container": False,
            "group": f"{os.getpid()}-{token}",
            "memory_mb": self.limits.memory_mb,
        }
        control, server = _launch(settings)
        zygote = await Zygote.start(control, server, num_warm=self.num_workers)
        try:
            _require_level(self.min_level, zygote.protections)
            note_level(level_of(zygote.protections))
        except SandboxError:
            zygote.close()
            raise
        return zygote


class _LocalServer:
    """A fork server that is a child of this process.

    It is a fresh interpreter, not a fork of this process: nothing that this process knows, holds
    open or has in its environment is in it.
    """

    def __init__(self, process: subprocess.Popen[bytes], scratch: str, group: str = "") -> None:
        self._process = process
        self.scratch = scratch
        self._group = group
        self.pid = process.pid

    def complaint(self) -> str:
        """What it wrote: it is gone or going, so this read ends."""
        stderr = self._process.stderr
        return "" if stderr is None else stderr.read().decode(errors="replace").strip()

    def end(self) -> None:
        """Wait for it; it cleans up and ends when its socket closes."""
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        # Only a server that was killed leaves these.
        remove_tree(self.scratch)
        if self._group:
            remove_groups(self._group)


def _launch(settings: dict[str, Any]) -> tuple[socket.socket, _LocalServer]:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.pidfd_open(os.getpid())
    fds = (theirs.fileno(), parent)
    command = [sys.executable, "-P", "-s", "-S", "-X", "utf8", "-c", _BOOT]
    process = subprocess.Popen(
        [*command, str(Path(__file__).parent), *map(str, fds), json.dumps(settings)],
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=fds,
        cwd="/",
    )
    theirs.close()
    os.close(parent)
    return control, _LocalServer(process, settings["scratch"], settings["group"])


def _search_paths(packages: Sequence[str]) -> tuple[list[str], list[str]]:
    """Where snippets look for modules, and what they may read of it."""
    installed = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    paths = [os.path.abspath(path) for path in installed if os.path.isdir(path)]
    readable = list(paths)
    for package in packages:
        spec = importlib.util.find_spec(package.partition(".")[0])
        # A package has directories, a module a file, and what is built in neither.
        places = [] if spec is None else [*(spec.submodule_search_locations or [spec.origin or ""])]
        if not all(map(os.path.exists, places)) or not places:
            raise UsageError(f"a sandbox was given {package!r}, which cannot be imported")
        readable += map(os.path.abspath, places)
        paths += (os.path.dirname(os.path.abspath(place)) for place in places)
    return list(dict.fromkeys(paths)), readable


def _require_level(wanted: SandboxLevel, protections: Collection[str]) -> None:
    """Refuse to run where less is active than was asked for."""
    active = level_of(protections)
    if active.rank >= wanted.rank:
        return
    missing = [(what, walls) for what, walls in _WALLS[wanted] if not walls & set(protections)]
    raise SandboxError(
        f"the sandbox was asked for the level {wanted.value!r}, and this machine gives "
        f"{active.value!r}: nothing would keep a snippet from the "
        + ", ".join(f"{what} (it takes {' or '.join(sorted(walls))})" for what, walls in missing),
        hints=(
            "what is active here: areal-gym doctor",
            f"accept less: export {MIN_LEVEL_VARIABLE}={active.value}, or in Python "
            f"ProcessSandbox(min_level={active.value!r})"
            if active is not SandboxLevel.NONE
            else "Linux 5.13 gives any user Landlock and seccomp",
            "or run snippets in containers: areal_gym.sandbox.DockerSandbox",
        ),
    )


def _close_all(zygotes: dict[bool, Zygote]) -> None:
    for zygote in zygotes.values():
        zygote.close()
    zygotes.clear()
