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

_FORMAT = "3"  # raised when the same interpreter needs another root
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
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?")
_OF_EXTRA = re.compile(r"""\bextra\s*==\s*['"]([^'"]+)['"]""")


def host_root_key(packages: Sequence[str]) -> str:
    """Return a hash of what a root would be made of: interpreter, tools and packages."""
    digest = hashlib.sha256(f"{_FORMAT} {sys.version} {sys.base_prefix}".encode())
    for path in (*_programs().values(), *find_distributions(packages)):
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
    for metadata in find_distributions(packages):
        for path, inside in distribution_files(metadata):
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


def find_distributions(packages: Sequence[str], paths: Sequence[str] | None = None) -> list[str]:
    """Return the metadata folders of installed packages and of what they require, sorted.

    Args:
        packages: names of distributions, also with extras: `uvicorn[standard]`.
        paths: the folders in which they are looked for; None: those of this interpreter.

    Raises:
        SandboxError: a package is not installed.
    """
    folders: dict[str, str] = {}
    where = sys.path if paths is None else list(paths)
    waiting = [(text, True) for text in packages]
    while waiting:
        text, is_asked = waiting.pop()
        match = _REQUIREMENT.match(text)
        name = match[1] if match else text
        distribution = next(
            iter(importlib.metadata.Distribution.discover(name=name, path=where)), None
        )
        if distribution is None:
            if is_asked:
                raise SandboxError(
                    f"the package {name!r} is not installed here, so no root can have it",
                    hints=(f"pip install {name}",),
                )
            continue  # of another system, or of another Python
        extras = {"", *re.split(r"\s*,\s*", match[2] or "")} if match else {""}
        for extra in extras:
            key = f"{name.lower()}[{extra}]"
            if key not in folders:
                folders[key] = str(getattr(distribution, "_path", ""))
                waiting += [(each, False) for each in _requirements(distribution, extra)]
    return sorted(set(folders.values()))


def _requirements(distribution: importlib.metadata.Distribution, extra: str) -> Iterator[str]:
    """Yield what a distribution requires always (extra ""), or for one of its extras."""
    for requirement in distribution.requires or ():
        match = _OF_EXTRA.search(requirement)
        if (match[1] if match else "") == extra:
            yield requirement


def distribution_files(metadata: str) -> Iterator[tuple[str, str]]:
    """Yield the files of a distribution, with their paths inside site-packages."""
    distribution = importlib.metadata.Distribution.at(metadata)
    for file in distribution.files or ():
        path = str(file.locate())
        if not str(file).startswith("..") and os.path.isfile(path):
            yield path, str(file)
