"""The fork server: one clean process that walls itself in and forks a cell for every order.

It holds no secret, knows no task, and reads orders only from the parent. It ends, and all its cells
with it, when the parent does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from . import cell, kernel
from .jail import Jail

__all__ = ["main"]

# Common in snippets: imported once here, shared by every cell.
_PRELOADED = (
    *("math", "random", "re", "collections", "itertools", "functools", "fractions", "decimal"),
    *("statistics", "datetime", "string", "heapq", "bisect", "typing"),
)


def main(control_fd: int, parent_fd: int, settings: dict[str, Any]) -> NoReturn:
    """Serve orders until the parent is gone.

    Args:
        control_fd: message socket to the parent.
        parent_fd: pidfd of the parent; unlike a closed socket it cannot be held open by a fork.
        settings: `without`, `paths`, `modules`.
    """
    os.environ.clear()
    os.chdir("/")
    sys.executable = os.path.realpath(sys.executable)
    sys.path += settings["paths"]
    for name in (*_PRELOADED, *settings["modules"]):
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # the snippet that wants it will say so
    control = socket.socket(fileno=control_fd)
    null = os.open("/dev/null", os.O_RDWR)
    jail = Jail(without=settings["without"], paths=settings["paths"])
    _Zygote(control, parent_fd, jail, null).serve()


class _Zygote:
    def __init__(self, control: socket.socket, parent_fd: int, jail: Jail, null: int) -> None:
        self._control = control
        self._parent_fd = parent_fd
        self._jail = jail
        self._null = null
        self._cells: dict[int, int] = {}
        """Number of each running cell, by pid."""

    def serve(self) -> NoReturn:
        # Orphans of a cell become our children, so that none can hide from `_sweep`.
        kernel.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        poll = select.poll()
        for fd in (self._control.fileno(), wake, self._parent_fd):
            poll.register(fd, select.POLLIN)
        gc.collect()
        gc.freeze()
        gc.disable()
        os.dup2(self._null, 2)  # until here the parent listens for what went wrong
        self._tell(event="started", protections=self._jail.protections, scratch=self._jail.scratch)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._parent_fd in ready:
                self._stop()
            if wake in ready:
                os.read(wake, 4096)
                self._reap()
            if self._control.fileno() in ready:
                try:
                    message, fds, _, _ = socket.recv_fds(self._control, 4096, 3)
                except ConnectionError:
                    message = b""  # the parent died with news of ours unread
                if not message:
                    self._stop()
                order = json.loads(message)
                if order["order"] == "spawn":
                    self._spawn(order["number"], fds)
                else:
                    self._kill(order["number"])

    def _tell(self, **event: object) -> None:
        try:
            self._control.send(json.dumps(event).encode())
        except OSError:
            self._stop()

    def _spawn(self, number: int, fds: list[int]) -> None:
        base_memory = self._jail.address_space()
        try:
            pid = self._jail.fork()
        except OSError as error:
            self._tell(event="exit", number=number, status=-1, cpu_s=0.0, error=str(error))
        else:
            if pid == 0:
                self._become_cell(number, fds, base_memory)
            self._cells[pid] = number
        for fd in fds:
            os.close(fd)

    def _become_cell(self, number: int, fds: list[int], base_memory: int) -> NoReturn:
        try:
            channel_fd, stdout, stderr = fds
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()
            os.dup2(self._null, 0)
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            if channel_fd != 3:
                self._control.detach()
                os.dup2(channel_fd, 3, inheritable=False)
            os.closerange(4, 1 << 16)
            channel = socket.socket(fileno=3)
            self._jail.confine(number)
        except BaseException:
            # Reaches the parent as the text of its SandboxError.
            os.write(2, traceback.format_exc().encode())
            os._exit(70)
        cell.serve(channel, base_memory)

    def _kill(self, number: int) -> None:
        for pid, other in self._cells.items():
            if other == number:
                _kill_cell(pid)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self._cells.pop(pid, None)
            if number is None:
                continue
            if not self._jail.ends_trees:
                _kill_group(pid)
                self._sweep()
            self._jail.clean(number)
            cpu_s = usage.ru_utime + usage.ru_stime
            self._tell(event="exit", number=number, status=status, cpu_s=cpu_s)

    def _sweep(self) -> None:
        """End what a cell left behind: children of ours that are no cells."""
        for _ in range(100):
            try:
                with open(f"/proc/self/task/{os.getpid()}/children") as file:
                    strays = {int(word) for word in file.read().split()} - set(self._cells)
            except OSError:
                return
            if not strays:
                return
            for pid in strays:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def _stop(self) -> NoReturn:
        for pid in self._cells:
            _kill_cell(pid)
        for pid in self._cells:
            os.waitpid(pid, 0)
        if not self._jail.ends_trees:
            self._sweep()
        for number in self._cells.values():
            self._jail.clean(number)
        if self._jail.scratch:
            os.rmdir(self._jail.scratch)
        os._exit(0)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # not yet a group of its own, or already gone
        os.killpg(pid, signal.SIGKILL)


def _kill_cell(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)  # ours and not yet waited for, so the number is still its own
    _kill_group(pid)
