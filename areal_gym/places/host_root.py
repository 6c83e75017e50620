"""The root directory of local places that is made of this machine's own files.

It holds the running interpreter with its standard library, a shell and the tools that tasks
commonly use, the libraries that these load, and packages that are asked for by name.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import os
import re
import shutil
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence

from areal_gym.errors import SandboxError
from areal_gym.sandbox.image import add_file, add_system_files

_FORMAT = "1"  # raised when the same interpreter needs another root
_PROGRAMS = (
    *("sh", "bash", "cat", "cp", "mv", "rm", "mkdir", "rmdir", "ln", "chmod", "chown", "touch"),
    *("head", "tail", "wc", "sort", "uniq", "cut", "tr", "tee", "echo", "printf", "env", "sleep"),
    *(
        "date",
        "pwd",
        "basename",
        "dirname",
        "readlink",
        "realpath",
        "stat",
        "mkfifo",
        "du",
        "df",
        "id",
    ),
    *("whoami", "true", "false", "test", "[", "expr", "seq", "yes", "mktemp", "install", "ls"),
    *("sha256sum", "md5sum", "od", "nl", "paste", "join", "comm", "split", "tac", "kill", "dd"),
    *("nproc", "uname", "timeout", "nohup", "nice", "fold", "rev", "which", "grep", "egrep"),
    *("fgrep", "sed", "awk", "find", "xargs", "diff", "cmp", "patch", "tar", "gzip", "gunzip"),
    *("bzip2", "xz", "ps", "setpriv", "su", "make", "git", "base64", "base32", "chgrp", "cksum"),
    *("csplit", "expand", "factor", "fmt", "groups", "link", "logname", "numfmt", "pr", "ptx"),
    *("shuf", "stdbuf", "sum", "sync", "truncate", "tsort", "tty", "unexpand", "unlink", "zcat"),
    *("sha1sum", "sha512sum", "pgrep", "pkill", "free", "hostname", "getopt", "flock", "setsid"),
)
_LEFT_OUT = {
    *("test", "tests", "idlelib", "ensurepip", "tkinter", "turtledemo", "lib2to3"),
    *("site-packages", "include", "share"),
}
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
    "etc/hosts": "127.0.0.1 localhost place\n",
}
_REQUIREMENT = re.compile(r"^[A-Za-z0-9._-]+")


def host_root_key(packages: Sequence[str]) -> str:
    """Return a hash of what a root would be made of: interpreter, tools and packages."""
    digest = hashlib.sha256(f"{_FORMAT} {sys.version} {sys.base_prefix}".encode())
    for path in (*_programs().values(), *_distributions(packages)):
        about = os.stat(path)
        digest.update(f"{path} {about.st_size} {about.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:20]


def write_host_root(tar: tarfile.TarFile, packages: Sequence[str]) -> None:
    """Write the root's files to an archive; an unknown package is a SandboxError."""
    written: set[str] = set()
    library = sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix})
    site_packages = sysconfig.get_path("purelib", vars={"base": sys.base_prefix})
    python = os.path.realpath(f"{sys.base_prefix}/bin/python3")
    programs = _programs()
    targets = {path: path for path in (python, *_files(library))}
    targets |= {path: f"/usr/bin/{name}" for name, path in programs.items()}
    for metadata in _distributions(packages):
        for path, inside in _distribution_files(metadata):
            targets[path] = f"{site_packages}/{inside}"
    for path, target in targets.items():
        add_file(tar, path, target, written)
    for name, text in _FILES.items():
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(text), 0o644
        tar.addfile(entry, io.BytesIO(text.encode()))
        written.add(f"/{name}")
    binaries = [*programs.values(), *(path for path in targets if ".so" in path)]
    add_system_files(
        tar,
        written,
        python=python,
        binaries=binaries,
        directories=("root", "home", "opt", "usr/local/lib", "var/tmp", "run", "etc"),
    )
    names = {f"bin/{name}": f"/usr/bin/{name}" for name in programs}
    names |= {"usr/bin/python3": python, "usr/bin/python": python}
    for name, link in names.items():
        if f"/{name}" not in written:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, link
            tar.addfile(entry)


def _programs() -> dict[str, str]:
    """Return the paths of the tools that this machine has, by name."""
    paths = {name: shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin") for name in _PROGRAMS}
    return {name: os.path.realpath(path) for name, path in paths.items() if path}


def _files(root: str) -> Iterator[str]:
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _LEFT_OUT]
        yield from (os.path.join(directory, name) for name in files if not name.endswith(".a"))


def _distributions(packages: Sequence[str]) -> list[str]:
    """Return the metadata folders of installed packages and of what they require, sorted."""
    folders: dict[str, str] = {}
    waiting = [(name, True) for name in packages]
    while waiting:
        name, is_asked = waiting.pop()
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if is_asked:
                raise SandboxError(
                    f"the package {name!r} is not installed here, so no root can have it",
                    hints=(f"pip install {name}",),
                ) from None
            continue  # of an extra, or of another system
        folder = str(getattr(distribution, "_path", ""))
        if folder in folders.values():
            continue
        folders[name.lower()] = folder
        for requirement in distribution.requires or ():
            match = _REQUIREMENT.match(requirement)
            if match and "extra ==" not in requirement:
                waiting.append((match.group(), False))
    return sorted(folders.values())


def _distribution_files(metadata: str) -> Iterator[tuple[str, str]]:
    """Yield the files of a distribution, with their paths inside site-packages."""
    distribution = importlib.metadata.Distribution.at(metadata)
    for file in distribution.files or ():
        path = str(file.locate())
        if not str(file).startswith("..") and os.path.isfile(path):
            yield path, str(file)
