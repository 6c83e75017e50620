"""The process sandbox: fork servers on this machine, isolated by the kernel."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any, ClassVar

from areal_gym.errors import SandboxError, UsageError
from areal_gym.sandbox.base import SandboxLevel, SandboxLimits
from areal_gym.sandbox.forking import ForkingSandbox
from areal_gym.sandbox.launching import ENVIRONMENT, launch_worker
from areal_gym.sandbox.levels import default_min_level, level_of, note_level, require_level
from areal_gym.sandbox.worker.cleaning import remove_tree
from areal_gym.sandbox.worker.groups import remove_groups
from areal_gym.sandbox.zygotes import Server, Zygote

__all__ = ["ENVIRONMENT", "NoSandbox", "ProcessSandbox", "level_of"]


class ProcessSandbox(ForkingSandbox):
    """Runs untrusted Python in forked processes with limits enforced by the kernel.

    A clean interpreter with an empty environment isolates itself (namespaces, a private root
    directory, Landlock, seccomp: as far as this kernel and user allow, see `report`) and then
    forks a cell for each call, with its own uid, processes, temporary directory and limits, no
    network, and only its own descriptors. After a call the cell and its children are killed.

    docs/sandbox.md lists what is covered and what is not.

    Args:
        num_workers: the number of concurrent snippets; more wait in order. Default: one per
            processor, at most 8.
        limits: the limits of calls without their own.
        modules: imported ahead for snippets that mention one of them; such snippets share a second
            fork server, which the first of them starts.
        min_level: a weaker level is refused; by default the strongest seen on this machine, or
            that of AREAL_GYM_SANDBOX_MIN_LEVEL (see `levels`).
        packages: packages or modules outside of the interpreter's own directories that snippets
            may read and import.
        without: names of protections to leave out ("namespaces" for all of those), to test the
            others alone.
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
            # Leaving out protections implies a lower level.
            min_level = SandboxLevel.FILTERED if without else default_min_level()
        self.min_level = SandboxLevel(min_level)
        self._paths, self._readable = _search_paths(packages)
        self._without = tuple(without)
        self._starting = asyncio.Lock()

    async def _lease(self, code: str) -> Zygote:
        self._claim_loop()
        modules = self._modules_for(code)
        async with self._starting:
            for zygote in self._zygotes:
                if zygote.is_alive and zygote.modules == modules:
                    return zygote
            return await self._start(modules)

    async def _start(self, modules: tuple[str, ...]) -> Zygote:
        token = secrets.token_hex(8)
        settings = {
            "modules": modules,
            "without": self._without,
            "paths": self._paths,  # to import from
            "readable": self._readable,
            "scratch": f"{tempfile.gettempdir()}/areal-gym-{token}",
            "is_container": False,
            "group": f"{os.getpid()}-{token}",  # the name of its control groups
            "memory_mb": self.limits.memory_mb,  # of most calls
        }
        control, server = _launch(settings)
        zygote = await Zygote.start(control, server, num_warm=self.num_workers, modules=modules)
        try:
            require_level(self.min_level, zygote.protections)
        except SandboxError:
            zygote.close()
            raise
        note_level(level_of(zygote.protections))
        self._zygotes[:] = [*filter(attrgetter("is_alive"), self._zygotes), zygote]
        return zygote


class NoSandbox(ProcessSandbox):
    """Runs Python as this user, who can reach files, network and processes.

    Use it for code that you would run yourself, on kernels without any protection. Time, output
    and memory of each process are limited and the environment is empty, as in `ProcessSandbox`;
    processes that a snippet leaves behind are ended where possible.

    Warns:
        RuntimeWarning: always.
    """

    backend: ClassVar[str] = "none"

    def __init__(
        self,
        *,
        num_workers: int | None = None,
        limits: SandboxLimits | None = None,
        modules: Sequence[str] = ("numpy", "sympy"),
    ) -> None:
        message = "sandbox 'none': what a policy writes runs as you and can do what you can"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        super().__init__(
            num_workers=num_workers,
            limits=limits,
            modules=modules,
            min_level=SandboxLevel.NONE,
            without=("namespaces", "private uid", "private root", "landlock", "seccomp"),
        )


class _LocalServer(Server):
    """A child of this process, but a fresh interpreter: it shares no memory, files, environment."""

    def __init__(self, process: subprocess.Popen[bytes], scratch: str, group: str = "") -> None:
        super().__init__(process.pid, scratch)
        self._process = process
        self._group = group

    def complaint(self) -> str:
        assert self._process.stderr is not None
        return self._process.stderr.read().decode(errors="replace").strip()

    def end(self) -> None:
        with self._process as process:  # which closes its error output
            try:
                process.wait(5.0)  # it cleans up when its socket closes
            except subprocess.TimeoutExpired:
                process.kill()
        # Only a killed server leaves these behind.
        remove_tree(self.scratch)
        if self._group:
            remove_groups(self._group)


def _launch(settings: dict[str, Any]) -> tuple[socket.socket, _LocalServer]:
    control, process = launch_worker("zygote", settings)
    return control, _LocalServer(process, settings["scratch"], settings["group"])


def _search_paths(packages: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the import paths of snippets, and the paths that they may read."""
    installed = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    paths = [os.path.abspath(path) for path in installed if os.path.isdir(path)]
    readable = list(paths)
    for package in packages:
        spec = importlib.util.find_spec(package.partition(".")[0])
        # A package has directories, a module a file, a built-in module neither.
        places = [] if spec is None else [*(spec.submodule_search_locations or [spec.origin or ""])]
        if not all(map(os.path.exists, places)) or not places:
            raise UsageError(f"the sandbox cannot import the package {package!r}")
        readable += map(os.path.abspath, places)
        paths += (os.path.dirname(os.path.abspath(place)) for place in places)
    return list(dict.fromkeys(paths)), readable
