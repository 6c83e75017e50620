"""The docker sandbox: the same fork servers, each as the first process of a container.

The engine must run on this machine (dockerd, or podman's compatible socket): a container reaches
us through a socket that is mounted into it, and over it we hand the descriptors of each snippet to
the fork server. So a call costs a fork, not a `docker exec`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from areal_gym.errors import SandboxError, SandboxUnreachableError, UsageError
from areal_gym.sandbox.base import SandboxLevel, SandboxLimits, SandboxReport
from areal_gym.sandbox.forking import ForkingSandbox
from areal_gym.sandbox.process import ENVIRONMENT
from areal_gym.sandbox.zygotes import Zygote

T = TypeVar("T")

DEFAULT_IMAGE = "areal-gym-sandbox"
LABEL = "areal-gym.sandbox"
"""On every container of ours; its value names the object that made it."""

_USUAL_HOST = "unix:///var/run/docker.sock"
_HOME = "/areal-gym"  # where a container sees our socket and the worker's modules
_TMP_OPTIONS = "rw,nosuid,nodev,noexec,size=64m,mode=1777"
_SCRATCH = "/tmp/areal-gym"
_PREFIX = "areal-gym-container-"  # of the directory of a socket, while its container starts
_START_S = 60.0
_SERVER_MB = 96
_SERVER_PROCESSES = 8
_ABANDONED_S = 300.0
_NUM_SPARE = 1
_NUM_LEASES = 2_000
"""After so many a container is replaced: whatever piles up in one, piles up no further."""

_BOOT = f"""
import json, os, site, socket, sys
sys.path[0] = {_HOME!r}
from worker import zygote
del sys.path[0]
settings = json.loads(sys.argv[1])
paths = [path for path in site.getsitepackages() if os.path.isdir(path)]
control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
control.connect({_HOME!r} + "/socket/s")
zygote.main(control, None, dict(settings, paths=paths))
"""

_PROTECTIONS = (
    *("container", "network namespace", "pid namespace", "ipc namespace", "read-only root"),
    *("no capabilities", "private uid", "process count", "memory sum"),
)


def connect() -> Any:
    """A client of the engine that DOCKER_HOST names, or of the usual socket.

    Raises:
        SandboxError: the package `docker` is not installed, or no engine answers.
    """
    try:
        import docker
    except ImportError:
        raise SandboxError(
            "the sandbox 'docker' needs the package docker",
            hints=("pip install 'areal-gym[docker]'",),
        ) from None
    host = os.environ.get("DOCKER_HOST") or _USUAL_HOST
    try:
        _require_listener(host)
        return docker.from_env()
    except (docker.errors.DockerException, OSError) as error:
        raise SandboxUnreachableError(
            f"no Docker engine answers at {host}: {error}",
            hints=("start one: systemctl start docker", "or name another in DOCKER_HOST"),
        ) from error


def _require_listener(host: str) -> None:
    """Connects to the engine's socket: the package would leave its own open when nobody listens.

    Raises:
        OSError: nobody listens.
    """
    if host.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(host.removeprefix("unix://"))


class DockerSandbox(ForkingSandbox):
    """Runs untrusted Python in warm containers: no network, nothing of this machine's files.

    A container is leased for one call, or for the life of one session; in it a fork server
    forks a cell for each. After a call everything else in the container is ended, and the
    container serves the next; one that does not come back is replaced. The root is read-only,
    there are no capabilities and no new privileges, the user is an unprivileged one; memory and
    processes are counted by the kernel over the whole container. Landlock and seccomp hold inside
    as in the process sandbox.

    Args:
        image: with a python3 (3.9 or later) in PATH. `python -m areal_gym.sandbox.image` makes
            the default one.
        num_workers: calls that execute at a time; more wait in order. Default: one for each
            processor, at most 8. As many containers wait for them.
        max_sessions: sessions that are open at a time; each has a container of its own.
        limits: for calls that name none. Calls may ask for less memory and fewer processes, not
            for more: containers are made with these.
        modules: imported ahead in containers for snippets that mention one of them.
        runtime: the container runtime, by the name that the engine knows it by: "runsc" (gVisor:
            a kernel of its own between snippets and this machine's), "crun", "kata", ... Default:
            the environment variable AREAL_GYM_DOCKER_RUNTIME, else the engine's default.
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
        self._id = f"{os.getpid()}-{secrets.token_hex(6)}"
        self._client: Any = None
        self._host = ""
        self._idle: dict[bool, deque[Zygote]] = {False: deque(), True: deque()}
        self._connecting = asyncio.Lock()
        self._containers: dict[Zygote, _Container] = {}
        self._is_stocking = {False: False, True: False}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._finalizer = weakref.finalize(self, _close_all, self._containers)

    def zygotes(self) -> list[Zygote]:
        """The fork servers that there are now."""
        return list(self._containers)

    async def report(self) -> SandboxReport:
        """What protects this machine from the snippets.

        Raises:
            SandboxError: no engine answers, or it makes no container of the image.
        """
        zygote = await self._lease("")
        self._release(zygote)
        runtime = (f"runtime {self.runtime}",) if self.runtime else ()
        protections = (*_PROTECTIONS, *runtime, *zygote.protections)
        return SandboxReport(
            backend=self.backend, level=SandboxLevel.ISOLATED, protections=protections
        )

    async def aclose(self) -> None:
        """End every container, and wait until the engine has forgotten them. Idempotent."""
        self._is_closed = True
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._forget()
        client, self._client = self._client, None
        if client is not None:
            await asyncio.to_thread(_remove_all, client, self._id)

    def _forget(self) -> None:
        _close_all(self._containers)
        for has_modules, idle in self._idle.items():
            idle.clear()
            self._is_stocking[has_modules] = False
        self._tasks.clear()

    def _checked(self, limits: SandboxLimits | None) -> SandboxLimits:
        for name in ("memory_mb", "num_processes"):
            ours = getattr(self.limits, name)
            if limits is not None and getattr(limits, name) > ours:
                raise UsageError(
                    f"a call asks for {name} = {getattr(limits, name)}; "
                    f"the containers of this sandbox were made with {ours}",
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
        if not idle and not self._is_stocking[has_modules]:
            self._is_stocking[has_modules] = True
            self._begin(self._stock(has_modules))
        return zygote

    async def _stock(self, has_modules: bool) -> None:
        """Start a container for whoever comes next."""
        try:
            await self._shelve_when_started(self._begin(self._start(has_modules)))
        finally:
            self._is_stocking[has_modules] = False

    async def _shelve_when_started(self, starting: asyncio.Task[Zygote]) -> None:
        # When it fails nobody waits for it; whoever needs a container next is told.
        with contextlib.suppress(SandboxError):
            self._shelve(await starting)

    def _release(self, zygote: Zygote) -> None:
        if zygote.is_settled:
            self._shelve(zygote)
        elif not self._is_closed:
            self._begin(self._shelve_when_settled(zygote))

    async def _shelve_when_settled(self, zygote: Zygote) -> None:
        await zygote.settle()
        self._shelve(zygote)

    def _shelve(self, zygote: Zygote) -> None:
        """Let a container wait for its next lease, unless it has served or enough wait."""
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
        async with self._connecting:
            if self._client is None:
                self._host = os.environ.get("DOCKER_HOST") or _USUAL_HOST
                self._client = await asyncio.to_thread(connect)
                await asyncio.to_thread(_remove_abandoned, self._client)
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            # Whoever runs in the container may pass, and nobody else gets as far as here.
            place = directory / "socket"
            place.mkdir()
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(str(place / "s"))
                for path, mode in ((place, 0o711), (place / "s", 0o666)):
                    path.chmod(mode)
                listener.listen(1)
                listener.setblocking(False)
                engine_side = await asyncio.to_thread(self._create, place, has_modules)
                control = await _accept(listener, engine_side, self.image)
        finally:
            shutil.rmtree(directory)
        container = _Container(has_modules, int(engine_side.attrs["State"]["Pid"]))
        zygote = await Zygote.start(control, container, num_warm=1, is_exclusive=True)
        self._containers[zygote] = container
        return zygote

    def _inode_limit(self) -> str:
        """Podman's parser knows no such option of tmpfs; its containers have only the size."""
        engines = [part["Name"] for part in self._client.version().get("Components", ())]
        return "" if "Podman Engine" in engines else ",nr_inodes=4096"

    def _require_runtime(self) -> None:
        """Names the runtimes that there are, when the engine has none of the asked-for name.

        Raises:
            SandboxError: the engine knows no such runtime.
        """
        import docker
        import requests

        if self.runtime is None:
            return
        try:
            known = self._client.info().get("Runtimes") or {}
        except (docker.errors.DockerException, requests.RequestException):
            return  # the engine is gone; its last error says so
        if known and self.runtime not in known:
            raise SandboxError(
                f"the engine has no container runtime {self.runtime!r}; "
                f"it has: {', '.join(sorted(known))}",
                hints=(
                    "register it: "
                    f'{{"runtimes": {{"{self.runtime}": {{"path": "..."}}}}}} '
                    "in /etc/docker/daemon.json, and restart the engine",
                ),
            ) from None

    def _create(self, place: Path, has_modules: bool) -> Any:
        """Make and start a container; the SDK's object for it."""
        import docker
        import requests

        settings = {
            "modules": self._modules if has_modules else (),
            "without": ("namespaces",),
            "readable": ("/",),
            "scratch": _SCRATCH,
            "is_container": True,
        }
        uid = 20_000 + secrets.randbelow(40_000)
        memory = f"{self.limits.memory_mb + _SERVER_MB}m"
        worker = Path(__file__).with_name("worker")
        try:
            _require_listener(self._host)
            # Not `run`, which would download an image that is not there.
            container = self._client.containers.create(
                self.image,
                entrypoint=["python3", "-s", "-S", "-X", "utf8", "-c", _BOOT],
                command=[json.dumps(settings)],
                environment=ENVIRONMENT,
                labels={LABEL: self._id},
                volumes={
                    str(place): {"bind": f"{_HOME}/socket", "mode": "ro"},
                    str(worker): {"bind": f"{_HOME}/worker", "mode": "ro"},
                },
                tmpfs={"/tmp": _TMP_OPTIONS + self._inode_limit()},
                user=f"{uid}:{uid}",  # its own, since the kernel counts processes by user
                working_dir="/",
                runtime=self.runtime,
                network_mode="none",
                ipc_mode="none",
                read_only=True,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                mem_limit=memory,
                memswap_limit=memory,
                pids_limit=self.limits.num_processes + _SERVER_PROCESSES,
                nano_cpus=10**9,
                ulimits=[
                    docker.types.Ulimit(name=name, soft=limit, hard=limit)
                    # podman's own default may be more than it is allowed itself
                    for name, limit in (("core", 0), ("nofile", 1024), ("nproc", 4096))
                ],
                log_config=docker.types.LogConfig(type="none"),
                auto_remove=True,
            )
            container.start()
            container.reload()  # now it has a pid
        except docker.errors.ImageNotFound:
            raise SandboxError(
                f"the engine has no image {self.image!r}",
                hints=(
                    "build it: python -m areal_gym.sandbox.image",
                    "without a registry, from this interpreter: "
                    "python -m areal_gym.sandbox.image --from-host",
                ),
            ) from None
        except (docker.errors.DockerException, OSError) as error:
            is_gone = isinstance(error, ConnectionError | FileNotFoundError)
            is_gone |= isinstance(error, requests.ConnectionError)
            if not is_gone:
                self._require_runtime()
            raise (SandboxUnreachableError if is_gone else SandboxError)(
                f"no container of {self.image!r} could be started"
                + (f" by the runtime {self.runtime!r}" if self.runtime else "")
                + f": {error}",
                hints=("the engine must run on this machine: it mounts a socket of ours",),
            ) from error
        finally:
            # It keeps a connection for each address, of which every container has several.
            self._client.close()
        return container


@dataclass(slots=True)
class _Container:
    """A container's part as the home of a fork server."""

    has_modules: bool
    pid: int
    num_leases: int = 0

    @property
    def scratch(self) -> str:
        """Seen through the container's first process, which takes root."""
        return f"/proc/{self.pid}/root{_SCRATCH}"

    def complaint(self) -> str:
        """Nothing is left of it that could be asked."""
        return "its container ended"

    def end(self) -> None:
        """Its first process ends with the socket, all others with it, and the engine removes it."""


async def _accept(listener: socket.socket, container: Any, image: str) -> socket.socket:
    """The connection that comes out of the container."""
    import docker
    import requests

    loop = asyncio.get_running_loop()
    deadline = loop.time() + _START_S
    accepting = loop.create_task(loop.sock_accept(listener))
    reason = f"not within {_START_S:g} s"
    try:
        while loop.time() < deadline:
            await asyncio.wait({accepting}, timeout=1.0)
            if accepting.done():
                return accepting.result()[0]
            await asyncio.to_thread(container.reload)
    except docker.errors.NotFound:
        reason = "it has ended"
    except (docker.errors.DockerException, requests.RequestException) as error:
        reason = str(error)
    finally:
        accepting.cancel()
    raise SandboxError(
        f"a container of {image!r} started and did not answer: {reason}",
        hints=("does the image have python3 in PATH, 3.9 or later?",),
    )


def _remove_all(client: Any, id: str) -> None:
    """Wait until no container of `id` is left; force those that stay."""
    import docker

    deadline = time.monotonic() + 2.0
    try:
        ours = {"label": f"{LABEL}={id}"}
        while left := client.containers.list(all=True, sparse=True, filters=ours):
            if time.monotonic() > deadline:
                for container in left:
                    with contextlib.suppress(docker.errors.APIError):
                        container.remove(force=True)
            time.sleep(0.02)
    finally:
        client.close()


def _remove_abandoned(client: Any) -> None:
    """Remove what is left of owners that were killed while they started a container.

    All other containers end, and the engine removes them, when the socket of their owner closes.
    """
    import docker

    oldest = time.time() - _ABANDONED_S
    filters = {"label": LABEL, "status": "created"}
    for container in client.containers.list(all=True, sparse=True, filters=filters):
        if container.attrs["Created"] < oldest:
            with contextlib.suppress(docker.errors.APIError):
                container.remove(force=True)
    for place in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/socket"):
        with contextlib.suppress(OSError):
            if place.stat().st_mtime < oldest:
                shutil.rmtree(place.parent)


def _close_all(containers: dict[Zygote, _Container]) -> None:
    for zygote in containers:
        zygote.close()
    containers.clear()
