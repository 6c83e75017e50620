"""Runs the shared hostile snippets against a sandbox and tells which of their checks fail.

A script, because some of it must run as another user: `python hostile.py SNIPPETS UID WITHOUT...`
prints one JSON object. UID 0 stays the user that runs it.
"""

import asyncio
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from areal_gym.sandbox import ProcessSandbox, SandboxLimits
from areal_gym.sandbox.worker import kernel

HANG_S, WALL_S = 0.6, 10.0  # for snippets that are meant to hang, and for all others
STATUSES = {"memory": "error", "output": "killed"}  # names of ours that the file does not know


class Bait:
    """What a snippet could reach if it got out: files, a token, listening sockets."""

    def __init__(self, stack: ExitStack) -> None:
        self.root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.root.chmod(0o755)
        self.secret = "tok3n" + os.urandom(8).hex()
        self.canary = self.root / "canary"
        self.canary.mkdir()
        (self.canary / "keep.txt").write_text("keep")
        (self.canary / "canary_module.py").write_text(f"TOKEN = {self.secret!r}")
        self.secret_file = self.root / "secret"
        self.secret_file.write_text(self.secret)
        self.secret_file.chmod(0o600)
        os.environ["API_KEY"] = self.secret
        fd = os.open(self.secret_file, os.O_RDONLY)
        os.set_inheritable(fd, True)
        stack.callback(os.close, fd)
        self.abstract = "areal-gym-" + os.urandom(4).hex()
        self.tcp = self._listen(stack, socket.AF_INET, ("127.0.0.1", 0))
        self.unix = self._listen(stack, socket.AF_UNIX, str(self.root / "socket"))
        self.named = self._listen(stack, socket.AF_UNIX, "\0" + self.abstract)
        self.udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self.udp.bind(("127.0.0.1", 0))
        self.udp.setblocking(False)
        os.chmod(self.root / "socket", 0o777)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.free_port = free.getsockname()[1]

    def _listen(self, stack: ExitStack, family: int, address: object) -> socket.socket:
        listener = stack.enter_context(socket.socket(family))
        listener.bind(address)
        listener.listen()
        listener.setblocking(False)
        return listener

    def fill(self, text: str, mark: str) -> str:
        for name, value in {
            "MARK": mark,
            "LEAK": self.root / "leak",
            "SECRET": self.secret,
            "SECRET_PREFIX": self.secret[:8],
            "SECRET_FILE": self.secret_file,
            "CANARY_DIR": self.canary,
            "HOME": self.root / "home",
            "PORT": self.tcp.getsockname()[1],
            "UDP_PORT": self.udp.getsockname()[1],
            "FREE_PORT": self.free_port,
            "A300000": "a" * 300_000,
            "UNIX": self.root / "socket",
            "ABSTRACT": self.abstract,
            "PARENT_PID": os.getpid(),
        }.items():
            text = text.replace("{{" + name + "}}", str(value))
        return text

    def taken(self) -> Iterator[str]:
        """What happened to the bait."""
        for name, listener in (("tcp", self.tcp), ("unix", self.unix), ("abstract", self.named)):
            try:
                listener.accept()[0].close()
                yield f"connected to {name}"
            except BlockingIOError:
                pass
        try:
            self.udp.recv(100)
            yield "sent udp"
        except BlockingIOError:
            pass
        if sorted(path.name for path in self.canary.iterdir()) != ["canary_module.py", "keep.txt"]:
            yield "canary directory changed"
        if (self.canary / "keep.txt").read_text() != "keep":
            yield "canary changed"
        for name in ("leak", "home"):
            if (self.root / name).exists():
                yield f"wrote {name}"


def descendants(pid: int) -> set[int]:
    """All processes that `pid` started, directly or not."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            parents[int(entry)] = int(text.rpartition(")")[2].split()[1])
    found, new = set(), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


async def survivors(sandbox: ProcessSandbox) -> int:
    """Processes under the fork servers beyond the waiting cells, once things have settled."""
    for _ in range(100):
        num_extra = sum(
            len(descendants(zygote.server.pid))
            - len(zygote._warm)
            - ("user namespace" in zygote.protections)  # there the server is a child itself
            for zygote in sandbox._zygotes.values()
        )
        if num_extra <= 0:
            return 0
        await asyncio.sleep(0.05)
    return num_extra


def failed(checks: list[str], status: str, output: str) -> Iterator[str]:
    def is_met(name: str, argument: str) -> bool:
        match name:
            case "status":
                return status in argument.split("|")
            case "in_output":
                return argument in output
            case "not_in_output":
                return argument not in output
            case "exit":
                return (status == "ok") == (argument == "0")
            case "output_cap":
                return len(output) <= int(argument)
            case "host_absent":
                return not os.path.exists(argument)
            case "max_number_after":
                word, _, bound = argument.partition(":")
                return word not in output or int(output.split(word)[1].split()[0]) <= int(bound)
        return True  # looked at elsewhere

    for check in checks:
        name, _, argument = check.partition(":")
        if not is_met(name, argument):
            yield f"{check} (is {status})"


async def attack(snippets: list[dict], without: list[str]) -> dict[str, object]:
    """What failed, by snippet, and which protections were active."""
    failures: dict[str, list[str]] = {}
    with ExitStack() as stack:
        bait = Bait(stack)
        async with ProcessSandbox(num_workers=2, min_level="none", without=without) as sandbox:
            protections = (await sandbox.report()).protections
            for number, snippet in enumerate(snippets):
                mark = f"mark{os.getpid()}x{number}"
                hangs = "timeout" in snippet["safe_expected"] + str(snippet["checks"])
                limits = SandboxLimits(wall_s=HANG_S if hangs else WALL_S)
                result = await sandbox.run(bait.fill(snippet["code"], mark), limits=limits)
                status = STATUSES.get(result.status, str(result.status))
                output = result.stdout + result.stderr
                checks = [bait.fill(check, mark) for check in snippet["checks"]]
                problems = [*failed(checks, status, output), *bait.taken()]
                if num_extra := await survivors(sandbox):
                    problems.append(f"{num_extra} survivors")
                if (await sandbox.run("print(6*7)")).stdout != "42\n":
                    problems.append("the next snippet does not work")
                if problems:
                    failures[snippet["name"]] = problems
    return {"protections": protections, "failures": failures}


def become(uid: int) -> None:
    """Be an ordinary user, for whom the interpreter's directories open nevertheless."""
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


def main() -> None:
    file, uid, *without = sys.argv[1:]
    snippets = json.loads(Path(file).read_text())["snippets"]
    if only := os.environ.pop("ONLY", ""):
        snippets = [s for s in snippets if s["name"] in only.split(",")]
    if int(uid):
        become(int(uid))
    print(json.dumps(asyncio.run(attack(snippets, without))))


if __name__ == "__main__":
    main()
