"""A client for one SGLang server: requests return an answer or raise a clear error."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from areal_gym.engines.base import adapter_name
from areal_gym.errors import ConfigError, EngineError, EngineUnreachableError

_QUICK_S = 30.0
"""Long enough for a lookup on a busy machine."""
_DISK_S = 600.0
_ADAPTER_S = 120.0
_LARGE_BYTES = 2**20
_KEEPALIVE_S = 3.0
"""SGLang hangs up on idle connections after 5 s; a request sent at that moment would be lost."""
_RESERVED_TOKENS = 6
"""SGLang's limit for prompts (`max_req_input_len`) is its context less this many tokens."""


class RefusedError(EngineError):
    """The server answered with a refusal."""

    def __init__(self, message: str, *, status: int = 0, hints: tuple[str, ...] = ()) -> None:
        super().__init__(message, hints=hints)
        self.status = status
        """The HTTP status; 200 for routes that refuse in the body."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """A server's description of itself."""

    version: str
    """The version of SGLang."""
    model_path: str
    weight_version: str
    max_context: int
    """Prompt and new tokens together."""
    vocab_size: int | None
    """Of the model; None if the server does not report it."""
    can_retract: bool
    """Requests can be set aside while weights change, and continue where they stopped (0.5.21 and
    later). Earlier versions have the pause, too, but crash on an update while requests wait."""
    has_seeds: bool
    """The same seed gives the same tokens (`--enable-deterministic-inference`)."""
    returns_routed_experts: bool
    """Requests may ask for the experts of tokens (`--enable-return-routed-experts`)."""
    device: str
    """The kind of device that it samples on; "unknown" if the server does not report it."""
    frees_memory: bool
    """The memory of its GPUs can be released (`--enable-memory-saver`)."""


