"""Builds the image of the sandbox `docker`.

python -m areal_gym.sandbox.image               from the Dockerfile beside this module
python -m areal_gym.sandbox.image --from-host   from this interpreter, without a registry
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from areal_gym.errors import SandboxError

_PACKAGES = ("numpy", "sympy", "mpmath")
_PROGRAMS = ("/bin/sh", "/usr/bin/env", "/bin/cat", "/bin/ls", "/bin/sleep")
# The libraries that a wheel may expect of a system (PEP 600), but those of X11 and GLib.
_EXPECTED = (
    *("libgcc_s.so.1", "libstdc++.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libutil.so.1"),
    *("libpthread.so.0", "libresolv.so.2", "libz.so.1", "libexpat.so.1"),
)
_LEFT_OUT = {
    *("__pycache__", "test", "tests", "idlelib", "ensurepip", "tkinter", "turtledemo", "lib2to3"),
    *("site-packages", "include", "share"),
}
_ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
}


def build_image(client: Any, tag: str, *, base: str | None = None) -> str:
    """Build the Dockerfile here, on `base` if given, or raise SandboxError; return the id."""
    import docker

    try:
        folder, arguments = str(Path(__file__).parent), {"BASE": base} if base else {}
        image, _ = client.images.build(path=folder, tag=tag, buildargs=arguments, rm=True)
    except docker.errors.BuildError as error:
        lines = "".join(entry.get("stream", "") for entry in error.build_log)
        raise SandboxError(f"the image was not built: {error}\n{lines[-1000:]}") from error
    except docker.errors.APIError as error:
        raise SandboxError(
            f"the image was not built: {error}",
            hints=("without a registry: python -m areal_gym.sandbox.image --from-host",),
        ) from error
    return str(image.id)


def import_host(client: Any, tag: str) -> str:
    """Import this interpreter, numpy and sympy as an image or raise SandboxError; return the id."""
    import docker

    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            _write_root(tar)
        file.seek(0)
        try:
            client.api.import_image_from_data(
                file, repository=tag, changes=["ENV PATH=/usr/local/bin:/usr/bin:/bin"]
            )
            return str(client.images.get(tag).id)
        except docker.errors.APIError as error:
            raise SandboxError(f"the image was not imported: {error}") from error


def _write_root(tar: tarfile.TarFile) -> None:
    written: set[str] = set()
    library = sysconfig.get_path("stdlib")
    site_packages = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    python = os.path.realpath(f"{sys.base_prefix}/bin/python3")
    binaries = [path for path in _PROGRAMS if os.path.exists(path)]
    for path in (python, *binaries):
        add_file(tar, os.path.realpath(path), path, written)
    targets = {path: path for path in _files(library)}
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            continue
        (package,) = spec.submodule_search_locations
        # The libraries of a wheel are beside its package.
        for path in chain(_files(package), _files(f"{package}.libs")):
            inside = os.path.relpath(path, os.path.dirname(package))
            targets[path] = f"{site_packages}/{inside}"
    for path, target in targets.items():
        add_file(tar, path, target, written)
    binaries += [path for path in targets if ".so" in path]
    add_system_files(tar, written, python=python, binaries=binaries, directories=("areal-gym",))


def add_system_files(
    tar: tarfile.TarFile,
    written: set[str],
    *,
    python: str,
    binaries: Iterable[str],
    directories: Iterable[str] = (),
) -> None:
    """Add what a root file system needs beside its programs.

    These are the libraries of `binaries`, accounts, directories, and the names under which
    `python`, the path of an interpreter, is found.
    """
    for path in _libraries([python, *binaries]):
        add_file(tar, os.path.realpath(path), path, written)
    for name, text in _ACCOUNTS.items():
        with tempfile.NamedTemporaryFile("w") as account:
            account.write(text)
            account.flush()
            add_file(tar, account.name, f"/{name}", written)
    for name in ("tmp", "proc", "sys", "dev", *directories):
        _add_directory(tar, f"/{name}", written)
    for name in ("python3", "python"):
        link = tarfile.TarInfo(f"usr/local/bin/{name}")
        link.type, link.linkname = tarfile.SYMTYPE, python
        _add_directory(tar, "/usr/local/bin", written)
        tar.addfile(link)


def _files(root: str) -> Iterator[str]:
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _LEFT_OUT]
        yield from (os.path.join(directory, name) for name in files if not name.endswith(".a"))


def _libraries(binaries: list[str]) -> set[str]:
    """Return the libraries that the dynamic linker loads for them."""
    listing = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False)
    paths = {os.path.normpath(p) for p in re.findall(r"(?:=> |^\t)(/\S+)", listing.stdout, re.M)}
    paths |= {f"{os.path.dirname(path)}/{name}" for path in paths for name in _EXPECTED}
    return {path for path in paths if os.path.exists(path)}


def add_file(tar: tarfile.TarFile, source: str, target: str, written: set[str]) -> None:
    """Add a file as `target`, owned by root and readable by every user."""
    if target in written:
        return
    written.add(target)
    _add_directory(tar, os.path.dirname(target), written)
    entry = tar.gettarinfo(os.path.realpath(source), target.lstrip("/"))
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755 if entry.mode & 0o100 else 0o644
    entry.type = tarfile.REGTYPE  # also for the second of two hard links
    entry.size = os.path.getsize(source)
    with open(source, "rb") as file:
        tar.addfile(entry, file)


def _add_directory(tar: tarfile.TarFile, target: str, written: set[str]) -> None:
    if target in written or target == "/":
        return
    written.add(target)
    _add_directory(tar, os.path.dirname(target), written)
    entry = tarfile.TarInfo(target.lstrip("/"))
    entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if target == "/tmp" else 0o755
    tar.addfile(entry)
