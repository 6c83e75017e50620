"""The docker sandbox: the same fork servers, each as the first process of a container."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import weakref
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

from areal_gym.errors import SandboxError, UsageError
from areal_gym.sandbox.base import SandboxLevel, SandboxLimits, SandboxReport
from areal_gym.sandbox.containers import Container, ContainerEngine
from areal_gym.sandbox.forking import ForkingSandbox
from areal_gym.sandbox.zygotes import Zygote

T = TypeVar("T")

DEFAULT_IMAGE = "areal-gym-sandbox"
_NUM_SPARE = 1
_NUM_LEASES = 2_000  # then a container is replaced, so that leftovers cannot pile up

_PROTECTIONS = (
    *("container", "network namespace", "pid namespace", "ipc namespace", "read-only root"),
    *("no capabilities", "private uid", "process count", "memory sum"),
)


class DockerSandbox(ForkingSandbox):
    """Runs untrusted Python in warm containers, without network or access to this machine's files.

    A container is leased for one call, or for the life of a session; its fork server forks a cell
    for each. After a call all other processes in the container are ended, and it serves the next
    call; a container that does not come back is replaced. The root is read-only, there are no
    capabilities and no new privileges, the user is unprivileged; the kernel limits memory and
    processes of the whole container. Landlock and seccomp apply inside as in the process sandbox.

    Args:
        image: an image with python3 (3.9 or later) in PATH. `python -m areal_gym.sandbox.image`
            builds the default one.
        num_workers: the number of concurrent calls; more wait in order. Default: one per
            processor, at most 8. As many containers are kept ready.
        max_sessions: the number of concurrent sessions; each has its own container.
        limits: the limits of calls without their own. A call may set lower limits of memory and
            processes, but not higher ones: containers are created with these.
        modules: imported ahead in containers for snippets that mention one of them.
        runtime: the engine's name of the container runtime: "runsc" (gVisor, a second kernel
            between snippets and this machine's), "crun", "kata", ... Default: the environment
            variable AREAL_GYM_DOCKER_RUNTIME, else the engine's default.
    """

    backend: ClassVar[str] = "docker"

    def __init__(
        self,
        *,
        image: str = DEFAULT_IMAGE,
        num_workers: int | None = None,
        max_sessions: int = 32,
        limits: SandboxLimits | None = None,
        modules: Sequence[str] = ("numpy", "sympy"),
        runtime: str | None = None,
    ) -> None:
        super().__init__(
            num_workers=num_workers, limits=limits, modules=modules, max_sessions=max_sessions
        )
        self.image = image
        self.runtime = runtime or os.environ.get("AREAL_GYM_DOCKER_RUNTIME") or None
        self._idle: dict[bool, deque[Zygote]] = {False: deque(), True: deque()}
        self._id = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._engine = ContainerEngine(
            image, runtime=self.runtime, limits=self.limits, owner=self._id
        )
        self._containers: dict[Zygote, Container] = {}
        self._stocking: set[bool] = set()  # kinds of which a spare container is being started
        self._tasks: set[asyncio.Task[Any]] = set()
        self._finalizer = weakref.finalize(self, _close_all, self._containers)

    def zygotes(self) -> list[Zygote]:
        """Return the current fork servers."""
        return list(self._containers)

    async def report(self) -> SandboxReport:
        """Return the active protections.

        Raises:
            SandboxError: no engine answers, or it cannot start a container of the image.
        """
        zygote = await self._lease("")
        self._release(zygote)
        runtime = (f"runtime {self.runtime}",) if self.runtime else ()
        protections = (*_PROTECTIONS, *runtime, *zygote.protections)
        return SandboxReport(
            backend=self.backend, level=SandboxLevel.ISOLATED, protections=protections
        )

    async def aclose(self) -> None:
        """End every container, and wait until the engine has removed them. Idempotent."""
        self._is_closed = True
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._forget()
        await self._engine.aclose()

    def _forget(self) -> None:
        _close_all(self._containers)
        for idle in self._idle.values():
            idle.clear()
        self._stocking.clear()
        self._tasks.clear()

    def _checked(self, limits: SandboxLimits | None) -> SandboxLimits:
        for name in ("memory_mb", "num_processes"):
            limit = getattr(self.limits, name)
            if limits is not None and getattr(limits, name) > limit:
                raise UsageError(
                    f"a call asks for {name} = {getattr(limits, name)}; "
                    f"the containers of this sandbox were made with {limit}",
                    hints=(f"DockerSandbox(limits=SandboxLimits({name}=...))",),
                )
        return limits or self.limits

    async def _lease(self, code: str) -> Zygote:
        self._claim_loop()
        has_modules = self._needs_modules(code)
        idle = self._idle[has_modules]
        while idle:
            zygote = idle.popleft()
            if zygote.is_alive:
                break
            self._drop(zygote)
        else:
            starting = self._begin(self._start(has_modules))
            try:
                zygote = await asyncio.shield(starting)
            except asyncio.CancelledError:
                self._begin(self._shelve_when_started(starting))
                raise
        self._containers[zygote].num_leases += 1
        if not idle and has_modules not in self._stocking:
            self._stocking.add(has_modules)
            self._begin(self._stock(has_modules))
        return zygote

    async def _stock(self, has_modules: bool) -> None:
        """Start a container for the next call."""
        try:
            await self._shelve_when_started(self._begin(self._start(has_modules)))
        finally:
            self._stocking.discard(has_modules)

    async def _shelve_when_started(self, starting: asyncio.Task[Zygote]) -> None:
        # On failure no call is waiting for it; the next call that needs a container gets the error.
        with contextlib.suppress(SandboxError):
            self._shelve(await starting)

    def _release(self, zygote: Zygote) -> None:
        async def shelve_when_settled() -> None:
            await zygote.settle()
            self._shelve(zygote)

        if zygote.is_settled:
            self._shelve(zygote)
        elif not self._is_closed:
            self._begin(shelve_when_settled())

    def _shelve(self, zygote: Zygote) -> None:
        """Keep a container for its next lease, unless it is used up or enough are ready."""
        container = self._containers.get(zygote)
        if container is None:
            return  # the sandbox was closed meanwhile
        idle = self._idle[container.has_modules]
        is_good = zygote.is_alive and container.num_leases < _NUM_LEASES
        if is_good and len(idle) < self.num_workers + _NUM_SPARE:
            zygote.refill()
            idle.append(zygote)
        else:
            self._drop(zygote)

    def _drop(self, zygote: Zygote) -> None:
        zygote.close()
        del self._containers[zygote]

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start(self, has_modules: bool) -> Zygote:
        control, container = await self._engine.start(self._modules if has_modules else ())
        zygote = await Zygote.start(control, container, num_warm=1, is_exclusive=True)
        self._containers[zygote] = container
        return zygote


def _close_all(containers: dict[Zygote, Container]) -> None:
    for zygote in containers:
        zygote.close()
    containers.clear()
