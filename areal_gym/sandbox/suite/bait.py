"""What a snippet could reach if it got out: files, a token, listening sockets."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

__all__ = ["Bait"]


class Bait:
    """Laid out on construction; `stack` takes it away again."""

    def __init__(self, stack: ExitStack) -> None:
        self.root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bait-")))
        self.root.chmod(0o755)
        self.secret = "tok3n" + os.urandom(8).hex()
        self.canary = self.root / "canary"
        self.canary.mkdir()
        (self.canary / "keep.txt").write_text("keep")
        (self.canary / "canary_module.py").write_text(f"TOKEN = {self.secret!r}")
        self.secret_file = self.root / "secret"
        self.secret_file.write_text(self.secret)
        self.secret_file.chmod(0o600)
        before = os.environ.get("API_KEY")
        os.environ["API_KEY"] = self.secret
        stack.callback(_restore, "API_KEY", before)
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
            self.free_port: int = free.getsockname()[1]

    def _listen(self, stack: ExitStack, family: int, address: Any) -> socket.socket:
        listener = stack.enter_context(socket.socket(family))
        listener.bind(address)
        listener.listen()
        listener.setblocking(False)
        return listener

    def fill(self, text: str, mark: str) -> str:
        """`text` with its placeholders replaced."""
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
        """What happened to the bait since the last look."""
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
        if os.environ.get("API_KEY") != self.secret:
            yield "environment changed"


def _restore(name: str, value: str | None) -> None:
    if value is None:
        del os.environ[name]
    else:
        os.environ[name] = value
