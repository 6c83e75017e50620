"""Files of places and of image layers, read and written from outside without following links.

A path inside is opened as if the place's root were "/", by the kernel (`openat2`), which refuses
links on the way; names below an open directory are opened relative to it. So a program of the
place cannot lead a helper elsewhere, whatever it does meanwhile.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import stat
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from . import kernel
from .cleaning import remove_tree
from .place_users import UserRange
from .place_walls import STAGE, raise_loopback

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_NO_FOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_MAX_DEPTH = 200  # each level holds a descriptor open
_BACKLOG = 128
_OPAQUE = "overlay.opaque"
_MOUNTED = ("/proc", "/dev", "/sys")


class RefusedError(Exception):
    """An order that cannot be executed; the text says why."""


class PlaceFiles:
    """The files of one place, below `root`, whose users are `users`."""

    def __init__(self, root: str, users: UserRange, layers: str) -> None:
        self._place = root
        self._users = users
        self._layers = layers

    def put(self, source: BinaryIO, path: str, *, root: str | None = None) -> None:
        """Unpack an archive below the folder `path`, which is made; owners are the archive's."""
        top = os.open(root or f"{self._place}/root", _DIRECTORY)
        base = self._make_folders(top, _names(path), mode=0o755)
        times: list[tuple[list[str], float]] = []
        with tarfile.open(fileobj=source, mode="r|") as tar:
            for member in tar:
                names = _names(member.name)
                if member.isdir():
                    folder = self._make_folders(base, names, mode=0o755)
                    self._finish(folder, member)
                    times.append((names, member.mtime))
                    os.close(folder)
                elif names:
                    parent = self._make_folders(base, names[:-1], mode=0o755)
                    self._write(tar, member, base, parent, names[-1])
                    os.close(parent)
        for names, seconds in reversed(times):
            folder = kernel.open_beneath(base, "/".join(names) or ".", _DIRECTORY)
            os.utime(folder, (seconds, seconds))
            os.close(folder)

    def _make_folders(self, top: int, names: list[str], mode: int) -> int:
        """Return a descriptor of a folder below `top`; folders that are missing are made."""
        folder = os.dup(top)
        for name in names:
            try:
                inner = os.open(name, _DIRECTORY | _NO_FOLLOW, dir_fd=folder)
            except FileNotFoundError:
                os.mkdir(name, mode, dir_fd=folder)
                inner = os.open(name, _DIRECTORY | _NO_FOLLOW, dir_fd=folder)
                os.fchown(inner, self._users.outside(0), self._users.outside(0))
                os.fchmod(inner, mode)
            except OSError as error:
                if stat.S_ISLNK(os.lstat(name, dir_fd=folder).st_mode):
                    raise RefusedError(
                        f"/{'/'.join(names)} leads through a link in the place: not followed"
                    ) from None
                raise RefusedError(f"/{'/'.join(names)}: {error.strerror}") from None
            os.close(folder)
            folder = inner
        return folder

    def _write(
        self, tar: tarfile.TarFile, member: tarfile.TarInfo, base: int, parent: int, name: str
    ) -> None:
        try:
            os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            pass
        except (IsADirectoryError, PermissionError):
            raise RefusedError(f"{member.name} is a folder in the place") from None
        if member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
            owner = [self._users.outside(n) for n in (member.uid, member.gid)]
            os.chown(name, *owner, dir_fd=parent, follow_symlinks=False)
        elif member.islnk():
            target = _names(member.linkname)
            source = kernel.open_beneath(base, "/".join(target[:-1]) or ".", _DIRECTORY)
            os.link(target[-1], name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
            os.close(source)
        elif member.isreg():
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW
            fd = os.open(name, flags, 0o600, dir_fd=parent)
            with open(fd, "wb", closefd=False) as file:
                content = tar.extractfile(member)
                if content is not None:
                    shutil.copyfileobj(content, file, 1 << 20)
            self._finish(fd, member)
            os.utime(fd, (member.mtime, member.mtime))
            os.close(fd)
        else:
            raise RefusedError(f"{member.name} is neither a file nor a folder nor a link")

    def _finish(self, fd: int, member: tarfile.TarInfo) -> None:
        os.fchown(fd, self._users.outside(member.uid), self._users.outside(member.gid))
        os.fchmod(fd, member.mode & 0o7777)

    def take(self, paths: list[str], max_bytes: int, target: int) -> None:
        """Write an archive of paths to the descriptor `target`, cut at `max_bytes`."""
        top = os.open(f"{self._place}/root", _DIRECTORY)
        writer = _Bounded(target, max_bytes)
        try:
            # A file's end is written by `close`, which a cut archive does not get.
            tar = tarfile.open(fileobj=writer, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115
            for path in paths:
                names = _names(path)
                try:
                    parent = kernel.open_beneath(top, "/".join(names[:-1]) or ".", _DIRECTORY)
                except OSError:
                    continue  # a link leads there, or nothing does
                prefix = "/".join(names[:-1])
                self._add(tar, parent, names[-1] if names else ".", prefix, 0)
                os.close(parent)
            tar.close()
        except _FullError:
            return

    def _add(self, tar: tarfile.TarFile, parent: int, name: str, prefix: str, depth: int) -> None:
        try:
            about = os.lstat(name, dir_fd=parent)
        except FileNotFoundError:
            return
        if depth > _MAX_DEPTH:
            raise _FullError
        entry = tarfile.TarInfo(os.path.join(prefix, name) if name != "." else ".")
        entry.mode, entry.mtime = stat.S_IMODE(about.st_mode), int(about.st_mtime)
        entry.uid, entry.gid = self._users.inside(about.st_uid), self._users.inside(about.st_gid)
        if stat.S_ISLNK(about.st_mode):
            entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=parent)
            tar.addfile(entry)
        elif stat.S_ISREG(about.st_mode):
            fd = os.open(name, os.O_RDONLY | _NO_FOLLOW, dir_fd=parent)
            with open(fd, "rb") as file:
                entry.size = os.fstat(fd).st_size
                tar.addfile(entry, file)
        elif stat.S_ISDIR(about.st_mode):
            entry.type = tarfile.DIRTYPE
            tar.addfile(entry)
            folder = os.open(name, _DIRECTORY | _NO_FOLLOW, dir_fd=parent)
            inside = "" if name == "." else entry.name
            for child in sorted(os.listdir(folder)):
                self._add(tar, folder, child, inside, depth + 1)
            os.close(folder)
        elif stat.S_ISFIFO(about.st_mode):
            entry.type = tarfile.FIFOTYPE
            tar.addfile(entry)

    def changes(self, layers: list[str]) -> dict[str, list[str]]:
        """Return the paths that differ from the image's layers: written, removed."""
        if len(layers) == 1:
            image = f"{self._layers}/{layers[0]}"
        else:
            image = f"{self._place}/root"  # mounted over, in this process's own namespace
            kernel.unshare(kernel.NEWNS)
            os.chdir(self._layers)
            kernel.mount("none", image, "overlay", kernel.RDONLY, f"lowerdir={':'.join(layers)}")
        written: list[str] = []
        removed: list[str] = []
        pending = [""]
        while pending:
            folder = pending.pop()
            for name in sorted(os.listdir(f"{self._place}/upper{folder}")):
                path = f"{folder}/{name}"
                if path in _MOUNTED:
                    continue
                upper = f"{self._place}/upper{path}"
                about = os.lstat(upper)
                original = f"{image}{path}"
                was_folder = os.path.isdir(original) and not os.path.islink(original)
                if _is_removal(about):
                    removed.append(path)
                elif not stat.S_ISDIR(about.st_mode):
                    removed += [path] if was_folder else []
                    written.append(path)
                elif was_folder and not _is_opaque(upper):
                    pending.append(path)
                else:
                    removed += [path] if os.path.lexists(original) else []
                    written.append(path)
        return {"written": sorted(written), "removed": sorted(removed)}

    def keep(self, name: str) -> None:
        """Copy what a place has written, its overlay's upper directory, to the new layer `name`."""
        _copy_tree(f"{self._place}/upper", f"{self._layers}/{name}")

    def unpack(self, source: BinaryIO, name: str) -> None:
        """Make the new layer `name` of an archive."""
        folder = f"{self._layers}/{name}"
        os.mkdir(folder)
        os.chown(folder, self._users.outside(0), self._users.outside(0))
        os.chmod(folder, 0o755)
        self.put(source, "/", root=folder)

    def discard(self, name: str) -> None:
        """Remove a layer."""
        remove_tree(f"{self._layers}/{name}")


def execute(
    files: PlaceFiles, order: dict[str, Any], fds: list[int], reply: socket.socket, keeper: int
) -> None:
    """Execute an order and answer it."""
    kind = order["order"]
    answer: dict[str, object] = {"event": "done"}
    given: list[int] = []
    if kind == "put":
        with open(fds[0], "rb") as source:
            files.put(source, order["path"])
    elif kind == "take":
        files.take(order["paths"], order["max_bytes"], fds[0])
    elif kind == "changes":
        with open(fds[0], "w") as target:
            json.dump(files.changes(order["layers"]), target)
    elif kind == "keep":
        files.keep(order["layer"])
    elif kind == "unpack":
        with open(fds[0], "rb") as source:
            files.unpack(source, order["layer"])
    elif kind == "discard":
        files.discard(order["layer"])
    elif kind == "listen":
        given.append(_listen(order["port"], keeper).detach())
    else:
        raise RefusedError(f"unknown order {kind!r}")
    socket.send_fds(reply, [json.dumps(answer).encode()], given)


def _listen(port: int, keeper: int) -> socket.socket:
    """Return a socket that listens in the network namespace of a keeper."""
    if not keeper:
        raise RefusedError("the place is not running: nothing can listen inside")
    namespace = os.open(f"{STAGE}/proc/{keeper}/ns/net", os.O_RDONLY)
    kernel.setns(namespace, kernel.NEWNET)
    os.close(namespace)
    raise_loopback()
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(_BACKLOG)
    return listener


class _FullError(Exception):
    """The bound of an archive is reached."""


class _Bounded(io.RawIOBase):
    """Writes to a descriptor, up to a number of bytes."""

    def __init__(self, fd: int, max_bytes: int) -> None:
        self._fd = fd
        self._left = max_bytes

    def write(self, data: Any) -> int:
        part = memoryview(data)[: self._left]
        self._left -= len(part)
        while part:
            part = part[os.write(self._fd, part) :]
        if len(data) and not self._left:
            raise _FullError
        return len(data)


def _names(path: str) -> list[str]:
    """Return the names of a path from the root; ".." leads no higher."""
    return [name for name in os.path.normpath("/" + path).split("/") if name]


def _copy_tree(source: str, target: str) -> None:
    """Copy an upper directory with owners, modes, times, links, marks of removed names."""
    os.mkdir(target)
    _copy_about(source, target)
    for folder, entries in _walk(source):
        for entry in entries:
            origin = f"{folder}/{entry.name}"
            copy = target + origin.removeprefix(source)
            about = entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                os.mkdir(copy)
            elif entry.is_symlink():
                os.symlink(os.readlink(origin), copy)
            elif stat.S_ISREG(about.st_mode):
                shutil.copyfile(origin, copy, follow_symlinks=False)
            elif _is_removal(about):
                os.mknod(copy, stat.S_IFCHR | 0o600, 0)
            else:
                continue  # sockets and pipes of programs that have ended
            _copy_about(origin, copy)


def _walk(top: str) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    folders = [top]
    while folders:
        folder = folders.pop()
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        yield folder, entries
        folders += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def _is_removal(about: os.stat_result) -> bool:
    """Return whether an overlay marks a removed name by this entry."""
    return stat.S_ISCHR(about.st_mode) and about.st_rdev == 0


def _is_opaque(folder: str) -> bool:
    """Return whether an overlay hides what lies below a folder."""
    return any(name.endswith(_OPAQUE) for name in os.listxattr(folder, follow_symlinks=False))


def _copy_about(origin: str, copy: str) -> None:
    about = os.lstat(origin)
    os.chown(copy, about.st_uid, about.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(about.st_mode):
        os.chmod(copy, stat.S_IMODE(about.st_mode))
        for name in os.listxattr(origin, follow_symlinks=False):
            if name.endswith(_OPAQUE):
                value = os.getxattr(origin, name, follow_symlinks=False)
                os.setxattr(copy, name, value, follow_symlinks=False)
        os.utime(copy, ns=(about.st_atime_ns, about.st_mtime_ns))
