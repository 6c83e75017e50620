"""Reports which parts of this machine areal-gym can use, and how to get missing ones."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_gym.config import SERVED_ENGINES
from areal_gym.errors import SandboxError
from areal_gym.version import __version__

_DISTRIBUTION = "areal-gym"
_MIN_DISK_GB, _MIN_SHARED_GB = 5.0, 1.0
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `areal-gym doctor`."""

    subject: str
    is_ok: bool
    detail: str
    advice: str = ""
    """What to type or do if it is missing or could be better."""
    is_required: bool = False
    """Whether areal-gym cannot work without it."""


def examine() -> Iterator[Finding]:
    """Check one thing after another; the slow ones (torch, the sandbox) take a second each."""
    yield _python()
    yield from _packages("", is_required=True)
    yield from _packages("train", is_required=False)
    yield _engine()
    yield _compiler()
    yield _gpu()
    yield _sandbox()
    yield _docker()
    yield _ray()
    yield _disk("disk", Path.cwd(), "runs are written here; free some space, or use --out")
    yield _disk("temporary files", Path(tempfile.gettempdir()), "free some space, or set TMPDIR")
    yield _shared_memory()


def _python() -> Finding:
    is_ok = sys.version_info >= (3, 11) and sys.platform == "linux"
    detail = f"{platform.python_version()} on {platform.system()} {platform.release()}"
    advice = "" if is_ok else "areal-gym needs Python 3.11 or newer, on Linux"
    return Finding("python", is_ok, detail, advice, is_required=True)


def _packages(extra: str, *, is_required: bool) -> Iterator[Finding]:
    """Compare the packages that areal-gym, or an extra, requires with those installed."""
    name = f"{_DISTRIBUTION}[{extra}]" if extra else _DISTRIBUTION
    subject = f"packages {extra}".strip()
    try:
        declared = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        detail = "areal-gym itself is not installed; it runs from its sources"
        yield Finding(subject, False, detail, "pip install -e .")
        return
    installed, missing = [f"{_DISTRIBUTION} {__version__}"] if not extra else [], []
    for line in declared:
        named = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", line.partition(";")[2])
        if (named[1] if named else "") != extra:
            continue
        package = re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]
        try:
            installed.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    detail = f"not installed: {', '.join(missing)}" if missing else ", ".join(installed)
    advice = f"pip install '{name}'" if missing else ""
    yield Finding(subject, not missing, detail, advice, is_required)


def _engine() -> Finding:
    has_torch = importlib.util.find_spec("torch") is not None
    servers = (
        f"{name}: "
        + ("ok" if importlib.util.find_spec(name) else "not in this environment (a URL will do)")
        for name in SERVED_ENGINES
    )
    return Finding(
        "engines",
        has_torch,
        f"embedded: {'ok' if has_torch else 'needs torch'}; " + "; ".join(servers),
        "" if has_torch else f"pip install '{_DISTRIBUTION}[train]'",
    )


def _compiler() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("C compiler", False, "not looked for: torch is not installed")
    from areal_gym.models.tiny.kernels.kernel_library import problem

    if (reason := problem()) is None:
        detail = "what sampling and training on a CPU have of their own is compiled"
        return Finding("C compiler", True, detail)
    detail = f"sampling and training on a CPU take up to twice as long: {reason}"
    return Finding("C compiler", False, detail, "install gcc or clang, or name one: CC=...")


def _gpu() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("gpu", False, "not looked for: torch is not installed")
    import torch

    from areal_gym.models.accelerator_facts import accelerator_facts

    facts = accelerator_facts()
    if facts is None:
        detail = f"none that torch {torch.__version__} can use; training is on CPU"
        return Finding("gpu", False, detail)
    lacks = facts.lacks()
    detail = f"{facts.kind} ({facts.build}): {'; '.join(facts.devices)}"
    detail += f"; collectives: {facts.collectives or 'none'}"
    detail += f"; lacks {', '.join(lacks)}" if lacks else "; has all that areal-gym can use"
    return Finding("gpu", True, detail)


