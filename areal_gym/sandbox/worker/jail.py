"""The walls: what the fork server does once for all its children, and each child for itself.

Three situations, found by trying:

- root, or root of a container: namespaces, a private root directory, and a private uid per child,
  so that the process count of each child is its own;
- an ordinary user with user namespaces: the same without private uids. Each child has a user
  namespace of its own, so that its threads are counted apart; it may not fork;
- neither: Landlock and seccomp, again without fork, so that nothing can be left behind. Of an
  ordinary user's children the fork server counts the threads (`tasks`).

No child is ever uid 0: root that has no other uid for them is refused (`RefusedError`).

Inside a container, whose first process the fork server is, the container gives the namespaces and
counts processes and memory; Landlock and seccomp come on top, and children may fork: after each of
them, the fork server ends whatever else runs in the container.

Everything that is refused is left out of `Jail.protections`, which the parent can show.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable

from . import kernel, landlock, seccomp
from .cleaning import remove_tree

_STAGE = "/sys"  # any directory that the jail does not show; mounted over in our own namespace only
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_TMP_OPTIONS = "size=64m,nr_inodes=4096,mode=1777"
_FEW_FILES = 100
_GVISOR_LACKS = (resource.RLIMIT_CORE, resource.RLIMIT_MSGQUEUE, resource.RLIMIT_SIGPENDING)
_CAP_DAC_READ_SEARCH, _CAP_SETGID, _CAP_SETUID, _CAP_SYS_ADMIN = 2, 6, 7, 21


class RefusedError(Exception):
    """Children could only be made in a way that is never right; the text says what to do."""


class Jail:
    """What this kernel and user allow. Built in the fork server before it forks anything."""

    def __init__(
        self, *, without: list[str], readable: list[str], scratch: str, is_container: bool
    ) -> None:
        self._without = frozenset(without)
        # A container shows nothing but its image.
        self._readable = readable if is_container else _readable_paths(readable)
        self._is_container = is_container
        # tempfile looks in these; the private one must not hide what is to be read.
        self._private = next(
            (d for d in ("/tmp", "/var/tmp") if not any(p.startswith(d) for p in self._readable)),
            "/home",
        )
        self._scratch = scratch
        """Where the private directories are, unless a private root has them."""
        self._pid_namespace = -1
        self._uid_base = self._uid_count = self._landlock = 0
        self.has_mounts = False
        """Whether children have a root directory of their own, with a bounded place for files."""
        self.protections = ["limits", "empty environment", "closed descriptors", "new session"]

        self._kept_capabilities = 0
        self._shared_filter = b""
        if os.geteuid() == 0:
            has_capability = self._take_root()
        else:
            has_capability = self._attempt("user namespace", _own_user_namespace)
        if has_capability:
            # Namespaces one by one: some kernels and containers refuse only some of them.
            self._attempt("network namespace", lambda: kernel.unshare(kernel.NEWNET))
            self._attempt("ipc namespace", lambda: kernel.unshare(kernel.NEWIPC | kernel.NEWUTS))
            is_root = os.geteuid() == 0
            keep = self._keep_pid_namespace if is_root else self._move_to_pid_namespace
            self._attempt("pid namespace", keep)
        kernel.prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
        if is_container:
            kernel.prctl(4, 0)  # PR_SET_DUMPABLE: children of the same user do not look into us
        self.protections.append("no new privileges")
        # Before the private root: it has no /proc to ask.
        self.proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        has_seccomp = seccomp.is_supported()
        if has_capability:
            self.has_mounts = self._attempt("private root", self._build_root)
        if not self.has_mounts:
            os.mkdir(scratch)
            os.chmod(scratch, 0o711)
            self._attempt("landlock", self._find_landlock)
        self.can_fork = is_container or (self._pid_namespace >= 0 and self._uid_count > 0)
        self.has_seccomp = has_seccomp and self._attempt("seccomp", self._build_filter)
        """Whether the filter of system calls holds the cells."""
        if self.has_seccomp and not self.can_fork:
            self.protections.append("no fork")
        if self._uid_count and not self.has_mounts:
            self._open_interpreter()

    def _attempt(self, name: str, step: Callable[[], None]) -> bool:
        if name in self._without or (name.endswith("namespace") and "namespaces" in self._without):
            return False
        try:
            step()
        except OSError:
            return False
        self.protections.append(name)
        return True

    # -- once, in the fork server

    def _take_root(self) -> bool:
        held = kernel.capabilities()
        if held >> _CAP_SETUID & held >> _CAP_SETGID & 1 and "private uid" not in self._without:
            with open("/proc/self/uid_map") as rows:
                end = max(int(row.split()[0]) + int(row.split()[2]) for row in rows)
            # High and, per fork server, its own: nothing else on the machine runs under these.
            if end > 2_100_000_000:
                self._uid_base, self._uid_count = 10**9 + os.getpid() % 10**6 * 1000, 1000
            elif end > 62_000:
                self._uid_base, self._uid_count = 30_000 + os.getpid() % 30 * 1000, 1000
            if self._uid_count:
                self.protections.append("private uid")
        if not self._uid_count and "private uid" not in self._without:
            raise RefusedError(
                "this process is root and has no other user for its snippets (it takes the "
                "capabilities CAP_SETUID and CAP_SETGID, and more than 62000 uids in its user "
                "namespace): start it as an ordinary user"
            )
        return bool(held >> _CAP_SYS_ADMIN & 1) and "namespaces" not in self._without

    def _open_interpreter(self) -> None:
        """See to it that another uid can import from where only root may look, without being root.

        What may be read is Landlock's business; this capability only opens the way to it.
        """
        places = [*self._readable, os.__file__]
        if all(map(_is_open_to_all, places)):
            return
        has_filters = self._landlock and self.has_seccomp
        if has_filters and kernel.capabilities() >> _CAP_DAC_READ_SEARCH & 1:
            self._kept_capabilities = 1 << _CAP_DAC_READ_SEARCH
        elif _is_open_to_all(os.__file__):
            return
        elif not self._landlock or not (self.has_seccomp or self.ends_trees):
            # This is the level "none", which only runs when it was asked for: as this user.
            self._uid_count = 0
            self.protections.remove("private uid")
        else:
            raise RefusedError(
                f"the interpreter in {sys.base_prefix} is readable for root only, and snippets do "
                "not run as root: use an interpreter that every user can read (chmod o+x on each "
                "directory that leads to it), or start as the ordinary user whom it belongs to"
            )

    def _keep_pid_namespace(self) -> None:
        kernel.unshare(kernel.NEWPID)  # for the children; this process stays where it is
        fd = os.open("/proc/self/ns/pid", os.O_RDONLY)
        kernel.setns(fd, kernel.NEWPID)
        self._pid_namespace = fd

    def _move_to_pid_namespace(self) -> None:
        # Only the owner of a pid namespace may return to it, and the first one is not ours.
        kernel.unshare(kernel.NEWPID)
        pid = os.fork()
        if pid:
            os.closerange(3, 1 << 16)
            os.waitpid(pid, 0)
            os._exit(0)
        kernel.prctl(1, 9)  # PR_SET_PDEATHSIG
        self._keep_pid_namespace()

    def _build_root(self) -> None:
        kernel.unshare(kernel.NEWNS)
        kernel.mount("none", "/", "", kernel.REC | kernel.PRIVATE)
        tmpfs = kernel.NOSUID | kernel.NODEV
        kernel.mount("none", _STAGE, "tmpfs", tmpfs, "mode=755,size=1m")
        for path in self._readable:
            _bind(path, is_device=path in _DEVICES)
        os.makedirs(_STAGE + self._private, 0o1777)
        kernel.pivot_root(_STAGE)
        kernel.restrict_mount("/", kernel.RDONLY, recursive=False)
        # Also tries what each child will do.
        kernel.mount("none", self._private, "tmpfs", tmpfs, _TMP_OPTIONS)

    def _find_landlock(self) -> None:
        self._landlock = landlock.version()

    def _build_filter(self) -> None:
        self._shared_filter = self._filter(own_pid=None)

    def _filter(self, *, own_pid: int | None) -> bytes:
        # With a root of our own, and in a container, files of the host are not there or read-only.
        is_apart = self.has_mounts or self._is_container
        return seccomp.build_filter(
            allow_fork=self.can_fork,
            allow_metadata=is_apart,
            allow_truncate=is_apart or self._landlock >= landlock.TRUNCATE_VERSION,
            own_pid=own_pid,
            server_pid=1 if self._is_container else None,
        )

    # -- for each child

    @property
    def ends_trees(self) -> bool:
        """Whether the kernel ends all that a child started when the child ends."""
        return self._pid_namespace >= 0

    def fork(self) -> int:
        """`os.fork`, with the child as first process of its own pid namespace where there is one.

        When the first process ends, the kernel ends all others of the namespace.
        """
        if self._pid_namespace < 0:
            return os.fork()
        kernel.unshare(kernel.NEWPID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                kernel.setns(self._pid_namespace, kernel.NEWPID)
        return pid

    @property
    def counts_processes(self) -> bool:
        """Whether the kernel's count of processes (RLIMIT_NPROC) is each child's own.

        Elsewhere it is its user's, of whom much else may run, other children for instance.
        """
        has_own = "user namespace" in self.protections or self._uid_count > 0
        return self._is_container or has_own

    @property
    def num_users(self) -> int:
        """How many children can each have a uid of their own; 0 where none has."""
        return self._uid_count

    def address_space(self) -> int:
        """Bytes of address space that this process has, and its children begin with."""
        return int(os.pread(self._statm, 100, 0).split()[0]) * resource.getpagesize()

    def directory(self, number: int) -> str:
        """The private writable directory of child `number`."""
        return self._private if self.has_mounts else f"{self._scratch}/{number}"

    def clean(self, number: int) -> None:
        """Remove what child `number` wrote; a private mount went with its namespace."""
        if not self.has_mounts:
            remove_tree(self.directory(number))

    def has_much_to_clean(self, number: int) -> bool:
        """Whether `clean` may take long: child `number` left directories, or many files."""
        if self.has_mounts:
            return False
        try:
            with os.scandir(self.directory(number)) as entries:
                first = [entry for entry, _ in zip(entries, range(_FEW_FILES + 1), strict=False)]
        except FileNotFoundError:
            return False
        except OSError:
            return True  # the child locked it
        is_flat = not any(entry.is_dir(follow_symlinks=False) for entry in first)
        return len(first) > _FEW_FILES or not is_flat

    def close(self) -> None:
        """Remove the place of the private directories; nothing is in it any more."""
        if not self.has_mounts:
            remove_tree(self._scratch)

    def count_apart(self) -> None:
        """In the child of an ordinary user: the kernel counts by user and user namespace.

        So in a namespace of its own the child's processes are counted for it alone.
        """
        if "user namespace" in self.protections:
            _own_user_namespace(self.proc)

    def confine(self, number: int, slot: int) -> None:
        """In the child, as the last thing before it hears of any snippet: no way back.

        Args:
            number: of the child, which no other one ever has.
            slot: of `num_users`, which no other living child has.
        """
        directory = self.directory(number)
        if self.has_mounts:
            kernel.unshare(kernel.NEWNS)
            tmpfs = kernel.NOSUID | kernel.NODEV
            kernel.mount("none", directory, "tmpfs", tmpfs, _TMP_OPTIONS)
        else:
            os.mkdir(directory, 0o700)
        if self._uid_count:
            uid = self._uid_base + slot
            if not self.has_mounts:
                os.chown(directory, uid, uid)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            kernel.prctl(8, 1)  # PR_SET_KEEPCAPS; what is not kept is dropped below
            os.setresuid(uid, uid, uid)
        os.chdir(directory)
        kernel.drop_capabilities(keep=self._kept_capabilities)
        if self._is_container:
            # When its memory is used up, the fork server must not be the one that is ended.
            kernel.prctl(4, 1)  # PR_SET_DUMPABLE: else the file is root's
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
        has_filters = self._landlock and self.has_seccomp
        if self.has_mounts or self._uid_count or self._is_container or not has_filters:
            kernel.prctl(4, 0)  # PR_SET_DUMPABLE: no ptrace, no core
        # Else our own uid could not look at what it holds; Landlock and seccomp refuse ptrace.
        kernel.prctl(1, 9)  # PR_SET_PDEATHSIG: SIGKILL when the fork server dies
        for kind, value in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, 256),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
            (resource.RLIMIT_SIGPENDING, 1024),
            (resource.RLIMIT_STACK, 8 << 20),
        ):
            try:
                lower_limit(kind, value)
            except ValueError:
                # gVisor cannot set these, and has neither cores nor message queues to bound.
                if not self._is_container or kind not in _GVISOR_LACKS:
                    raise
        if self._landlock:
            readable, writable = [*self._readable], [directory, "/dev/null"]
            landlock.restrict(self._landlock, readable=readable, writable=writable)
        if self.has_seccomp:
            is_alone = self._pid_namespace >= 0 or self._is_container
            program = self._shared_filter if is_alone else self._filter(own_pid=os.getpid())
            seccomp.install(program)


def lower_limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Set a resource limit, never above what the parent left us."""
    _, ceiling = resource.getrlimit(kind)
    wanted = soft if hard is None else hard
    if ceiling != resource.RLIM_INFINITY:
        wanted = min(wanted, ceiling)
    resource.setrlimit(kind, (min(soft, wanted), wanted))


