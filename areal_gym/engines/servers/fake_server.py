"""The common part of fake servers: pauses, versions, weights and adapters around an engine.

Each fake adds the routes of its kind. Received tensors are loaded into the engine behind the
server, which must be in this process (`LocalEngine`).
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Set
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from aiohttp import web

from areal_gym.engines.base import Engine, LocalEngine
from areal_gym.engines.server import EngineServer, RunningRequest
from areal_gym.engines.servers.fake_tensors import LoadedAdapter, read_weights
from areal_gym.engines.servers.replies import INITIAL_WEIGHTS
from areal_gym.errors import EngineError
from areal_gym.types import FinishReason


class FakeServer(EngineServer):
    """An `EngineServer` whose generation can be paused, and whose weights can be replaced.

    Adapters are merged into the weights when a request asks for one, so all requests that are being
    sampled use the same adapter, or none; requests for another one wait.

    Args:
        engine: samples the requests; the server starts and closes it.
        model_path: the reported model, whose `config.json` is read if it is a checkpoint.
        chunk_tokens: tokens sampled per engine call; abort and pause act between calls.
        host: the address to listen on.
        port: the port; 0 takes a free one.
    """

    version = INITIAL_WEIGHTS
    """The server's name for its weights; publications set it."""
    released: Set[str] = frozenset()
    """The kinds of memory that are released; nothing is really freed."""
    _num_published = 0

    def __init__(
        self,
        engine: Engine,
        *,
        model_path: str = "fake",
        chunk_tokens: int = 4,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        super().__init__(engine, model_path=model_path, host=host, port=port)
        self._chunk_tokens = chunk_tokens
        self._pause_mode: str | None = None
        self._waiting: set[RunningRequest] = set()
        """Requests that arrived during a pause."""
        self._changed = asyncio.Condition()
        """Notified when requests end, and when generation pauses or continues."""
        self.forget_weights()

    async def start(self) -> None:
        """Start the engine and begin to serve.

        Raises:
            OSError: the port is in use.
        """
        await self.engine.start()
        self._pause_mode = None
        self.forget_weights()
        await super().start()

    async def aclose(self) -> None:
        """Stop serving and close the engine. Idempotent."""
        await super().aclose()
        await self.engine.aclose()

    async def die(self) -> None:
        """Drop all connections at once, as kill -9 does; `start` brings the server back."""
        await super().aclose()
        self.version = INITIAL_WEIGHTS

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Let weights change: nothing is sampled inside of the context.

        During a pause, running requests are parked at their next chunk; otherwise an update waits
        until all running requests have ended, as SGLang's does.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: all(request.is_parked for request in self._running)
            )
            yield

    # ---- generation ---------------------------------------------------------------------------

    async def _run(self, request: RunningRequest) -> dict[str, Any]:
        self._waiting.add(request)
        try:
            async with self._changed:  # requests that arrive during a pause are held back
                await self._changed.wait_for(lambda: self._pause_mode is None or request.is_aborted)
            self._waiting.discard(request)
            return await super()._run(request)
        finally:
            self._waiting.discard(request)
            await self._notify()

    async def _sample(self, request: RunningRequest) -> dict[str, Any]:
        while len(request.token_ids) < request.params.max_new_tokens:
            await self._park(request)
            if request.is_aborted:
                reason = {"type": "abort", "message": "Aborted"}
                return {**reason, "status_code": None, "err_type": None}
            version = self.version
            left = request.params.max_new_tokens - len(request.token_ids)
            generation = await self.engine.generate(
                [*request.prompt_ids, *request.token_ids],
                replace(request.params, max_new_tokens=min(left, self._chunk_tokens)),
                session=request.rid,
                **request.image_arguments,
            )
            request.extend(generation, [version] * len(generation.token_ids))
            if generation.finish_reason is FinishReason.STOP:
                return request.finish_reason(FinishReason.STOP)
        return request.finish_reason(FinishReason.LENGTH)

    async def _park(self, request: RunningRequest) -> None:
        if self._pause_mode is None:
            await self._require(not self.released)
            return
        async with self._changed:
            request.is_parked = True
            request.num_retractions += self._pause_mode in ("retract", "keep")
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._pause_mode is None or request.is_aborted)
            request.is_parked = False

    async def pause(self, mode: str) -> None:
        """Pause generation; with "abort", running requests end with the tokens that they have."""
        self._pause_mode = mode
        if mode == "abort":
            for running in self._running:
                running.is_aborted = True
            async with self._changed:
                self._changed.notify_all()
                await self._changed.wait_for(lambda: not self._running)

    async def resume(self) -> None:
        """End a pause."""
        self._pause_mode = None
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # ---- weights ------------------------------------------------------------------------------

    def forget_weights(self) -> None:
        """Return to the weights of `model_path`."""
        self.released = frozenset()
        self._weights: dict[str, Any] = {}
        """Received tensors by name; a server loads them in any number of parts."""
        self._adapters: dict[str, LoadedAdapter] = {}
        self._adapter: str | None = None
        """The adapter that is merged into the engine's weights."""
        self._num_users: Counter[str | None] = Counter()
        """Running requests by the adapter that they are sampled with."""

    async def load(self, tensors: dict[str, Any], version: str | None = None) -> None:
        """Replace weights; nothing is sampled meanwhile.

        Raises:
            EngineError: the engine refuses them, or takes none. torch's errors are possible, too.
        """
        await self._require("weights" not in self.released)
        complete = {**await asyncio.to_thread(self._base), **tensors}
        async with self.quiet():
            await self._publish(complete)
            self._weights, self._adapter = complete, None
            if version is not None:
                self.version = version

    async def load_adapter(self, name: str, path: Path) -> None:
        """Read a LoRA adapter, which requests may name from then on.

        Raises:
            OSError: there is no adapter. Untrusted files may raise anything.
        """
        if not (path / "adapter_config.json").is_file():
            raise OSError(f"no adapter_config.json in {path}")
        self._adapters[name] = await asyncio.to_thread(LoadedAdapter, path)
        if self._adapter == name:
            self._adapter = ""  # the old one is merged

    @asynccontextmanager
    async def _prepared(self, adapter: str | None) -> AsyncIterator[None]:
        name, num_users = adapter, self._num_users
        async with self._changed:
            await self._changed.wait_for(lambda: num_users.total() == num_users[name])
            if name is not None and name not in self._adapters:
                raise ValueError(f"Got LoRA adapter that has never been loaded: {name}")
            if name != self._adapter:
                weights = self._base()
                if name is not None:
                    try:
                        weights = self._adapters[name].merged_into(weights)
                    except Exception as error:  # untrusted files
                        raise ValueError(f"the adapter {name} cannot be used: {error!r}") from None
                await self._publish(weights)
                self._adapter = name
            num_users[name] += 1
        try:
            yield
        finally:
            num_users[name] -= 1
            async with self._changed:
                self._changed.notify_all()

    def _base(self) -> dict[str, Any]:
        """Return the weights without any adapter."""
        if not self._weights:
            self._weights = read_weights(Path(self.model_path))
        return self._weights

    async def _publish(self, tensors: dict[str, Any]) -> None:
        if not isinstance(self.engine, LocalEngine):
            raise EngineError("the engine behind this server takes no weights")
        self._num_published += 1
        await self.engine.publish(tensors.items(), self._num_published)

    async def _require(self, holds: bool) -> None:
        """Die, as the real server does, when released memory is used."""
        if not holds:
            self._death = asyncio.create_task(EngineServer.aclose(self))
            raise web.HTTPServiceUnavailable


async def serve_checkpoint(
    make_server: Callable[..., FakeServer],
    model_path: Path,
    name: str,
    *,
    num_slots: int,
    max_context: int,
    **options: Any,
) -> None:
    """Serve a checkpoint with the embedded engine until the process gets a signal to end.

    `options` are arguments of `make_server`.
    """
    from areal_gym.engines.embedded import EmbeddedEngine

    engine = EmbeddedEngine.from_checkpoint(
        model_path, num_slots=num_slots, max_context=max_context
    )
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with make_server(engine, model_path=str(model_path), **options) as server:
        print(f"{name} serves {model_path} at {server.url}", flush=True)
        await ended.wait()
