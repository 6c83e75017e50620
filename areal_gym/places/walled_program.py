"""Walls around a program of another author that speaks over its standard streams.

    walled_argv(["mcp-server-time"])  ->  [python, -m, areal_gym.places.walled_program, ...]

The program has namespaces of its own (network without an address, processes, mounts, ipc), reads
the file system and writes only to a scratch folder in memory, has no capabilities and gains none.
It ends with the process that started it. It reads what its user may read: this is for programs that
the user has chosen, and whose inputs are the policy's. Code of the policy runs in a sandbox.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

from areal_gym.sandbox.worker import kernel
from areal_gym.utils.child_python import python_argv

_SCRATCH = "/dev/shm"  # a folder that every Linux has, and that hides nothing
_SCRATCH_MB = 64
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_MAX_FILE_BYTES = 256 << 20


def walled_argv(argv: list[str]) -> list[str]:
    """Return the command that runs `argv` inside the walls."""
    return python_argv("-m", __name__, *argv)


def main() -> int:
    """Build the walls, run the program of the command line in them, and return its exit code."""
    kernel.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        _enter_namespaces()
    except OSError as error:
        print(f"this kernel allows no namespaces: {error}", file=sys.stderr)
        return 125
    pid = os.fork()  # the first process of the new pid namespace: all others end with it
    if not pid:
        kernel.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _run(sys.argv[1:])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.kill(pid, signal.SIGKILL))
    os.close(0)
    os.close(1)  # the program's end closes the pipe
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


def _enter_namespaces() -> None:
    uid, gid = os.geteuid(), os.getegid()
    if uid:
        kernel.unshare(kernel.NEWUSER)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"0 {uid} 1"),
            ("gid_map", f"0 {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    kernel.unshare(kernel.NEWNS | kernel.NEWPID | kernel.NEWNET | kernel.NEWIPC | kernel.NEWUTS)
    kernel.mount("", "/", "", kernel.PRIVATE | kernel.REC)
    kernel.restrict_mount("/", kernel.RDONLY | kernel.NOSUID, recursive=True)
    options = f"size={_SCRATCH_MB}m,mode=1777"
    kernel.mount("tmpfs", _SCRATCH, "tmpfs", kernel.NOSUID | kernel.NODEV, options)


def _run(argv: list[str]) -> None:
    """Become the init of the pid namespace: start the program, reap, and exit with its code."""
    kernel.mount("proc", "/proc", "proc", kernel.NOSUID | kernel.NODEV)
    os.chdir(_SCRATCH)
    os.environ.update(HOME=_SCRATCH, TMPDIR=_SCRATCH)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_MAX_FILE_BYTES, _MAX_FILE_BYTES))
    kernel.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    pid = os.fork()
    if not pid:
        kernel.drop_capabilities()
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            print(f"{argv[0]} does not start: {error.strerror}", file=sys.stderr)
            os._exit(127)
    os.closerange(0, 2)
    while True:
        ended, status = os.wait()
        if ended == pid:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    sys.exit(main())
