"""A small seccomp filter: what a snippet has no use for and an attacker has.

The filter refuses with EPERM; it does not end the process, so that a snippet which tries the
network sees an ordinary `PermissionError`. It denies by list: it narrows what the namespaces, the
dropped capabilities and the private uid leave open, and is not a wall of its own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

from . import kernel

__all__ = ["build_filter", "install", "is_supported"]

# AUDIT_ARCH and the column of the table.
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# System call numbers on x86_64 and aarch64; -1 where there is none.
_DENIED = {
    # the network, and sockets of the host's other programs (socketpair stays: event loops need it)
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "setpriority": (141, 140),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    # namespaces and file systems
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    # large attack surfaces of the kernel
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "personality": (135, 92),
    # memory and messages that outlive the process or escape its limits
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # the clock
    "clock_settime": (227, 112),
    "settimeofday": (164, 170),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
}
_CLONE, _CLONE3, _FORK, _VFORK = (56, 220), (435, 435), (57, -1), (58, -1)
_SOCKETPAIR = (53, 199)
_KILL, _TKILL, _TGKILL, _PRLIMIT = (62, 129), (200, 130), (234, 131), (302, 261)
_SIGQUEUE, _TGSIGQUEUE, _PIDFD_SIGNAL, _SETAFFINITY = (129, 138), (297, 240), (424, 424), (203, 122)

_NEW_NAMESPACE = 0x7E020000
_CLONE_THREAD = 0x00010000

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_EQUAL, _AT_LEAST, _ANY_BIT = 0x15, 0x35, 0x45
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_NUMBER, _ARCH, _ARGUMENT0, _ARGUMENT1 = 0, 4, 16, 24  # offsets in struct seccomp_data

_Step = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def build_filter(*, allow_fork: bool, own_pid: int | None) -> bytes:
    """The program for this machine, ready for `install`.

    Args:
        allow_fork: whether new processes are allowed (threads always are).
        own_pid: where no pid namespace hides the others, the only process that may be signalled.

    Raises:
        OSError: the filter is not written for this architecture.
    """
    try:
        arch, column = _MACHINES[platform.machine()]
    except KeyError:
        raise OSError(errno.ENOSYS, f"no filter for {platform.machine()}") from None
    refused, missing = _REFUSE | errno.EPERM, _REFUSE | errno.ENOSYS
    steps: list[_Step] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, refused),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, 0x40000000),  # the x32 numbers would walk around the list
        (_RETURN, 0, 0, refused),
        # glibc falls back to clone, whose flags a filter can read.
        (_EQUAL, 0, 1, _CLONE3[column]),
        (_RETURN, 0, 0, missing),
    ]

    def when(call: tuple[int, int], body: list[_Step]) -> None:
        if call[column] >= 0:
            steps.append((_EQUAL, 0, len(body), call[column]))
            steps.extend(body)

    refuse: list[_Step] = [(_RETURN, 0, 0, refused)]
    allow: list[_Step] = [(_RETURN, 0, 0, _ALLOW)]
    for call in _DENIED.values():
        when(call, refuse)
    clone: list[_Step] = [(_LOAD, 0, 0, _ARGUMENT0), (_ANY_BIT, 0, 1, _NEW_NAMESPACE), *refuse]
    if not allow_fork:
        clone += [(_ANY_BIT, 1, 0, _CLONE_THREAD), *refuse]
        when(_FORK, refuse)
        when(_VFORK, refuse)
    when(_CLONE, clone + allow)
    # A datagram pair could still be told to send elsewhere; a stream cannot.
    stream: list[_Step] = [(_LOAD, 0, 0, _ARGUMENT1), (_AND, 0, 0, 0xF), (_EQUAL, 1, 0, 1)]
    when(_SOCKETPAIR, [*stream, *refuse, *allow])
    if own_pid is not None:
        itself: list[_Step] = [(_LOAD, 0, 0, _ARGUMENT0), (_EQUAL, 1, 0, own_pid)]
        for call in (_KILL, _TGKILL):
            when(call, [*itself, *refuse, *allow])
        zero_or_itself: list[_Step] = [itself[0], (_EQUAL, 2, 0, 0), (_EQUAL, 1, 0, own_pid)]
        when(_PRLIMIT, [*zero_or_itself, *refuse, *allow])
        for call in (_TKILL, _SIGQUEUE, _TGSIGQUEUE, _PIDFD_SIGNAL, _SETAFFINITY):
            when(call, refuse)
    steps += allow
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


class _Program(ctypes.Structure):
    _fields_ = (("num_steps", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def install(program: bytes) -> None:
    """Put this process and its children under `program`, for good. Needs no_new_privs."""
    description = _Program(len(program) // 8, program)
    kernel.prctl(22, 2, ctypes.byref(description))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def is_supported() -> bool:
    """Whether this kernel has seccomp filters and the table knows the machine."""
    return platform.machine() in _MACHINES and os.path.exists("/proc/sys/kernel/seccomp")