class ServerClient:
    """Sends requests to one server. Failures are `EngineError`s that quote the server.

    Args:
        url: the server's base URL, `http://host:port`.
        policy: the model it should serve; error messages name it in the start command.

    Raises:
        ConfigError: `url` is not a URL.
    """

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
        self.start_command = (
            f"python -m sglang.launch_server --model-path {policy or 'MODEL'} "
            f"--host {parts.hostname} --port {port}"
        )
        self.loaded_from: tuple[Path, int] | None = None
        """The checkpoint directory that the server loaded last, and its version."""
        self.loaded_adapter: tuple[Path, int] | None = None
        """The directory of the LoRA adapter that the server loaded last, and its version."""
        self.needs_update_session = True
        """Weights other than a directory's must come between `/begin_weight_update` and
        `/end_weight_update` (SGLang 0.5.21 and later); set by `probe`."""
        self.num_ranks = 1
        """Processes that share the model (tensor parallelism); set by `probe`."""
        self._session: aiohttp.ClientSession | None = None

    async def get(self, route: str, *, timeout_s: float = _QUICK_S) -> dict[str, Any]:
        """Send a GET request.

        Raises:
            EngineUnreachableError: the server does not answer.
            RefusedError: the server refuses.
            EngineError: the answer is not from an SGLang server.
        """
        return await self._request("GET", route, None, timeout_s)

    async def post(
        self, route: str, body: dict[str, Any], *, timeout_s: float = _QUICK_S
    ) -> dict[str, Any]:
        """Send a POST request; raises as `get` does."""
        return await self._request("POST", route, json.dumps(body).encode(), timeout_s)

    async def load_from_disk(self, directory: Path, version: int) -> None:
        """Load the checkpoint in `directory`; the server reports `version` from then on.

        Raises:
            EngineError: the server refused and keeps its weights.
        """
        path = str(Path(directory).absolute())
        body = {"model_path": path, "weight_version": str(version), "flush_cache": True}
        await self.post("/update_weights_from_disk", body, timeout_s=_DISK_S)
        self.loaded_from = (Path(directory), version)

    async def reload(self, model_path: str) -> None:
        """Load the weights that the server was started with, from its own `model_path`.

        Raises:
            EngineError: the server refused.
        """
        body = {"model_path": model_path, "flush_cache": True}
        await self.post("/update_weights_from_disk", body, timeout_s=_DISK_S)

    async def load_adapter(self, directory: Path, version: int) -> None:
        """Load the LoRA adapter in `directory`, for requests that name `adapter_name(version)`.

        Raises:
            EngineError: the server refused it.
        """
        name = adapter_name(version)
        body = {"lora_name": name, "lora_path": str(Path(directory).absolute())}
        try:
            await self.post("/load_lora_adapter", body, timeout_s=_ADAPTER_S)
        except RefusedError as refused:
            # An earlier run, or a publication that was cut off, may have left one of that name.
            try:
                await self.post("/unload_lora_adapter", {"lora_name": name}, timeout_s=_ADAPTER_S)
            except RefusedError:
                raise refused from None
            await self.post("/load_lora_adapter", body, timeout_s=_ADAPTER_S)
        self.loaded_adapter = (Path(directory), version)

    async def set_version(self, version: str) -> None:
        """Let the server report `version`; requests in flight go on."""
        body = {"new_version": version, "abort_all_requests": False}
        await self.post("/update_weight_version", body, timeout_s=_ADAPTER_S)

    async def weight_version(self, *, timeout_s: float = _QUICK_S) -> str:
        """Return the server's name for its weights; "default" before the first update."""
        info = await self.get("/model_info", timeout_s=timeout_s)
        if "weight_version" not in info:
            raise EngineError(f"{self.url} is not an SGLang server: it has no weight version")
        return str(info["weight_version"])

    async def probe(self) -> ServerFacts:
        """Ask what the server can do; sets `needs_update_session` and `num_ranks`."""
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
            can_retract=bool(info.get("updates_in_flight"))
            or (self.needs_update_session and await self._has_route("/pause_generation")),
            has_seeds=bool(info.get("enable_deterministic_inference")),
            returns_routed_experts=bool(info.get("enable_return_routed_experts")),
            device=str(info.get("device") or "unknown"),
            frees_memory=bool(info.get("enable_memory_saver")),
        )

    async def aclose(self) -> None:
        """Close the connections; pending requests raise `EngineUnreachableError`.

        The next request opens new ones.
        """
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _vocab_size(self) -> int | None:
        # SGLang reports it only in refusals of a logit bias. It must be known before sampling: a
        # prompt with a larger id crashes the server.
        sampling = {"max_new_tokens": 1, "logit_bias": {str(2**30): 0.0}}
        try:
            await self.post("/generate", {"input_ids": [0], "sampling_params": sampling})
        except RefusedError as refused:
            last_id = re.search(r"\[0, (\d+)\]", refused.message)
            return int(last_id[1]) + 1 if last_id else None
        return None

    async def _has_route(self, route: str) -> bool:
        """Return whether a POST route exists: a GET request to it gives 405, else 404."""
        try:
            await self.get(route)
        except RefusedError as refused:
            return refused.status != 404
        return True

    async def _request(
        self, method: str, route: str, data: bytes | None, timeout_s: float
    ) -> dict[str, Any]:
        if self._session is None:
            # The default connector has 100 connections, and the 101st episode would wait.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=None),
            )
        # Weights are sent piece by piece, so that other calls go on meanwhile.
        body = io.BytesIO(data) if data and len(data) > _LARGE_BYTES else data
        try:
            async with self._session.request(
                method, self.url + route, data=body, timeout=aiohttp.ClientTimeout(total=timeout_s)
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

    def _read(self, route: str, status: int, content_type: str, body: bytes) -> dict[str, Any]:
        answer: Any = {"message": body.decode("utf-8", "replace").strip()}
        if content_type == "application/json" and body:
            try:
                answer = _loads(body)
            except ValueError:
                excerpt = body[:80].decode("utf-8", "replace")
                raise EngineError(f"{self.url}{route} answers invalid JSON: {excerpt!r}") from None
        elif content_type == "text/html":
            raise EngineError(
                f"{self.url} answers HTML: it is not an SGLang server",
                hints=[f"start one: {self.start_command}"],
            )
        if status == 200 and answer is None:
            return {}
        if status == 200 and isinstance(answer, dict) and answer.get("success") is not False:
            return answer
        message = f"{self.url}{route} refused (HTTP {status}): {_message(answer)}"
        raise RefusedError(message, status=status)


def _loads(body: bytes) -> Any:
    """Parse JSON. orjson takes a third of the time, and does not know NaN, which Python writes."""
    try:
        return orjson.loads(body)
    except ValueError:
        return json.loads(body)


def is_refused(error: BaseException) -> bool:
    """Return whether the connection was refused; otherwise the server may only be busy."""
    return isinstance(error.__cause__, aiohttp.ClientConnectorError)


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError) and (error.os_error.errno or 0) > 0:
        return os.strerror(error.os_error.errno or 0)
    return str(error) or type(error).__name__


def _message(answer: Any) -> str:
    """Return the server's own message: every family of routes has its own shape."""
    if isinstance(answer, dict):
        for key in ("error", "message", "error_message", "detail"):
            if answer.get(key):
                inner = answer[key]
                return _message(inner) if isinstance(inner, dict) else str(inner)
    return json.dumps(answer)[:300] if answer else "no reason given"
