"""Archives that enter and leave places: folders of a task, and what an agent leaves behind.

What comes from an agent is filtered: only the paths that were asked for; no links out of them, no
devices, no set-user-id bits, no files that a test runner or an interpreter would execute by itself.
"""

from __future__ import annotations

import fnmatch
import io
import posixpath
import stat
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from areal_gym.envs.harbor.task_toml import Artifact

MOST_BYTES = 64 << 20
"""The limit of what is carried from one agent to the verifier."""
MOST_FILES = 10_000
MOST_CARRIED_MB = (MOST_BYTES + MOST_FILES * 4096 >> 20) + 1
"""The room that carried files take at most, where each takes whole pages."""
RUN_BY_THEMSELVES = (
    *("conftest.py", "sitecustomize.py", "usercustomize.py", "*.pth", "pytest.ini", ".pytest.ini"),
    *("python", "python3", "python3.*", "pytest", "sh", "bash"),
)
"""Names of files that test runners, interpreters and shells execute unasked, when they lie about.
They are carried only if the task declares them as artifacts by their exact path."""
NEVER_CARRIED = ("/tests", "/solution", "/logs/verifier", "/logs/agent")
_MOST_NAMED = 8


def is_complete(raw: bytes) -> bool:
    """Return whether an archive was not cut off by the limit with which it was taken."""
    return raw.endswith(bytes(2 * tarfile.BLOCKSIZE))


def is_within(path: str, folder: str) -> bool:
    """Return whether a path is a folder or below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def pack_folders(
    folders: Sequence[Path],
    *,
    prefix: str = "",
    directories: Iterable[tuple[str, int, int]] = (),
) -> bytes:
    """Return an archive of the contents of folders, owned by root; later ones replace earlier.

    `directories` stand before them, as in `pack_directories`.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        _add_directories(archive, directories)
        for folder in folders:
            for path in sorted(folder.rglob("*")):
                entry = archive.gettarinfo(
                    str(path), posixpath.join(prefix, str(path.relative_to(folder)))
                )
                entry.uid = entry.gid = 0
                entry.uname = entry.gname = ""
                if entry.islnk():  # a second name of the same file
                    entry.type, entry.size = tarfile.REGTYPE, path.stat().st_size
                if entry.isreg():
                    is_script = path.suffix == ".sh"
                    entry.mode = 0o755 if is_script or entry.mode & 0o100 else 0o644
                    with path.open("rb") as file:
                        archive.addfile(entry, file)
                else:
                    entry.mode = 0o755
                    archive.addfile(entry)
    return buffer.getvalue()


