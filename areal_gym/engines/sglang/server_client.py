"""One SGLang server, as its client sees it: requests that either answer or raise a clear error."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from areal_gym.errors import ConfigError, EngineError, EngineUnreachableError

_QUICK_S = 30.0
"""Long enough for a route that only looks something up, on a busy machine."""
_DISK_S = 600.0
_KEEPALIVE_S = 3.0
"""SGLang hangs up on idle connections after 5 s; a request sent at that moment would be lost."""
_RESERVED_TOKENS = 6
"""By so much a prompt must be shorter than SGLang's context, as `max_req_input_len` shows."""


class RefusedError(EngineError):
    """The server answered, and the answer is no."""

    def __init__(self, message: str, *, status: int = 0, hints: tuple[str, ...] = ()) -> None:
        super().__init__(message, hints=hints)
        self.status = status
        """Of HTTP; 200 for routes that say no in the body."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """What a server says about itself."""

    version: str
    """Of SGLang."""
    model_path: str
    weight_version: str
    max_context: int
    """Prompt and at least one new token."""
    vocab_size: int | None
    """Of the model; None when the server does not say."""
    can_retract: bool
    """Requests can be set aside while weights change, and continue where they stopped (0.5.21 and
    later). Earlier ones have the pause, too, but die of an update while requests wait."""
    has_seeds: bool
    """It samples the same tokens for the same seed (`--enable-deterministic-inference`)."""


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
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            port = None
        if parts.scheme not in ("http", "https") or not parts.hostname or port is None:
            raise ConfigError(
                f"{url!r} is no URL of a server", hints=["write it like http://127.0.0.1:30000"]
            )
        self.url = parts.geturl().rstrip("/")
        self.start_command = (
            f"python -m sglang.launch_server --model-path {policy or 'MODEL'} "
            f"--host {parts.hostname} --port {port}"
        )
        self.loaded_from: tuple[Path, int] | None = None
        """The checkpoint directory that it took last, and as which version."""
        self.needs_update_session = True
        """Weights other than a directory's must come between `/begin_weight_update` and
        `/end_weight_update` (SGLang 0.5.21 and later); `look` finds out."""
        self.num_ranks = 1
        """Processes that share the model (tensor parallelism); `look` finds out."""
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

    async def weight_version(self, *, timeout_s: float = _QUICK_S) -> str:
        """What it calls the weights that it serves; "default" before the first update.

        Raises:
            EngineError: as `get`.
        """
        info = await self.get("/model_info", timeout_s=timeout_s)
        if "weight_version" not in info:
            raise EngineError(f"{self.url} is no SGLang server: it has no weight version")
        return str(info["weight_version"])

    async def look(self) -> ServerFacts:
        """What kind of server this is; sets `needs_update_session`.

        Raises:
            EngineError: as `get`, or it is no SGLang server.
        """
        weight_version = await self.weight_version()
        info = await self.get("/server_info")
        max_prompt = info.get("max_req_input_len")
        if max_prompt is None:
            models = await self.get("/v1/models")
            max_prompt = models["data"][0]["max_model_len"] - _RESERVED_TOKENS
        states = info.get("internal_states") or [info]
        self.num_ranks = int(states[0].get("tp_size", 1))
        self.needs_update_session = await self._has_route("/begin_weight_update")
        return ServerFacts(
            version=str(info.get("version", "unknown")),
            model_path=str(info.get("model_path", "unknown")),
            weight_version=weight_version,
            max_context=int(max_prompt) + 1,
            vocab_size=await self._vocab_size(),
            can_retract=self.needs_update_session and await self._has_route("/pause_generation"),
            has_seeds=bool(info.get("enable_deterministic_inference")),
        )

    async def check_health(self, *, timeout_s: float) -> None:
        """Return if it serves; a server that idles samples a token for this.

        Raises:
            EngineError: as `get`; it may also be starting, or stuck.
        """
        await self.get("/health", timeout_s=timeout_s)

    async def aclose(self) -> None:
        """Close the connections; who waits for an answer gets `EngineUnreachableError` now.

        Asking again opens new ones.
        """
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _vocab_size(self) -> int | None:
        """SGLang names it in one place: where it refuses to favour a token that there is not.

        It must be known before anything is sampled: a prompt with an id beyond it kills the server.
        """
        sampling = {"max_new_tokens": 1, "logit_bias": {str(2**30): 0.0}}
        try:
            await self.post("/generate", {"input_ids": [0], "sampling_params": sampling})
        except RefusedError as refused:
            found = re.search(r"\[0, (\d+)\]", refused.message)
            return int(found[1]) + 1 if found else None
        return None

    async def _has_route(self, route: str) -> bool:
        """Whether a POST route exists: asked with GET, it answers 405 then, and 404 otherwise."""
        try:
            await self.get(route)
        except RefusedError as refused:
            return refused.status != 404
        return True

    async def _ask(
        self, method: str, route: str, data: bytes | None, timeout_s: float
    ) -> dict[str, Any]:
        if self._session is None:
            # The default connector has 100 connections, and the 101st episode would wait.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
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
                f"no answer from {self.url}: {_reason(error)}",
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


def vocab_size_of(policy: Path) -> int | None:
    """How many tokens a checkpoint knows; None when it does not say, or is none."""
    try:
        config = json.loads((policy / "config.json").read_text())
    except FileNotFoundError:
        return None
    # Models that take more than text nest the settings of their text part.
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return None if size is None else int(size)


def is_refused(error: BaseException) -> bool:
    """Whether nobody even listens; else a server is there, and may only be busy."""
    return isinstance(error.__cause__, aiohttp.ClientConnectorError)


def _reason(error: Exception) -> str:
    """Why nobody answers, without aiohttp's words around it."""
    if isinstance(error, aiohttp.ClientConnectorError) and (error.os_error.errno or 0) > 0:
        return os.strerror(error.os_error.errno or 0)
    return str(error) or type(error).__name__


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
