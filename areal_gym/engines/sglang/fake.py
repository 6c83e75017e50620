"""A stand-in for an SGLang server, for tests and for machines without a GPU or SGLang.

It is an `EngineServer` with the control routes of SGLang 0.5.23: pause, abort, and weights that
arrive from disk, as tensors or by broadcast. One suite (`tests/sglang`) runs against it and against
the real server::

    async with FakeSGLangServer(EmbeddedEngine.from_checkpoint(policy)) as server:
        engine = SGLangEngine(policy, urls=[server.url])

    python -m areal_gym.engines.sglang.fake --model-path POLICY --port 30000

Limits: token ids only, no streams, no `n` above 1. It scores prompts if the model is a checkpoint
directory. The pause "in_place" acts like "retract": no cache is kept under new weights. It refuses
grammars, as a server started with `--grammar-backend none` does.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

from areal_gym.engines.base import Engine
from areal_gym.engines.server import RunningRequest
from areal_gym.engines.server_requests import Request, read_request
from areal_gym.engines.sglang.fake_weights import FakeWeights
from areal_gym.types import FinishReason
from areal_gym.utils.http_servers.aiohttp_site import Handler

_MEMORY = ("weights", "kv_cache", "cuda_graph")


class _Abort(Request):
    rid: str | None = None
    abort_all: bool | None = None


class _Pause(Request):
    mode: Literal["abort", "in_place", "retract"] = "abort"


class _Memory(Request):
    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = None


class FakeSGLangServer(FakeWeights):
    """Serves `engine` as SGLang serves a model. Use it as an asynchronous context manager.

    Args:
        engine: samples the requests; the server starts and closes it.
        model_path: the reported model; the `config.json` of a checkpoint is read.
        emulate: the SGLang version to imitate: before 0.5.21 there are no update sessions, before
            0.5.19 no versions per token.
        returns_routed_experts: requests may ask for the experts of tokens, as with SGLang's flag
            `--enable-return-routed-experts`.
        chunk_tokens: tokens sampled per engine call; abort and pause act between calls.
        host: the address to listen on.
        port: 0 takes a free one.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model_path: str = "fake",
        emulate: str = "0.5.23",
        returns_routed_experts: bool = False,
        chunk_tokens: int = 4,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        super().__init__(engine, model_path=model_path, host=host, port=port)
        self.emulate = emulate
        number = tuple(int(part) for part in re.findall(r"\d+", emulate)[:3])
        self.has_update_sessions = number >= (0, 5, 21)
        self.has_version_spans = number >= (0, 5, 19)
        self.returns_routed_experts = returns_routed_experts
        self._chunk_tokens = chunk_tokens
        self._pause_mode: str | None = None
        self._changed = asyncio.Condition()
        self.forget_weights()

    async def start(self) -> None:
        """Start the engine and begin to serve.

        Raises:
            OSError: the port is taken.
        """
        await self.engine.start()
        self._pause_mode = None
        self.forget_weights()
        await super().start()

    async def aclose(self) -> None:
        """Stop serving and close the engine. Idempotent."""
        await self.die()
        await self.engine.aclose()

    async def die(self) -> None:
        """Drop all connections at once, as kill -9 would; `start` brings the server back."""
        await super().aclose()

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Let weights change: nothing is sampled inside.

        During a pause, running requests are parked or will be at their next chunk; otherwise an
        update waits until all running requests have ended, as SGLang's does.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: all(request.is_parked for request in self._running)
            )
            yield

    def _routes(self) -> list[tuple[str, str, Handler]]:
        return [
            *super()._routes(),
            ("GET", "/flush_cache", self._flush_cache),
            ("POST", "/flush_cache", self._flush_cache),
            ("POST", "/abort_request", self._abort_request),
            ("POST", "/pause_generation", self._pause_generation),
            ("POST", "/continue_generation", self._continue_generation),
            ("POST", "/release_memory_occupation", self._release_memory),
            ("POST", "/resume_memory_occupation", self._resume_memory),
        ]

    def _facts(self) -> dict[str, Any]:
        return {
            **super()._facts(),
            "version": self.emulate,
            "enable_deterministic_inference": False,
            "updates_in_flight": False,
        }

    # ---- generation ---------------------------------------------------------------------------

    async def _run(self, request: RunningRequest) -> dict[str, Any]:
        async with self._changed:  # requests that arrive during a pause are held back
            await self._changed.wait_for(lambda: self._pause_mode is None)
        try:
            return await super()._run(request)
        finally:
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
            request.num_retractions += self._pause_mode == "retract"
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._pause_mode is None or request.is_aborted)
            request.is_parked = False

    # ---- interruptions ------------------------------------------------------------------------

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await read_request(_Abort, request)
        for running in self._running:
            running.is_aborted |= bool(body.abort_all) or running.rid == body.rid
        await self._notify()
        return web.Response()

    async def _pause_generation(self, request: web.Request) -> web.Response:
        mode = (await read_request(_Pause, request)).mode
        self._pause_mode = mode
        if mode == "abort":
            for running in self._running:
                running.is_aborted = True
            async with self._changed:
                self._changed.notify_all()
                await self._changed.wait_for(lambda: not self._running)
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, request: web.Request) -> web.Response:
        self._pause_mode = None
        await self._notify()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _release_memory(self, request: web.Request) -> web.Response:
        tags = set((await read_request(_Memory, request)).tags or _MEMORY)
        await self._require(self._pause_mode is not None or not self._running)
        await self._require(not self.released & tags)
        async with self.quiet():
            self.released = self.released | tags
        return web.json_response(None)

    async def _resume_memory(self, request: web.Request) -> web.Response:
        tags = set((await read_request(_Memory, request)).tags or _MEMORY)
        await self._require(self.released >= tags)
        self.released = self.released - tags
        return web.json_response(None)

    async def _flush_cache(self, request: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.\n")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _serve(options: argparse.Namespace) -> None:
    from areal_gym.engines.embedded import EmbeddedEngine

    engine = EmbeddedEngine.from_checkpoint(
        options.model_path,
        num_slots=options.max_running_requests,
        max_context=options.context_length,
    )
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    server = FakeSGLangServer(
        engine,
        model_path=str(options.model_path),
        emulate=options.emulate,
        returns_routed_experts=options.enable_return_routed_experts,
        host=options.host,
        port=options.port,
    )
    async with server:
        name = f"a fake SGLang {options.emulate}"
        print(f"{name} serves {options.model_path} at {server.url}", flush=True)
        await ended.wait()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve a checkpoint with the embedded engine."""
    parser = argparse.ArgumentParser(
        prog="python -m areal_gym.engines.sglang.fake",
        description="Serve a checkpoint behind SGLang's endpoints, without SGLang.",
        epilog="Other arguments of sglang.launch_server are accepted and ignored.",
    )
    parser.add_argument("--model-path", type=Path, required=True, help="a checkpoint directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--max-running-requests", type=int, default=32)
    parser.add_argument("--context-length", type=int, default=4096)
    parser.add_argument("--emulate", default="0.5.23", help="the SGLang version to imitate")
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    options, _ = parser.parse_known_args(arguments)
    asyncio.run(_serve(options))


if __name__ == "__main__":
    main()
