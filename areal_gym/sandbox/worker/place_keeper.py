"""The keeper: the first process of a place, which forks its commands.

Orders come from the parent over a message socket, with descriptors: a file with the order's JSON,
and the command's two outputs. The keeper holds nothing that its commands may not know.

    {"order": "run", "number": 1} + [file, stdout, stderr]    {"order": "kill", "number": 1}
    -> {"event": "exit", "number": 1, "status": 0}            {"event": "failed", ...}
    {"order": "listen", "number": 2, "port": 8900}
    -> {"event": "listening", "number": 2} + [a socket in the place's network]

Written for Python 3.9: in a container, the image's own python3 runs it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, NoReturn

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NOT_FOUND, _NOT_RUNNABLE = 127, 126
_TABLE_CHARS = 1 << 20
_BACKLOG = 128
_ONE_USER = (
    "the user {!r} was asked for, and this place has {} in all, root among them: start as root, or "
    "as a user with ranges in /etc/subuid and /etc/subgid and the program newuidmap"
)


def serve(
    control: socket.socket,
    *,
    environment: dict[str, str],
    workdir: str,
    score: int = -1,
    num_users: int = 1 << 16,
) -> NoReturn:
    """Execute orders until the parent closes the socket; commands inherit `environment`.

    `score` is a descriptor of this process's oom_score_adj, if it may set that as low as -1000;
    `num_users` how many users the place has, root among them.
    """
    keeper = _Keeper(control, {"PATH": _PATH, **environment}, workdir, score)
    keeper.num_users = num_users
    keeper.report(event="started")
    keeper.serve()


class _Keeper:
    def __init__(
        self, control: socket.socket, environment: dict[str, str], workdir: str, score: int
    ) -> None:
        self._control = control
        self.environment = environment
        self.workdir = workdir
        self._null = os.open("/dev/null", os.O_RDWR)
        while self._null < 3:  # 0, 1 and 2 are a command's own
            self._null = os.dup(self._null)
        self._score = score
        self.num_users = 1
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
        if order["order"] == "listen":
            self._listen(number, order["port"])
            return
        try:
            pid = self._start(_read_order(fds[0]), fds[1], fds[2])
        except (BlockingIOError, MemoryError) as error:
            self.report(event="failed", number=number, error=str(error), is_full=True)
        except (OSError, LookupError, ValueError) as error:
            is_full = isinstance(error, OSError) and error.errno == errno.ENOMEM
            self.report(event="failed", number=number, error=str(error), is_full=is_full)
        else:
            self._commands[pid] = number
        finally:
            for fd in fds:
                os.close(fd)

    def _listen(self, number: int, port: int) -> None:
        """Send a socket that listens on 127.0.0.1:`port`: the parent need not enter the network."""
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", port))
                listener.listen(_BACKLOG)
            except OSError as error:
                self.report(event="failed", number=number, error=str(error))
                return
            message = json.dumps({"event": "listening", "number": number}).encode()
            try:
                socket.send_fds(self._control, [message], [listener.fileno()])
            except OSError:
                os._exit(0)

    def _start(self, order: dict[str, Any], stdout: int, stderr: int) -> int:
        """Start a command; return its pid. A program that is not there is one that exits."""
        argv, cwd = order["argv"], order["cwd"] or self.workdir
        user = find_user(order["user"])
        if max(user.uid, user.gid) >= self.num_users:
            raise LookupError(_ONE_USER.format(order["user"], self.num_users))
        variables = {"HOME": user.home, **self.environment, **order["env"]}
        options: dict[str, Any] = {"cwd": cwd, "env": variables, "start_new_session": True}
        streams = {"stdin": self._null, "stdout": stdout, "stderr": stderr}
        if (user.uid, user.gid) != (os.getuid(), os.getgid()) or user.groups:
            options.update(user=user.uid, group=user.gid, extra_groups=user.groups)
        code = _NOT_RUNNABLE
        self._protect("0")  # a command inherits it: when memory runs out, commands end first
        try:
            return _spawn(argv, {**options, **streams})
        except PermissionError as error:
            if error.filename == cwd:
                raise
            text = f"{argv[0]}: {error.strerror}"
        except (FileNotFoundError, NotADirectoryError) as error:
            if error.filename == cwd:
                raise
            code, text = _NOT_FOUND, f"{argv[0]}: not found"
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOMEM):
                raise
            text = f"{argv[0]}: {error.strerror}"
        finally:
            self._protect("-1000")
        os.write(stderr, f"{text}\n".encode())
        try:
            return _spawn(["/bin/sh", "-c", f"exit {code}"], {"cwd": "/", **streams})
        except FileNotFoundError:
            raise LookupError("the image has no shell, and a place needs /bin/sh") from None

    def _protect(self, score: str) -> None:
        if self._score >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._score, score.encode(), 0)

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


def _spawn(argv: list[str], options: dict[str, Any]) -> int:
    process = subprocess.Popen(argv, **options)
    process.returncode = 0  # it is waited for here, with all others
    return process.pid


@dataclass
class User:
    """A user of the place, as its table of accounts says."""

    uid: int
    gid: int
    home: str
    groups: list[int]


def find_user(text: str) -> User:
    """Return a user by name or number, or "user:group"; LookupError if the place has none."""
    if text in ("0", "root"):
        return User(0, 0, "/root", [])
    name, _, group = text.partition(":")
    row = next((row for row in _rows("/etc/passwd", 7) if name in (row[0], row[2])), None)
    if row is None and not name.isdigit():
        raise LookupError(f"the place has no user {name!r}")
    table = _rows("/etc/group", 4)
    user = (
        User(int(name), 0, "/", []) if row is None else User(int(row[2]), int(row[3]), row[5], [])
    )
    if group:
        numbers = [int(row[2]) for row in table if group in (row[0], row[2])]
        if not numbers and not group.isdigit():
            raise LookupError(f"the place has no group {group!r}")
        user.gid = numbers[0] if numbers else int(group)
    elif row is not None:
        user.groups = [int(entry[2]) for entry in table if row[0] in entry[3].split(",")]
    return user


def _rows(path: str, width: int) -> list[list[str]]:
    """Return the complete rows of a table of accounts; none if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, errors="replace") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return []
            rows = [line.strip().split(":") for line in file.read(_TABLE_CHARS).splitlines()]
    except OSError:
        return []
    return [row for row in rows if len(row) == width and row[2].isdigit()]


if __name__ == "__main__":
    # In a container: the parent listens on a socket that is mounted at this path.
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(sys.argv[1])
    variables = dict(os.environ)
    if variables.get("HOME") in ("/root", "/"):  # the engine's, of the user who starts it
        del variables["HOME"]
    serve(channel, environment=variables, workdir=os.getcwd(), num_users=1 << 32)