def _readable_paths(paths: list[str]) -> list[str]:
    """The system, the interpreter and `paths`: outer directories first, nothing twice."""
    prefixes = [sys.base_prefix, sys.base_exec_prefix, *paths]
    chosen: list[str] = []
    for path in [*_SYSTEM, *sorted(prefixes, key=len), *_SYSTEM_FILES, *_DEVICES]:
        path = os.path.abspath(path)
        inside = any(path == other or path.startswith(other + "/") for other in chosen)
        if path != "/" and not inside and os.path.exists(path):
            chosen.append(path)
    return chosen


def _bind(path: str, *, is_device: bool) -> None:
    target = _STAGE + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(path, target, "", kernel.BIND | kernel.REC)
    # Also of a device, which can be written to nevertheless: only its times cannot be set.
    restrictions = kernel.RDONLY | kernel.NOSUID | (0 if is_device else kernel.NODEV)
    kernel.restrict_mount(target, restrictions, recursive=not is_device)


def _is_open_to_all(path: str) -> bool:
    """Whether every directory on the way to `path` lets every user through."""
    while (path := os.path.dirname(path)) != "/":
        if not os.stat(path).st_mode & 0o001:
            return False
    return True


def _own_user_namespace(proc: int | None = None) -> None:
    """Move to a new user namespace, in which this process is who it was.

    Args:
        proc: descriptor of /proc, where the root directory has none.
    """
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        path = f"/proc/self/{name}" if proc is None else f"self/{name}"
        fd = os.open(path, os.O_WRONLY, dir_fd=proc)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
