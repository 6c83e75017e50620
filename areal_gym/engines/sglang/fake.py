"""A fake SGLang server, for tests and for machines without a GPU or SGLang.

It is an `EngineServer` with the control routes of SGLang 0.5.23: pause, abort, and weights that
arrive from disk, as tensors or by broadcast. The same tests (`tests/sglang`) run against it and
against the real server::

    async with FakeSGLangServer(EmbeddedEngine.from_checkpoint(policy)) as server:
        engine = SGLangEngine(policy, urls=[server.url])

    python -m areal_gym.engines.sglang.fake --model-path POLICY --port 30000

Limits: it takes token ids only, without streaming or `n` above 1. It scores prompts if the engine
can. The pause "in_place" acts like "retract": no cache is kept under new
weights. It refuses grammars, as a server started with `--grammar-backend none` does.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

from areal_gym.engines.base import Engine
from areal_gym.engines.server_requests import Request, read_request
from areal_gym.engines.servers.fake_server import serve_checkpoint
from areal_gym.engines.sglang.fake_weights import FakeWeights
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
        model_path: the reported model, whose `config.json` is read if it is a checkpoint.
        emulate: the SGLang version to imitate: before 0.5.21 there are no update sessions, before
            0.5.19 no versions per token.
        returns_routed_experts: whether requests may ask for the experts of tokens, as with
            SGLang's flag `--enable-return-routed-experts`.
        chunk_tokens: tokens sampled per engine call; abort and pause act between calls.
        host: the address to listen on.
        port: the port; 0 takes a free one.
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
        super().__init__(
            engine, model_path=model_path, chunk_tokens=chunk_tokens, host=host, port=port
        )
        self.emulate = emulate
        number = tuple(int(part) for part in re.findall(r"\d+", emulate)[:3])
        self.has_update_sessions = number >= (0, 5, 21)
        self.has_version_spans = number >= (0, 5, 19)
        self.returns_routed_experts = returns_routed_experts

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
            "dtype": "float32",
            "enable_deterministic_inference": False,
            "updates_in_flight": False,
        }

    # ---- interruptions ------------------------------------------------------------------------

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await read_request(_Abort, request)
        for running in self._running:
            running.is_aborted |= bool(body.abort_all) or running.rid == body.rid
        await self._notify()
        return web.Response()

    async def _pause_generation(self, request: web.Request) -> web.Response:
        mode = (await read_request(_Pause, request)).mode
        await self.pause(mode)
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, request: web.Request) -> web.Response:
        await self.resume()
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
    asyncio.run(
        serve_checkpoint(
            FakeSGLangServer,
            options.model_path,
            f"a fake SGLang {options.emulate}",
            num_slots=options.max_running_requests,
            max_context=options.context_length,
            emulate=options.emulate,
            returns_routed_experts=options.enable_return_routed_experts,
            host=options.host,
            port=options.port,
        )
    )


if __name__ == "__main__":
    main()
