"""The socket by which the keeper of a container is reached, in a folder that is mounted into it.

/tmp/areal-gym-place-XXXX/owner        the label of the owner, by which remains are known
/tmp/areal-gym-place-XXXX/socket/s     -> /.areal-gym/s in the container, while a keeper starts
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from areal_gym.places.local_server import receive
from areal_gym.places.owners import is_gone
from areal_gym.sandbox.worker import place_keeper

FOLDER = "/.areal-gym"
"""The place of the folder in a container."""

_PREFIX = "areal-gym-place-"
_START_S = 60.0
_LOOK_S = 0.1
# The keeper replaces the shell, so that it is the first process of the container, which no other
# one can kill. An image without it ends, and is started again with the engine's init. A container
# whose commands have broken its python3 only waits.
_SCRIPT = """\
if [ -e "$2.none" ]; then while :; do sleep 86400; done; fi
command -v python3 >/dev/null 2>&1 || exit 71
exec python3 -I -S -c "$1" "$2"
"""


def keeper_entrypoint() -> list[str]:
    """Return the first command of a container, which becomes its keeper."""
    source = Path(place_keeper.__file__).read_text("utf-8")
    return ["/bin/sh", "-c", _SCRIPT, "sh", source, f"{FOLDER}/s"]


class KeeperSocket:
    """The folder of one container; `owner` is the label of its owner."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._parent = Path(tempfile.mkdtemp(prefix=_PREFIX))
        (self._parent / "owner").write_text(owner)
        self.folder = self._parent / "socket"
        """The folder to mount; any user may pass it, but only the container reaches it."""
        self.folder.mkdir()
        self.folder.chmod(0o711)

    async def connect(
        self, start: Callable[[], Awaitable[object]], is_running: Callable[[], Awaitable[bool]]
    ) -> socket.socket | None:
        """Call `start` and return the connection of the keeper that it starts.

        None if the container has ended, or no keeper has called within a minute.
        """
        path = self.folder / "s"
        path.unlink(missing_ok=True)
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(path))
            try:
                path.chmod(0o666)
                listener.listen(1)
                listener.setblocking(False)
                await start()
                accepting = loop.create_task(loop.sock_accept(listener))
                deadline = loop.time() + _START_S
                try:
                    while loop.time() < deadline:
                        await asyncio.wait({accepting}, timeout=_LOOK_S)
                        if accepting.done():
                            return await _started(accepting.result()[0])
                        if not await is_running():
                            return None
                    return None
                finally:
                    accepting.cancel()
            finally:
                path.unlink(missing_ok=True)  # nothing in the container can connect later

    def give_up(self) -> None:
        """Let the container wait at its next start, without a keeper."""
        (self.folder / "s.none").touch()

    def remove(self) -> None:
        """Remove the folder. Idempotent."""
        shutil.rmtree(self._parent, ignore_errors=True)


async def _started(connection: socket.socket) -> socket.socket | None:
    """Return the connection of a keeper that says it has started; else None."""
    connection.setblocking(False)
    try:
        async with asyncio.timeout(_START_S):
            event, _ = await receive(connection)
    except (OSError, ValueError):  # TimeoutError is an OSError
        event = {}
    except BaseException:
        connection.close()
        raise
    if event.get("event") == "started":
        return connection
    connection.close()
    return None


def remove_abandoned_sockets() -> None:
    """Remove the folders of owners that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            owner = (folder / "owner").read_text()
        except OSError:
            continue  # being made, or another user's
        if is_gone(owner):
            shutil.rmtree(folder, ignore_errors=True)
