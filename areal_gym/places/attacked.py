"""Local places under attack: a sandbox that runs each snippet in a place of its own.

    python -m areal_gym.sandbox.suite -p areal_gym.places.attacked --sandbox local-place --fresh

A plugin of the suite of hostile programs (docs/sandbox.md), which run as root of the place.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable

from areal_gym.errors import SandboxError
from areal_gym.places.base import CommandResult, Place, PlaceImage, PlaceLimits
from areal_gym.places.local_images import HOST_ROOT
from areal_gym.places.local_places import LocalPlaces
from areal_gym.plugins import SandboxSpec, hookimpl
from areal_gym.sandbox.base import (
    Sandbox,
    SandboxLevel,
    SandboxLimits,
    SandboxReport,
    SandboxResult,
    SandboxStatus,
    Session,
)

_STORAGE_MB = 16
_VALUE_BYTES = 100_000
_RUNNER = """
import ast
tree = ast.parse(open("/snippet/code.py", errors="surrogateescape").read())
last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
names = {"__name__": "__main__", "__builtins__": __builtins__}
exec(compile(tree, "<snippet>", "exec"), names)
if last is not None:
    value = eval(compile(ast.Expression(last.value), "<snippet>", "eval"), names)
    if value is not None:
        with open("/snippet/value", "w") as file:
            file.write(repr(value)[:8000])
"""


class PlaceSandbox(Sandbox):
    """Runs each snippet in a fresh local place.

    Args:
        user: the user of the place that runs it. Default: root.
    """

    def __init__(self, *, user: str = "0") -> None:
        self._user = user
        self._places = LocalPlaces(packages=("numpy", "sympy"))

    async def run(self, code: str, *, limits: SandboxLimits | None = None) -> SandboxResult:
        """Execute `code` in a new place, which is removed; SandboxError if there is none."""
        limits = limits or SandboxLimits()
        bounds = PlaceLimits(
            memory_mb=limits.memory_mb,
            storage_mb=_STORAGE_MB,
            num_processes=limits.num_processes,
        )
        place = await self._places.start(PlaceImage(reference=HOST_ROOT), bounds)
        try:
            await place.put(_snippet(code), "/snippet")
            command = ["python3", "-I", "-c", _RUNNER]
            seconds = min(limits.wall_s, limits.cpu_s)
            result = await place.run(command, cwd="/tmp", user=self._user, timeout_s=seconds)
            await place.freeze()
            return await _result(place, result, limits, seconds)
        finally:
            await place.aclose()

    async def session(self) -> Session:
        """Refuse: a place keeps files, and no interpreter."""
        raise SandboxError("a place has no sessions of an interpreter")

    async def report(self) -> SandboxReport:
        """Return the walls of local places on this machine."""
        walls = await self._places.report()
        return SandboxReport(
            backend="local-place", level=SandboxLevel.ISOLATED, protections=tuple(walls)
        )

    async def aclose(self) -> None:
        """End all places. Idempotent."""
        await self._places.aclose()


def _snippet(code: str) -> bytes:
    buffer = io.BytesIO()
    data = code.encode("utf-8", "surrogateescape")
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        folder = tarfile.TarInfo(".")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o777
        tar.addfile(folder)
        entry = tarfile.TarInfo("code.py")
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


async def _result(
    place: Place, result: CommandResult, limits: SandboxLimits, seconds: float
) -> SandboxResult:
    status = SandboxStatus.OK if result.exit_code == 0 else SandboxStatus.ERROR
    if result.exit_code > 128:
        status = SandboxStatus.KILLED
    if result.is_timed_out:
        status = SandboxStatus.TIMEOUT
    archive = await place.take(["/snippet/value"], max_bytes=_VALUE_BYTES)
    value = None
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isreg() else None
            value = None if content is None else content.read().decode(errors="replace")
    size = limits.output_bytes
    return SandboxResult(
        status=status,
        stdout=result.stdout[:size].decode(errors="replace"),
        stderr=result.stderr[-size:].decode(errors="replace"),
        value=value,
        elapsed_s=seconds if result.is_timed_out else 0.0,
    )


@hookimpl
def register_sandboxes() -> Iterable[SandboxSpec]:
    """Yield the sandbox."""
    yield SandboxSpec(
        id="local-place",
        entry_point="areal_gym.places.attacked:PlaceSandbox",
        summary="a local place for each snippet",
    )
