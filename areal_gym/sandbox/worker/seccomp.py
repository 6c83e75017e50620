"""The seccomp filter: it allows the system calls that a snippet needs, and no others.

Calls that the list (`syscalls`) does not allow are refused with EPERM, which does not end the
process, so that a snippet that tries the network gets an ordinary `PermissionError`. Some calls are
allowed with certain arguments only, as far as these are numbers: a filter cannot read memory, so it
does not know paths.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable

from . import kernel, syscalls

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_NEW_NAMESPACE = 0x7E020000
_CLONE_THREAD = 0x00010000
_TRUNCATE = 0o1000
_SOL_SOCKET = 1

# The allowed values of one argument.
# fcntl: descriptors, their flags, locks, reading the size of a pipe's buffer; not setting it (up to
# a megabyte each), nor signals to other processes (F_SETOWN and F_SETSIG).
_FCNTL = (*range(8), 36, 37, 38, 1030, 1032, 1034)
# ioctl: terminal settings (every open() asks), waiting bytes, blocking, close on exec. A file's
# flags and attributes are metadata.
_IOCTL = (0x5401, 0x540F, 0x5411, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# prctl: names, readable settings, huge pages, slack of timers; not the settings of our isolation
# (the signal at the parent's death, whether /proc shows it).
_PRCTL = (2, 3, 7, 15, 16, 21, 23, 27, 29, 30, 37, 38, 39, 40, 41, 42, 52, 0x53564D41)
# setsockopt: options of time, lingering and credentials; not the size of buffers, since their
# content is not counted.
_SETSOCKOPT = (2, 9, 13, 16, 20, 21, 66, 67)

# In a place also: the signal at the parent's death, capabilities and filters (to give up more of
# them), adoption of orphans.
_PLACE_PRCTL = (*_PRCTL, 1, 4, 8, 22, 24, 36, 47)
# TIOCSTI and TIOCLINUX, which type into a terminal.
_TYPING = (0x5412, 0x541C)
# The size of buffers, also by force.
_BUFFERS = (7, 8, 32, 33)
# Unix, IPv4, IPv6; streams, datagrams, packets; TCP and UDP. Nothing that loads a module.
_FAMILIES, _TYPES, _PROTOCOLS = (1, 2, 10), (1, 2, 5), (0, 6, 17)

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_EQUAL, _ABOVE, _AT_LEAST, _ANY_BIT = 0x15, 0x25, 0x35, 0x45
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
# Offsets in struct seccomp_data; the low half of an argument comes first on both machines.
_NUMBER, _ARCH = 0, 4
_ARGUMENTS = tuple(range(16, 64, 8))

_Step = tuple[int, int, int, int]  # code, jump if true, jump if false, operand

_refused: list[_Step] = [(_RETURN, 0, 0, _REFUSE | errno.EPERM)]
_missing: list[_Step] = [(_RETURN, 0, 0, _REFUSE | errno.ENOSYS)]
_allowed: list[_Step] = [(_RETURN, 0, 0, _ALLOW)]


def build_filter(
    *,
    allow_fork: bool,
    allow_metadata: bool,
    allow_truncate: bool,
    own_pid: int | None,
    server_pid: int | None = None,
) -> bytes:
    """Return the program for snippets on this machine, ready for `install`.

    Args:
        allow_fork: whether new processes are allowed (threads always are).
        allow_metadata: whether modes, owners and times may be set.
        allow_truncate: whether files may be truncated by path.
        own_pid: the only process that may be signalled, if no pid namespace hides the others.
        server_pid: the fork server in a container, which has the same user as its children: they
            must not send it signals or set its limits.

    Raises:
        OSError: the filter does not support this architecture.
    """
    rules = {
        **_process_rules(allow_fork),
        **_file_rules(allow_metadata, allow_truncate),
        **_signal_rules(own_pid, server_pid),
        "fcntl": _only(1, _FCNTL),
        "ioctl": _only(1, _IOCTL),
        "prctl": _only(0, _PRCTL),
        "setsockopt": [*_unless(1, _SOL_SOCKET), *_only(2, _SETSOCKOPT)],
        # A datagram pair could still send elsewhere; a stream cannot.
        "socketpair": [(_LOAD, 0, 0, _ARGUMENTS[1]), (_AND, 0, 0, 0xF), *_one_of((1,))],
        "socket": _refused,
    }
    return _assemble(rules, {**syscalls.FREE, **(syscalls.METADATA if allow_metadata else {})})


def build_place_filter(*, counts_memory: bool) -> bytes:
    """Return the program for all processes of a place, whose network reaches only itself.

    Args:
        counts_memory: whether a control group counts memory that belongs to no process.

    Raises:
        OSError: the filter does not support this architecture.
    """
    rules = {
        **_process_rules(True),
        **_file_rules(True, True),
        **_signal_rules(None, server_pid=1),
        "fcntl": _allowed,
        "ioctl": _all_but(1, *_TYPING),
        "prctl": _only(0, _PLACE_PRCTL),
        # Options of the protocols are free; at the level of sockets all but the buffers' size.
        "setsockopt": [
            (_LOAD, 0, 0, _ARGUMENTS[1]),
            (_EQUAL, 1, 0, _SOL_SOCKET),
            *_allowed,
            *_all_but(2, *_BUFFERS),
        ],
        "socketpair": [(_LOAD, 0, 0, _ARGUMENTS[0]), *_one_of((1,))],
        "socket": [
            *_unless(2, *_PROTOCOLS),
            (_LOAD, 0, 0, _ARGUMENTS[1]),
            (_AND, 0, 0, 0xF),
            *_one_of(_TYPES, then=[(_LOAD, 0, 0, _ARGUMENTS[0]), *_one_of(_FAMILIES)]),
        ],
    }
    counted = syscalls.COUNTED if counts_memory else {}
    free = {**syscalls.FREE, **syscalls.METADATA, **syscalls.PLACES, **counted}
    return _assemble(rules, free)


def _assemble(rules: dict[str, list[_Step]], free: dict[str, tuple[int, ...]]) -> bytes:
    """Return the program with `rules` for guarded calls, which allows `free` and refuses others."""
    column = syscalls.COLUMNS.get(platform.machine())
    if column is None:
        raise OSError(errno.ENOSYS, f"no filter for {platform.machine()}")
    steps: list[_Step] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _ARCHITECTURES[platform.machine()]),
        *_refused,
        (_LOAD, 0, 0, _NUMBER),
        (_ABOVE, 0, 1, syscalls.LAST),  # includes the x32 numbers
        *_missing,
    ]
    # glibc falls back to calls whose arguments a filter can read.
    rules = {**dict.fromkeys(("clone3", "openat2"), _missing), **rules}
    for name, rule in rules.items():
        number = syscalls.GUARDED[name][column]
        if number >= 0:
            steps += [(_EQUAL, 0, len(rule), number), *rule]
    steps += _ranges(numbers[column] for numbers in free.values())
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _one_of(values: Iterable[int], then: list[_Step] = _allowed) -> list[_Step]:
    """Continue with `then`, by default allow, if the loaded value is one of `values`."""
    chosen = [*values]
    tests = [(_EQUAL, len(chosen) - n, 0, value) for n, value in enumerate(chosen)]
    return [*tests, *_refused, *then]


def _only(argument: int, values: Iterable[int]) -> list[_Step]:
    """Allow if the low half of an argument is one of `values`."""
    return [(_LOAD, 0, 0, _ARGUMENTS[argument]), *_one_of(values)]


def _all_but(argument: int, *values: int) -> list[_Step]:
    """Refuse if the low half of an argument is one of `values`; otherwise allow."""
    tests = [step for value in values for step in ((_EQUAL, 0, 1, value), *_refused)]
    return [(_LOAD, 0, 0, _ARGUMENTS[argument]), *tests, *_allowed]


def _unless(argument: int, *values: int) -> list[_Step]:
    """Refuse if the low half of an argument is none of `values`; otherwise continue."""
    return [(_LOAD, 0, 0, _ARGUMENTS[argument]), *_one_of(values, then=[])]


def _process_rules(allow_fork: bool) -> dict[str, list[_Step]]:
    clone: list[_Step] = [(_LOAD, 0, 0, _ARGUMENTS[0]), (_ANY_BIT, 0, 1, _NEW_NAMESPACE), *_refused]
    if not allow_fork:
        clone += [(_ANY_BIT, 1, 0, _CLONE_THREAD), *_refused]
    forks = _allowed if allow_fork else _refused
    return {"clone": [*clone, *_allowed], "fork": forks, "vfork": forks}


def _file_rules(allow_metadata: bool, allow_truncate: bool) -> dict[str, list[_Step]]:
    def opening(argument: int) -> list[_Step]:
        if allow_metadata:
            return _allowed
        # Opening for reading can still truncate a file, and Landlock only sees the reading.
        flags: list[_Step] = [
            (_LOAD, 0, 0, _ARGUMENTS[argument]),
            (_AND, 0, 0, os.O_ACCMODE | _TRUNCATE),
            (_EQUAL, 0, 1, _TRUNCATE),
        ]
        return [*flags, *_refused, *_allowed]

    return {
        "open": opening(1),
        "openat": opening(2),
        "truncate": _allowed if allow_truncate else _refused,
    }


def _signal_rules(own_pid: int | None, server_pid: int | None) -> dict[str, list[_Step]]:
    names = (
        *("kill", "tgkill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal"),
        *("prlimit64", "sched_setaffinity"),
    )
    if own_pid is None:
        return dict.fromkeys(names, _all_but(0, server_pid) if server_pid else _allowed)
    itself, zero_or_itself = _only(0, (own_pid,)), _only(0, (0, own_pid))
    own_rules = {"kill": itself, "tgkill": itself, "prlimit64": zero_or_itself}
    return dict.fromkeys(names, _refused) | own_rules


def _ranges(numbers: Iterable[int]) -> list[_Step]:
    """Allow these calls and refuse all others."""
    ends: list[tuple[int, int]] = []
    for number in sorted(number for number in numbers if number >= 0):
        if ends and ends[-1][1] == number - 1:
            ends[-1] = (ends[-1][0], number)
        else:
            ends.append((number, number))
    steps: list[_Step] = []
    for index, (first, last) in enumerate(ends):
        # The distance from the next two steps to the refusal, which the permission follows.
        left = 2 * (len(ends) - index) - 1
        steps += [(_AT_LEAST, 0, left, first), (_ABOVE, 0, left, last)]
    return [*steps, *_refused, *_allowed]


class _Program(ctypes.Structure):
    _fields_ = (("num_steps", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def install(program: bytes) -> None:
    """Install `program` for this process and its children, for good. Needs no_new_privs."""
    description = _Program(len(program) // 8, program)
    kernel.prctl(22, 2, ctypes.byref(description))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def is_supported() -> bool:
    """Return whether this kernel has seccomp filters and the table covers the machine."""
    return platform.machine() in _ARCHITECTURES and os.path.exists("/proc/sys/kernel/seccomp")
