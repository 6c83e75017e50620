"""One SGLang server, as its client sees it: requests that either answer or raise a clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from areal_gym.errors import ConfigError, EngineError, EngineUnreachableError

__all__ = ["RefusedError", "SGLangServer"]

_QUICK_S = 30.0
"""Long enough for a route that only looks something up, on a busy machine."""
_DISK_S = 600.0


class RefusedError(EngineError):
    """The server answered, and the answer is no."""

    def __init__(self, message: str, *, status: int = 0, hints: tuple[str, ...] = ()) -> None:
        super().__init__(message, hints=hints)
        self.status = status
        """Of HTTP; 200 for routes that say no in the body."""


class SGLangServer:
    """Asks one server. What fails is an `EngineError`, with the server's own words.

    Args:
        url: where it answers, `http://host:port`.
        policy: what it should serve; for the start command that errors name.

    Raises:
        ConfigError: `url` is none.
    """

    def __init__(self, url: str, *, policy: Path | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"{url!r} is no URL of a server", hints=["write it like http://127.0.0.1:30000"]
            )
        self.url = parts.geturl().rstrip("/")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        self.start_command = (
            f"python -m sglang.launch_server --model-path {policy or 'MODEL'} "
            f"--host {parts.hostname} --port {port}"
        )
        self.loaded_from: tuple[Path, int] | None = None
        """The checkpoint directory that it took last, and as which version."""
        self._session: aiohttp.ClientSession | None = None

    async def get(self, route: str, *, timeout_s: float = _QUICK_S) -> dict[str, Any]:
        """Ask a route that only looks.

        Raises:
            EngineUnreachableError: nobody answers.
            RefusedError: the answer is no.
            EngineError: the answer is no SGLang server's.
        """
        return await self._ask("GET", route, None, timeout_s)

    async def post(
        self, route: str, body: dict[str, Any], *, timeout_s: float = _QUICK_S
    ) -> dict[str, Any]:
        """Ask a route that does something; raises as `get` does."""
        return await self._ask("POST", route, json.dumps(body).encode(), timeout_s)

    async def load_from_disk(self, directory: Path, version: int) -> None:
        """Take the checkpoint in `directory`, and report `version` from now on.

        Raises:
            EngineError: the server keeps what it has, and says why.
        """
        body = {
            "model_path": str(Path(directory).absolute()),
            "weight_version": str(version),
            "flush_cache": True,
        }
        await self.post("/update_weights_from_disk", body, timeout_s=_DISK_S)
        self.loaded_from = (Path(directory), version)

    async def has_route(self, route: str) -> bool:
        """Whether a POST route exists: asked with GET, it answers 405 then, and 404 otherwise.

        Raises:
            EngineError: as `get`.
        """
        try:
            await self.get(route)
        except RefusedError as refused:
            return refused.status != 404
        return True

    async def weight_version(self) -> str:
        """What it calls the weights that it serves; "default" before the first update."""
        return str((await self.get("/model_info"))["weight_version"])

    async def is_healthy(self, *, timeout_s: float) -> bool:
        """Whether it serves; it may be starting, or too busy to say.

        Raises:
            EngineUnreachableError: nobody is there any more.
        """
        try:
            await self.get("/health", timeout_s=timeout_s)
        except EngineUnreachableError as error:
            if isinstance(error.__cause__, TimeoutError):
                return False
            raise
        except EngineError:
            return False
        return True

    def drop_connections(self) -> None:
        """Whoever waits for an answer gets `EngineUnreachableError` now."""
        session, self._session = self._session, None
        if session is not None and session.connector is not None:
            # Closes sockets at once; the awaitable is only about those that say goodbye (TLS).
            session.connector.close()
            session.detach()

    async def aclose(self) -> None:
        """Close the connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _ask(
        self, method: str, route: str, data: bytes | None, timeout_s: float
    ) -> dict[str, Any]:
        if self._session is None:
            # The default connector has 100 connections, and the 101st episode would wait.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=None),
            )
        try:
            async with self._session.request(
                method, self.url + route, data=data, timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as response:
                body = await response.read()
                status = response.status
        except TimeoutError as error:
            raise EngineUnreachableError(
                f"{self.url}{route} gave no answer within {timeout_s:g} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachableError(
                f"no answer from {self.url}: {error or type(error).__name__}",
                hints=[f"start the server: {self.start_command}"],
            ) from error
        return self._read(route, status, response.content_type, body)

    def _read(self, route: str, status: int, content_type: str, body: bytes) -> dict[str, Any]:
        answer: Any
        if content_type == "application/json" and body:
            try:
                answer = json.loads(body)
            except ValueError:
                raise EngineError(
                    f"{self.url}{route} answers broken JSON: {_begin(body)}"
                ) from None
        elif content_type == "text/html":
            raise EngineError(
                f"{self.url} answers HTML: it is no SGLang server",
                hints=[f"start one: {self.start_command}"],
            )
        else:
            answer = {"message": body.decode("utf-8", "replace").strip()}
        if status == 200 and answer is None:
            return {}
        if status == 200 and isinstance(answer, dict) and answer.get("success") is not False:
            return answer
        raise RefusedError(
            f"{self.url}{route} refused (HTTP {status}): {_words(answer)}", status=status
        )


def _words(answer: Any) -> str:
    """Why, in the server's words: every family of routes has its own shape."""
    if isinstance(answer, dict):
        for key in ("error", "message", "error_message", "detail"):
            if answer.get(key):
                inner = answer[key]
                return _words(inner) if isinstance(inner, dict) else str(inner)
    return json.dumps(answer)[:300] if answer else "no reason given"


def _begin(body: bytes) -> str:
    return repr(body[:80].decode("utf-8", "replace"))
