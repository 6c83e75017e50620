"""A client for one server, whose requests return an answer or raise a clear error."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import aiohttp

from areal_gym.engines.base import BROKEN_WEIGHTS, adapter_name
from areal_gym.engines.servers.json_bodies import dump_json, load_json, message_of
from areal_gym.engines.servers.replies import INITIAL_WEIGHTS, Reply, ScoreRequest, TurnRequest
from areal_gym.engines.servers.replies import ServerFacts as ServerFacts
from areal_gym.errors import ConfigError, EngineError, EngineUnreachableError
from areal_gym.types import TopTokens

QUICK_S = 30.0
"""Seconds that suffice for a lookup on a busy machine."""
DISK_S = 600.0
ADAPTER_S = 120.0
MEMORY_S = 120.0
"""Seconds that suffice to unmap or map the memory of the largest GPUs."""
WEIGHTS, CACHE = "weights", "kv_cache"
"""Kinds of memory that servers release."""
_ASLEEP = "asleep:"
"""The first part of the weights' name that a sleeping server reports; the rest names the released
memory. A later run reads it, because a server dies when told to release memory twice."""
_LARGE_BYTES = 2**20
_KEEPALIVE_S = 3.0
"""Servers close idle connections after 5 s, and a request sent at that moment would be lost."""
_ONE_REQUEST = {"Connection": "close"}


class RefusedError(EngineError):
    """The server answered with a refusal."""

    def __init__(self, message: str, *, status: int = 0, hints: tuple[str, ...] = ()) -> None:
        super().__init__(message, hints=hints)
        self.status = status
        """The HTTP status; 200 for routes that refuse in the body."""


class ServerClient(ABC):
    """Sends requests to one server. Failures are `EngineError`s that quote the server.

    Subclasses implement the protocol of one kind of server.

    Args:
        url: the server's base URL, `http://host:port`.
        policy: the model that it should serve; messages name it in the start command.

    Raises:
        ConfigError: `url` is not a URL.
    """

    kind: ClassVar[str]
    """The server's name in messages."""
    protocol: ClassVar[str]
    """The protocol's name, by which weight syncs choose their requests."""
    context_flag: ClassVar[str]
    """The server's argument that sets its context."""
    version_route: ClassVar[str]
    """The route that reports the name of the server's weights."""
    survives_torn_updates: ClassVar[bool] = True
    """Whether a server can load weights after an update that was cut off."""
    can_wake_twice: ClassVar[bool] = False
    """Whether the server ignores a request to allocate memory that it has not released; else it
    dies."""
    pauses_to_abort: ClassVar[bool] = False
    """Whether `abort_and_pause` returns all requests; else `abort_all` is repeated."""

    def __init__(self, url: str, *, policy: Path | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            port = None
        if parts.scheme not in ("http", "https") or not parts.hostname or port is None:
            raise ConfigError(
                f"{url!r} is not the URL of a server",
                hints=["write it like http://127.0.0.1:30000"],
            )
        self.url = parts.geturl().rstrip("/")
        self.start_command = self.command_to_start(str(policy or "MODEL"), parts.hostname, port)
        self.loaded_from: tuple[Path, int] | None = None
        """The checkpoint directory that the server loaded last, and its version."""
        self.loaded_adapter: tuple[Path, int] | None = None
        """The directory of the LoRA adapter that the server loaded last, and its version."""
        self.num_ranks = 1
        """The number of processes that share the model; set by `probe`."""
        self._released: list[str] | None = None
        """The memory that the server has released; None before it slept."""
        self._session: aiohttp.ClientSession | None = None

    # ---- the protocol of a kind of server -------------------------------------------------------

    @staticmethod
    @abstractmethod
    def command_to_start(model: str, host: str, port: int) -> str:
        """Return a shell command that starts a server, for messages."""

    @abstractmethod
    async def probe(self) -> ServerFacts:
        """Ask what the server can do; sets `num_ranks`.

        Raises:
            EngineError: it is another kind of server, or lacks a required route.
        """

    @abstractmethod
    async def set_version(self, version: str) -> None:
        """Make the server report `version`; requests in flight continue."""

    @abstractmethod
    async def sample(self, request: TurnRequest, *, timeout_s: float) -> Reply:
        """Sample the next tokens of a turn."""

    @abstractmethod
    async def score(
        self, token_ids: Sequence[int], *, adapter: str | None, timeout_s: float
    ) -> list[float]:
        """Return the log-probabilities of `token_ids[1:]` at temperature 1."""

    @abstractmethod
    async def score_top(self, request: ScoreRequest, *, timeout_s: float) -> TopTokens:
        """Return the likeliest tokens in the places of a request at temperature 1."""

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """End a request whose caller has gone."""

    @abstractmethod
    async def abort_all(self) -> None:
        """Make the server return all requests with the tokens that they have."""

    async def abort_and_pause(self) -> None:
        """Make the server return all requests, and hold new ones until `resume`."""
        raise NotImplementedError

    @abstractmethod
    async def set_aside(self) -> None:
        """Hold requests in the server until `resume`, when their caches are recomputed."""

    @abstractmethod
    async def resume(self) -> None:
        """Continue after `set_aside` or `abort_and_pause`. Idempotent."""

    @abstractmethod
    async def _load(self, directory: str, version: str) -> None:
        """Load a checkpoint; the server reports `version` from then on, or keeps its weights."""

    @abstractmethod
    async def _load_adapter(self, name: str, directory: Path) -> None:
        """Load a LoRA adapter, for requests that name it."""

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter; return when no request uses it."""

    @abstractmethod
    async def begin_update(self) -> None:
        """Begin an update by tensors."""

    @abstractmethod
    async def end_update(self, version: int) -> None:
        """End an update for which all tensors of `version` were sent."""

    async def abandon_update(self) -> None:
        """End an update that failed; some of the new weights are loaded under the old name."""
        await self.set_version(BROKEN_WEIGHTS)

    @abstractmethod
    async def _release_memory(self, tags: Sequence[str]) -> None:
        """Release the memory of `tags`; requests are held already."""

    @abstractmethod
    async def _take_memory(self, tags: Sequence[str]) -> None:
        """Allocate the memory of `tags` again; its content is lost."""

    # ---- weights and memory, by these routes ----------------------------------------------------

    async def weight_version(self, *, timeout_s: float = QUICK_S) -> str:
        """Return the server's name for its weights; "default" before the first update."""
        info = await self.get(self.version_route, timeout_s=timeout_s)
        if "weight_version" not in info:
            raise self.is_another(f"{self.version_route} does not report a version of its weights")
        return str(info["weight_version"])

    async def load_from_disk(self, directory: Path, version: int, *, is_kept: bool = True) -> None:
        """Load the checkpoint in `directory`; the server reports `version` from then on.

        `is_kept` tells that the files stay unchanged, for servers that come back later.

        Raises:
            EngineError: the server refused, and keeps its weights.
        """
        await self._load(str(Path(directory).absolute()), str(version))
        if is_kept:
            self.loaded_from = (Path(directory), version)

    async def reload(self, model_path: str, version: str = INITIAL_WEIGHTS) -> None:
        """Load the weights that the server was started with, from its own `model_path`."""
        await self._load(model_path, version)

    async def load_adapter(self, directory: Path, version: int) -> None:
        """Load the LoRA adapter in `directory`, for requests that name `adapter_name(version)`.

        Raises:
            EngineError: the server refused it.
        """
        await self._load_adapter(adapter_name(version), Path(directory).absolute())
        self.loaded_adapter = (Path(directory), version)

    async def fall_asleep(self, tags: Sequence[str]) -> None:
        """Hold requests, and release the memory of `tags` (`WEIGHTS`, `CACHE`).

        A server that refuses to release only its cache keeps it, and sleeps nevertheless.

        Raises:
            RefusedError: it refused to release its weights; whether it has them is unknown.
        """
        await self.set_aside()
        await self.set_version(_ASLEEP + ",".join(tags))
        self._released = list(tags)
        try:
            await self._release_memory(tags)
        except RefusedError:
            if WEIGHTS in tags:
                raise
            if not self.can_wake_twice:
                await self.set_version(_ASLEEP)
                self._released = []

    async def take_back(self, *tags: str) -> bool:
        """Allocate released memory again; return whether any was released.

        Raises:
            EngineError: the server does not sleep, because it was restarted.
        """
        if await self.weight_version() == INITIAL_WEIGHTS:
            self._released = []
            raise EngineError(f"{self.url} was restarted while it slept")
        released = self._released or []
        taken = [tag for tag in released if tag in tags]
        await self._take_memory(taken)
        self._released = [tag for tag in released if tag not in taken]
        return bool(taken)

    async def wake_forgotten(self, model_path: str) -> None:
        """Wake a server that was left asleep by a killed run, or when it was lost.

        It gets the weights of its start, unless some were published while it slept. Does nothing if
        the server is awake.
        """
        name = await self.weight_version()
        if name == INITIAL_WEIGHTS:  # it was restarted
            self._released = []
        elif self._released is None and name.startswith(_ASLEEP):
            self._released = [tag for tag in name.removeprefix(_ASLEEP).split(",") if tag]
        if not self._released and not name.startswith(_ASLEEP):
            return
        await self.take_back(CACHE, WEIGHTS)
        if name.startswith(_ASLEEP):  # nothing was published since it fell asleep
            await self.reload(model_path)
        await self.resume()

    def is_another(self, reason: str) -> ConfigError:
        """Return the error for a server of another kind."""
        return ConfigError(
            f"{self.url} is not a server of {self.kind}: {reason}",
            hints=[f"start one: {self.start_command}"],
        )

    # ---- requests -----------------------------------------------------------------------------

    async def get(self, route: str, *, timeout_s: float = QUICK_S) -> dict[str, Any]:
        """Send a GET request.

        Raises:
            EngineUnreachableError: the server does not answer.
            RefusedError: the server refuses.
            EngineError: the answer is not from such a server.
        """
        return await self._request("GET", route, None, timeout_s, _ONE_REQUEST)

    async def post(
        self, route: str, body: dict[str, Any], *, timeout_s: float = QUICK_S
    ) -> dict[str, Any]:
        """Send a POST request on its own connection; raises as `get` does.

        vLLM closes a connection after an error of its own, so that another request on it would be
        lost.
        """
        return await self._request("POST", route, dump_json(body), timeout_s, _ONE_REQUEST)

    async def post_often(
        self, route: str, body: dict[str, Any], *, timeout_s: float
    ) -> dict[str, Any]:
        """Send a POST request on a connection that is reused; raises as `get` does."""
        return await self._request("POST", route, dump_json(body), timeout_s, {})

    async def aclose(self) -> None:
        """Close the connections; pending requests raise `EngineUnreachableError`.

        The next request opens new ones.
        """
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _request(
        self,
        method: str,
        route: str,
        data: bytes | None,
        timeout_s: float,
        headers: dict[str, str],
    ) -> dict[str, Any]:
        if self._session is None:
            # The default connector has only 100 connections, so the 101st episode would wait.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=None),
            )
        # Large bodies are sent in pieces, so that other calls continue meanwhile.
        body = io.BytesIO(data) if data and len(data) > _LARGE_BYTES else data
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, self.url + route, data=body, timeout=timeout, headers=headers
            ) as response:
                answer = await response.read()
                status = response.status
        except TimeoutError as error:
            message = f"{self.url}{route} gave no answer within {timeout_s:g} s"
            raise EngineUnreachableError(message) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachableError(
                f"no answer from {self.url}: {_reason(error)}",
                hints=[f"start the server: {self.start_command}"],
            ) from error
        return self._read(route, status, response.content_type, answer)

    def _parse(self, route: str, body: bytes) -> Any:
        """Parse the JSON of an answer; raises ValueError for anything else."""
        return load_json(body)

    def _read(self, route: str, status: int, content_type: str, body: bytes) -> dict[str, Any]:
        answer: Any
        if content_type == "application/json" and body:
            try:
                answer = self._parse(route, body)
            except ValueError:
                excerpt = body[:80].decode("utf-8", "replace")
                raise EngineError(f"{self.url}{route} answers invalid JSON: {excerpt!r}") from None
        elif content_type == "text/html":
            raise EngineError(
                f"{self.url} answers HTML: it is not a server of {self.kind}",
                hints=[f"start one: {self.start_command}"],
            )
        else:
            answer = {"message": body.decode("utf-8", "replace").strip()}
        if status == 200 and answer is None:
            return {}
        if status == 200 and isinstance(answer, dict) and answer.get("success") is not False:
            return answer
        message = f"{self.url}{route} refused (HTTP {status}): {message_of(answer)}"
        raise RefusedError(message, status=status)


def is_refused(error: BaseException) -> bool:
    """Return whether the connection was refused; if not, the server may only be busy."""
    return isinstance(error.__cause__, aiohttp.ClientConnectorError)


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError) and (error.os_error.errno or 0) > 0:
        return os.strerror(error.os_error.errno or 0)
    return str(error) or type(error).__name__
