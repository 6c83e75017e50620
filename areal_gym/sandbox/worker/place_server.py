"""The server of places: one clean process that mounts their files and forks their keepers.

    trainer -- orders --> server -- fork --> keeper (pid 1 of a place) -- fork --> command
       |                     |                  ^
       |                     +-- fork --> helper: puts and takes files, listens, makes layers
       +-------- orders of commands ------------+

It reads orders only from the parent, and never a file of a place: helpers do, one for each order,
without following links (`place_files`). It ends with all its places when the parent ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import time
import traceback
from dataclasses import dataclass, field
from typing import Any, NoReturn

from . import kernel, place_files, place_keeper, place_walls, seccomp
from .place_groups import PlaceGroups
from .place_users import UserRange, enter_own_namespaces, root_range
from .usage import processes_over, tree

_WATCH_S = 0.1


@dataclass
class _Running:
    """A place with its files; its keeper may have ended."""

    settings: dict[str, Any]
    pid: int = 0  # of the keeper; 0: frozen
    waits: list[socket.socket] = field(default_factory=list)  # to be told of the keeper's end
    is_ending: bool = False


def main(control: socket.socket, parent_fd: int, settings: dict[str, Any]) -> NoReturn:
    """Serve orders until the parent is gone; they come over the socket `control`."""
    os.environ.clear()
    os.chdir("/")
    _PlaceServer(control, parent_fd, settings).serve()


class _PlaceServer:
    def __init__(self, control: socket.socket, parent_fd: int, settings: dict[str, Any]) -> None:
        self._control = control
        self._parent_fd = parent_fd
        self._groups = PlaceGroups(settings["group"], settings["memory_mb"])
        self.users: UserRange = (
            root_range() if os.geteuid() == 0 else enter_own_namespaces(settings["user"])
        )
        self._proc = place_walls.build_stage()
        kernel.unshare(kernel.NEWPID)  # for children; this process stays where it is
        self._pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
        kernel.setns(self._pid_namespace, kernel.NEWPID)
        self._has_filter = seccomp.is_supported()
        self._overlay_options = "" if os.geteuid() == 0 and self.users.is_machine else ",userxattr"
        self._layers = settings["layers"]
        self._places: dict[int, _Running] = {}
        self._keepers: dict[int, int] = {}  # number of the place of each keeper, by pid
        self._mapping: dict[int, socket.socket] = {}  # keepers that wait for their users, by fd
        self._poll = select.poll()
        self._next_watch = 0.0

    @property
    def _is_watched(self) -> bool:
        return "memory" not in self._groups.controllers

    def serve(self) -> NoReturn:
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        for fd in (self._control.fileno(), wake, self._parent_fd):
            self._poll.register(fd, select.POLLIN)
        os.chdir(self._layers)
        gc.collect()
        gc.freeze()
        gc.disable()
        protections = [
            *("own root", "own namespaces", "own network", "own users", "no new privileges"),
            *(["seccomp"] if self._has_filter else []),
            *(f"{name} group" for name in sorted(self._groups.controllers)),
            *(["memory watch"] if self._is_watched else []),
        ]
        self._report(event="started", protections=protections, num_users=self.users.size)
        while True:
            timeout = _WATCH_S * 1000 if self._is_watched and self._keepers else None
            ready = {fd for fd, _ in self._poll.poll(timeout)}
            if self._parent_fd in ready:
                self._stop()
            if wake in ready:
                os.read(wake, 4096)
                self._reap()
            for fd in ready & self._mapping.keys():
                self._map_users(fd)
            if self._control.fileno() in ready:
                try:
                    message, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 4)
                except OSError:
                    self._stop()
                if not message:
                    self._stop()
                self._execute(json.loads(message), fds)
            if self._is_watched and time.monotonic() > self._next_watch:
                self._watch()

    def _report(self, **event: object) -> None:
        try:
            self._control.send(json.dumps(event).encode())
        except OSError:
            self._stop()

    def _execute(self, order: dict[str, Any], fds: list[int]) -> None:
        reply = socket.socket(fileno=fds[0])
        kind, number = order["order"], order.get("place", 0)
        try:
            if kind == "start":
                self._start(number, order, reply)
            elif kind in ("freeze", "end"):
                self._end(number, reply, is_last=kind == "end")
            else:
                self._help(order, fds, reply)
        except BaseException:
            _answer(reply, error=traceback.format_exc(limit=-3))
        finally:
            reply.close()
            for fd in fds[1:]:
                os.close(fd)

    # -- the life of a place

    def _start(self, number: int, order: dict[str, Any], control: socket.socket) -> None:
        """Start a place, or a frozen one again; `control` becomes the keeper's."""
        place = self._places.get(number)
        if place is None:
            settings = order["settings"]
            storage_mb = settings["storage_mb"]
            place_walls.mount_files(
                number, order["layers"], storage_mb, self.users.first, self._overlay_options
            )
            place = self._places[number] = _Running(settings)
            try:
                self._groups.open(
                    number,
                    memory_mb=settings["memory_mb"] + storage_mb,
                    num_processes=settings["num_processes"] + 1,  # the keeper
                    cpus=settings["cpus"],
                )
            except OSError:
                self._remove(number)
                raise
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kernel.unshare(kernel.NEWPID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                kernel.setns(self._pid_namespace, kernel.NEWPID)
        if pid == 0:
            kernel.prctl(1, 9)  # PR_SET_PDEATHSIG; until the keeper changes its users
            for waiting in (ours, *self._mapping.values()):
                waiting.close()  # so that the server's end is seen by those that wait for it
            self._become_keeper(number, place.settings, control, theirs)
        theirs.close()
        place.pid = pid
        self._keepers[pid] = number
        self._mapping[ours.fileno()] = ours
        self._poll.register(ours.fileno(), select.POLLIN)

    def _become_keeper(
        self,
        number: int,
        settings: dict[str, Any],
        control: socket.socket,
        channel: socket.socket,
    ) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.setsid()
            score = _protected_score()
            self._groups.join(number)
            place_walls.enter_place(number, settings["shm_mb"])
            kernel.unshare(kernel.NEWUSER)
            me = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
            socket.send_fds(channel, [b"map"], [me])
            if not channel.recv(16):
                os._exit(70)
            os.close(me)
            channel.close()
            last = -1
            for fd in sorted(fd for fd in (control.fileno(), score) if fd >= 0):
                os.closerange(last + 1, fd)
                last = fd
            os.closerange(last + 1, 1 << 16)
            place_walls.give_up_rights(
                settings, has_filter=self._has_filter, counts_memory=not self._is_watched
            )
        except BaseException:
            _answer(control, error=traceback.format_exc(limit=-3))
            os._exit(70)
        place_keeper.serve(
            control,
            environment=settings["environment"],
            workdir=settings["workdir"],
            score=score,
            num_users=self.users.size,
        )

    def _map_users(self, fd: int) -> None:
        """Write the map of users of a keeper's new namespace."""
        channel = self._mapping.pop(fd)
        self._poll.unregister(fd)
        with channel:
            try:
                _, fds, _, _ = socket.recv_fds(channel, 16, 1)
            except OSError:
                return
            for process in fds:
                with contextlib.suppress(OSError):  # the keeper reports that it ended
                    self.users.write_maps(process)
                    channel.send(b"go")
                os.close(process)

    def _end(self, number: int, reply: socket.socket, *, is_last: bool) -> None:
        """End the processes of a place, and with `is_last` remove its files."""
        place = self._places.get(number)
        if place is None:
            _answer(reply)
            return
        place.is_ending |= is_last
        if place.pid:
            place.waits.append(reply.dup())
            os.kill(place.pid, signal.SIGKILL)  # our child, not yet waited for
            return
        if is_last:
            self._remove(number)
        _answer(reply)

    def _reap(self) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self._keepers.pop(pid, None)
            if number is None:
                continue  # a helper
            place = self._places[number]
            place.pid = 0
            if place.is_ending:
                self._remove(number)
            for reply in place.waits:
                _answer(reply)
                reply.close()
            place.waits.clear()

    def _remove(self, number: int) -> None:
        del self._places[number]
        place_walls.unmount_files(number)
        self._groups.end(number)

    def _watch(self) -> None:
        """End the commands of places that use too much memory, where no group counts it."""
        self._next_watch = time.monotonic() + _WATCH_S
        for pid, number in self._keepers.items():
            allowed = self._places[number].settings["memory_mb"] << 20
            for process in processes_over(self._proc, pid, allowed):
                with contextlib.suppress(OSError):
                    fd = os.pidfd_open(process)
                    # Still the same: the number alone could be reused.
                    if any(process == other for other, _ in tree(self._proc, pid)):
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
                    os.close(fd)

    def _stop(self) -> NoReturn:
        for pid in self._keepers:
            os.kill(pid, signal.SIGKILL)
        for pid in self._keepers:
            os.waitpid(pid, 0)
        self._groups.close()
        os._exit(0)

    # -- helpers

    def _help(self, order: dict[str, Any], fds: list[int], reply: socket.socket) -> None:
        """Fork a process that executes an order with files of a place, or of layers."""
        number = order.get("place", 0)
        root = f"{place_walls.STAGE}/{number}"
        keeper = self._places[number].pid if number in self._places else 0
        if os.fork():
            return
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            kernel.prctl(1, 9)  # PR_SET_PDEATHSIG
            files = place_files.PlaceFiles(root, self.users, self._layers)
            place_files.execute(files, order, fds[1:], reply, keeper)
        except BaseException as error:
            text = str(error) if isinstance(error, place_files.RefusedError | OSError) else ""
            _answer(reply, error=text or traceback.format_exc(limit=-3))
        os._exit(0)


def _protected_score() -> int:
    """Let the kernel end this process last when memory runs out; return the file, or -1."""
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, b"-1000")
    except OSError:
        os.close(fd)
        return -1
    return fd


def _answer(reply: socket.socket, **event: object) -> None:
    with contextlib.suppress(OSError):  # the parent waits no more
        reply.send(json.dumps(event or {"event": "done"}).encode())
