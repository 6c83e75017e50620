"""The keeper: the first process of a place, which forks its commands.

Orders come from the parent over a message socket, with descriptors: a file with the order's JSON,
and the command's two outputs. The keeper holds nothing that its commands may not know.

    {"order": "run", "number": 1} + [file, stdout, stderr]    {"order": "kill", "number": 1}
    -> {"event": "exit", "number": 1, "status": 0}            {"event": "failed", ...}

Written for Python 3.9: in a container, the image's own python3 runs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn

from . import kernel

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NOT_FOUND, _NOT_RUNNABLE = 127, 126


def serve(control: socket.socket, *, environment: dict[str, str], workdir: str) -> NoReturn:
    """Execute orders until the parent closes the socket; commands inherit `environment`."""
    keeper = _Keeper(control, {"PATH": _PATH, **environment}, workdir)
    keeper.report(event="started")
    keeper.serve()


class _Keeper:
    def __init__(self, control: socket.socket, environment: dict[str, str], workdir: str) -> None:
        self._control = control
        self.environment = environment
        self.workdir = workdir
        self._null = os.open("/dev/null", os.O_RDWR)
        while self._null < 3:  # 0, 1 and 2 are a command's own
            self._null = os.dup(self._null)
        self._commands: dict[int, int] = {}  # number of each running command, by pid

    def report(self, **event: object) -> None:
        """Send an event to the parent; without one, the place ends."""
        try:
            self._control.send(json.dumps(event).encode())
        except OSError:
            os._exit(0)

    def serve(self) -> NoReturn:
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if wake in ready:
                os.read(wake, 4096)
                self._reap()
            if self._control.fileno() in ready:
                try:
                    message, fds, _, _ = socket.recv_fds(self._control, 4096, 3)
                except OSError:
                    os._exit(0)
                if not message:
                    os._exit(0)
                self._execute(json.loads(message), fds)

    def _execute(self, order: dict[str, Any], fds: list[int]) -> None:
        number = order["number"]
        if order["order"] == "kill":
            for pid, other in self._commands.items():
                if other == number:
                    _kill(pid)
            return
        try:
            details = _read_order(fds[0])
            pid = os.fork()
        except OSError as error:
            self.report(event="failed", number=number, error=error.strerror, is_full=True)
        else:
            if pid == 0:
                _become_command(self, {**details, "number": number}, fds[1:], self._null)
            self._commands[pid] = number
        finally:
            for fd in fds:
                os.close(fd)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self._commands.pop(pid, None)
            if number is not None:
                code = os.waitstatus_to_exitcode(status)
                self.report(event="exit", number=number, status=code if code >= 0 else 128 - code)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)  # our child, not yet waited for


def _read_order(fd: int) -> dict[str, Any]:
    size = os.fstat(fd).st_size
    details: dict[str, Any] = json.loads(os.pread(fd, size, 0))
    return details


def _become_command(
    keeper: _Keeper, order: dict[str, Any], outputs: list[int], null: int
) -> NoReturn:
    """Execute the command of an order, in the child."""
    code, argv = _NOT_RUNNABLE, order["argv"]
    try:
        os.setsid()
        os.dup2(null, 0)
        os.dup2(outputs[0], 1)
        os.dup2(outputs[1], 2)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            kernel.prctl(4, 1)  # PR_SET_DUMPABLE: otherwise root of the machine owns the file
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("0")
        os.umask(0o022)
        variables = {**keeper.environment, **order["env"]}
        try:
            _become_user(order["user"], variables)
            os.chdir(order["cwd"] or keeper.workdir)
        except (OSError, LookupError) as error:
            keeper.report(event="failed", number=order["number"], error=str(error))
            os._exit(code)
        os.closerange(3, 1 << 16)
        os.execvpe(argv[0], argv, variables)
    except FileNotFoundError:
        code = _NOT_FOUND
        os.write(2, f"{argv[0]}: not found\n".encode())
    except BaseException as error:
        os.write(2, f"{argv[0]}: {error}\n".encode())
    os._exit(code)


def _become_user(user: str, variables: dict[str, str]) -> None:
    """Become a user by name or number, or "user:group", as the accounts of the place say."""
    name, _, group = user.partition(":")
    row = next((r for r in _rows("/etc/passwd", 7) if name in (r[0], r[2])), None)
    if row is None and not name.isdigit():
        raise LookupError(f"the place has no user {name!r}")
    uid = int(name) if row is None else int(row[2])
    gid = 0 if row is None else int(row[3])
    variables.setdefault("HOME", "/" if row is None else row[5])
    groups = [] if row is None else [r for r in _rows("/etc/group", 4) if row[0] in r[3].split(",")]
    if group:
        gid = next((int(r[2]) for r in _rows("/etc/group", 4) if group in (r[0], r[2])), -1)
        gid = int(group) if gid < 0 and group.isdigit() else gid
        if gid < 0:
            raise LookupError(f"the place has no group {group!r}")
    if (uid, gid) != (os.getuid(), os.getgid()) or groups:
        with contextlib.suppress(PermissionError):  # where a place has a single user
            os.setgroups([int(r[2]) for r in groups])
        try:
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
        except OSError:
            raise PermissionError(
                f"this place has no user but root, and {name!r} was asked for: start as root, or "
                "as a user with ranges in /etc/subuid and /etc/subgid and the program newuidmap"
            ) from None


def _rows(path: str, width: int) -> list[list[str]]:
    """Return the complete rows of a table of accounts; none if it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            rows = [line.strip().split(":") for line in file.read(1 << 20).splitlines()]
    except OSError:
        return []
    return [row for row in rows if len(row) == width and row[2].isdigit()]


if __name__ == "__main__":
    # In a container: the parent listens on a socket that is mounted at this path.
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(sys.argv[1])
    serve(channel, environment=dict(os.environ), workdir=os.getcwd())
