"""The relays of an engine's servers, for `delta`: one per machine, started where possible."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from areal_gym.errors import EngineError
from areal_gym.trainer.weight_sync.launched_relay import LaunchedRelay
from areal_gym.trainer.weight_sync.local_servers import find_local_server
from areal_gym.trainer.weight_sync.rank_posts import server_info
from areal_gym.utils.http_servers.addresses import http_address

_PORT = 30100


class Relays:
    """Maps servers to relays, and starts a relay for servers that this process started.

    Args:
        port: the port of relays that are running; None starts one where possible.
        directory: a directory on disk for the files of a started relay.
    """

    def __init__(self, port: int | None, directory: Path | None) -> None:
        self._port = port
        self._directory = directory or Path(tempfile.gettempdir())
        self._started: LaunchedRelay | None = None

    def of(self, urls: Sequence[str]) -> dict[str, str]:
        """Return the URL of each server's relay, by the server's URL.

        Raises:
            EngineError: a relay did not start.
        """
        own = [url for url in urls if self._port is None and _is_started_here(url)]
        if self._started is not None and not self._started.is_running:
            self.close()
        if own and self._started is None:
            self._started = LaunchedRelay(self._directory, _num_bytes(own[0]))
        return {url: self._relay_of(url, own) for url in urls}

    def _relay_of(self, url: str, own: Sequence[str]) -> str:
        if self._started is not None and url in own:
            return self._started.url
        return http_address(urlsplit(url).hostname or "127.0.0.1", self._port or _PORT)

    def close(self) -> None:
        """End the started relay."""
        relay, self._started = self._started, None
        if relay is not None:
            relay.close()


def _is_started_here(url: str) -> bool:
    server = find_local_server(url)
    return server is not None and server.pid != os.getpid() and server.is_below(os.getpid())


def _num_bytes(url: str) -> int | None:
    """Return the bytes that a server's weights need, even in a wider type; None if unknown."""
    with suppress(EngineError, OSError):
        policy = Path(str(server_info(url).get("model_path")))
        return 2 * sum(file.stat().st_size for file in policy.glob("*.safetensors")) or None
    return None
