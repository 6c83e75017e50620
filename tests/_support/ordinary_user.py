"""Runs the suite of hostile snippets as another user.

    python -m tests._support.ordinary_user UID ARGUMENT...

UID 0 stays the user that runs it.
"""

import os
import sys

from areal_gym.sandbox.suite.__main__ import main
from areal_gym.sandbox.worker import kernel


def become(uid: int) -> None:
    """Become an ordinary user who can still read the interpreter's directories."""
    kernel.unshare(kernel.NEWNS)
    kernel.mount("none", "/", "", kernel.REC | kernel.PRIVATE)
    if os.stat("/root").st_mode & 0o005 != 0o005:
        home = os.open("/root", os.O_PATH)
        kernel.mount("none", "/root", "tmpfs", 0, "mode=755")
        for name in os.listdir(f"/proc/self/fd/{home}"):
            if os.path.isdir(f"/proc/self/fd/{home}/{name}"):
                os.mkdir(f"/root/{name}")
                source = f"/proc/self/fd/{home}/{name}"
                kernel.mount(source, f"/root/{name}", "", kernel.BIND | kernel.REC)
        os.close(home)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kernel.prctl(4, 1)  # PR_SET_DUMPABLE: /proc/self is ours again


if __name__ == "__main__":
    if int(sys.argv[1]):
        become(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