def pack_directories(modes: Iterable[tuple[str, int, int]]) -> bytes:
    """Return an archive of empty directories: path, mode and owner of each."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        _add_directories(archive, modes)
    return buffer.getvalue()


def _add_directories(archive: tarfile.TarFile, modes: Iterable[tuple[str, int, int]]) -> None:
    for path, mode, owner in modes:
        entry = tarfile.TarInfo(path.lstrip("/"))
        entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, mode, owner, owner
        archive.addfile(entry)


@dataclass
class CarriedFiles:
    """The files that travel from an agent's place to the verifier's."""

    artifacts: Sequence[Artifact]
    written: frozenset[str] | None = None
    """Paths that the agent wrote, with all below them; None: unknown, all of them may be."""
    removed: tuple[str, ...] = ()
    """Paths that the verifier must not see."""
    left_out: list[str] = field(default_factory=list)
    """What was not carried, and why."""
    texts: dict[str, str] = field(default_factory=dict)
    """Small texts by path, for people to read."""
    num_files: int = 0
    num_bytes: int = 0

    def __post_init__(self) -> None:
        self._buffer = io.BytesIO()
        self._archive = tarfile.open(  # noqa: SIM115
            fileobj=self._buffer, mode="w", format=tarfile.PAX_FORMAT
        )
        self._num_left_out = 0

    def add(self, raw: bytes, root: str) -> None:
        """Add the members of an archive that was taken of `root`, or say why they are left out."""
        kept: list[tuple[tarfile.TarInfo, bytes]] = []
        num_files, num_bytes = self.num_files, self.num_bytes
        too_large = f"more than {MOST_BYTES >> 20} MB or {MOST_FILES:,} files"
        if not is_complete(raw):
            self._leave_out(root, too_large)
            return
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as archive:
            for member in archive:
                path = posixpath.normpath("/" + member.name)
                if not self._is_wanted(path, root, member):
                    continue
                num_files += 1
                num_bytes += member.size
                if num_files > MOST_FILES or num_bytes > MOST_BYTES:
                    self._leave_out(root, too_large)
                    return
                file = archive.extractfile(member) if member.isreg() else None
                kept.append((self._plain(member, path), file.read() if file else b""))
        self.num_files, self.num_bytes = num_files, num_bytes
        for entry, data in kept:
            self._archive.addfile(entry, io.BytesIO(data) if entry.isreg() else None)
            if entry.isreg() and len(data) <= 1 << 16:
                self.texts["/" + entry.name] = data.decode("utf-8", "replace")

    def finish(self) -> bytes:
        """Return the archive of all that is carried."""
        self._archive.close()
        if self._num_left_out > _MOST_NAMED:
            self.left_out.append(f"and {self._num_left_out - _MOST_NAMED:,} more")
        return self._buffer.getvalue()

    def _is_wanted(self, path: str, root: str, member: tarfile.TarInfo) -> bool:
        if "__pycache__" in path.split("/") or any(is_within(path, p) for p in NEVER_CARRIED):
            return False
        if self.written is not None and not self._is_written(path) and not member.isdir():
            return False
        for artifact in self.artifacts:
            if is_within(path, artifact.source) and _is_excluded(path, artifact):
                return False
        name = posixpath.basename(path)
        is_declared = any(artifact.source == path for artifact in self.artifacts)
        if member.issym():
            target = posixpath.normpath(
                posixpath.join(posixpath.dirname(path), member.linkname or "/")
            )
            if posixpath.isabs(member.linkname) or not is_within(target, root) or path == root:
                return self._leave_out(path, f"a link to {member.linkname}")
        elif member.islnk():
            target = posixpath.normpath("/" + member.linkname)
            if not is_within(target, root):
                return self._leave_out(path, "a second name of a file elsewhere")
        elif not (member.isreg() or member.isdir()):
            return self._leave_out(path, "neither a file nor a folder")
        if not member.isdir() and not is_declared and _runs_by_itself(name):
            return self._leave_out(path, "test runners or interpreters execute it by themselves")
        return True

    def _is_written(self, path: str) -> bool:
        assert self.written is not None
        while path != "/":
            if path in self.written:
                return True
            path = posixpath.dirname(path)
        return False

    def _leave_out(self, path: str, reason: str) -> bool:
        self._num_left_out += 1
        if self._num_left_out <= _MOST_NAMED:
            self.left_out.append(f"{path}: {reason}")
        return False

    @staticmethod
    def _plain(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo:
        entry = tarfile.TarInfo(path.lstrip("/"))
        entry.type, entry.size, entry.mtime = member.type, member.size, member.mtime
        entry.mode = stat.S_IMODE(member.mode) & ~(stat.S_ISUID | stat.S_ISGID)
        entry.uid, entry.gid = member.uid, member.gid
        entry.linkname = (
            posixpath.normpath("/" + member.linkname).lstrip("/")
            if member.islnk()
            else member.linkname
        )
        return entry


def _runs_by_itself(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in RUN_BY_THEMSELVES)


def _is_excluded(path: str, artifact: Artifact) -> bool:
    relative = posixpath.relpath(path, artifact.source)
    parts = relative.split("/")
    return any(
        fnmatch.fnmatchcase(relative, pattern)
        or any(fnmatch.fnmatchcase(part, pattern) for part in parts)
        for pattern in artifact.exclude
    )