_NOT_PROMISED = {
    "isolated": "",
    "filtered": "; not promised: a root directory, processes and a network of a snippet's own "
    "(it reads the system's files, may not fork, and only two filters keep it from the rest), and "
    "a bound on the sum of its files",
    "none": "; nothing is promised: snippets are this user, with its files, network and processes",
}


def _sandbox() -> Finding:
    from areal_gym.sandbox import ProcessSandbox, SandboxLevel
    from areal_gym.sandbox.levels import write_level

    async def look() -> Finding:
        async with ProcessSandbox(num_workers=1, min_level=SandboxLevel.NONE) as sandbox:
            report = await sandbox.report()
            result = await sandbox.run("print(6 * 7)")
        write_level(report.level)
        advice = {
            SandboxLevel.ISOLATED: "",
            SandboxLevel.FILTERED: "as root, or where user namespaces are allowed, it isolates: "
            "sysctl kernel.unprivileged_userns_clone=1",
            SandboxLevel.NONE: "Linux 5.13 has Landlock for any user; or env.kwargs.sandbox=docker",
        }[report.level]
        is_ok = result.stdout == "42\n" and report.level is not SandboxLevel.NONE
        detail = f"level {report.level}: {', '.join(report.protections)}"
        detail += _NOT_PROMISED[report.level]
        return Finding("sandbox", is_ok, detail, advice, is_required=True)

    return _unless_it_fails("sandbox", look, is_required=True)


def _docker() -> Finding:
    from areal_gym.sandbox.containers import connect
    from areal_gym.sandbox.docker import DEFAULT_IMAGE

    async def look() -> Finding:
        client = await asyncio.to_thread(connect)
        try:
            version = client.version()["Version"]
            has_image = bool(client.images.list(name=DEFAULT_IMAGE))
        finally:
            client.close()
        image = f"{'' if has_image else 'no '}image {DEFAULT_IMAGE}"
        advice = "" if has_image else "python -m areal_gym.sandbox.image"
        return Finding("docker", has_image, f"engine {version}; {image}", advice)

    return _unless_it_fails("docker", look, is_required=False)


def _unless_it_fails(
    subject: str, look: Callable[[], Coroutine[Any, Any, Finding]], *, is_required: bool
) -> Finding:
    try:
        return asyncio.run(look())
    except SandboxError as error:
        return Finding(subject, False, error.message, next(iter(error.hints), ""), is_required)


def _ray() -> Finding:
    try:
        return Finding("ray", True, importlib.metadata.version("ray"))
    except importlib.metadata.PackageNotFoundError:
        detail, advice = "not installed; one machine does without", f"'{_DISTRIBUTION}[ray]'"
        return Finding("ray", False, detail, f"pip install {advice}")


def _disk(subject: str, place: Path, advice: str) -> Finding:
    free_gb = shutil.disk_usage(place).free / 2**30
    is_writable = os.access(place, os.W_OK)
    is_ok = free_gb >= _MIN_DISK_GB and is_writable
    detail = f"{free_gb:.1f} GB free in {place}{'' if is_writable else ', which is read-only'}"
    return Finding(subject, is_ok, detail, "" if is_ok else advice, is_required=not is_writable)


def _shared_memory() -> Finding:
    subject = "shared memory"
    if not _SHARED_MEMORY.is_dir():
        return Finding(subject, False, f"no {_SHARED_MEMORY}", "mount a tmpfs there")
    total_gb = shutil.disk_usage(_SHARED_MEMORY).total / 2**30
    is_ok = total_gb >= _MIN_SHARED_GB
    advice = "several GPUs need more; in a container: docker run --shm-size=2g"
    detail = f"{total_gb:.1f} GB in {_SHARED_MEMORY}"
    return Finding(subject, is_ok, detail, "" if is_ok else advice)
