"""A stand-in for a vLLM server, for tests and for machines without a GPU or vLLM.

It has the routes of vLLM 0.32.0 that `VLLMEngine` uses, areal-gym's worker extension included, in
front of any engine. One suite (`tests/vllm`) runs against it and against the real server::

    async with FakeVLLMServer(EmbeddedEngine.from_checkpoint(policy)) as server:
        engine = VLLMEngine(policy, urls=[server.url])

    python -m areal_gym.engines.vllm.fake_vllm POLICY --port 8000

Limits: token ids only, no streams, no `n` above 1. It scores prompts if the engine can. It refuses
grammars.
"""

from __future__ import annotations

import argparse
import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from aiohttp import web

from areal_gym.engines.base import Engine, SamplingParams
from areal_gym.engines.checkpoint_config import eos_token_ids, vocab_size_of
from areal_gym.engines.server import RunningRequest
from areal_gym.engines.server_requests import read_request
from areal_gym.engines.servers.fake_server import FakeServer, serve_checkpoint
from areal_gym.engines.vllm.fake_bodies import (
    AbortBody,
    AdapterBody,
    FinishedUpdateBody,
    GenerateBody,
    VersionBody,
    generated,
    prompt_logprobs,
)
from areal_gym.engines.vllm.fake_transfer import FakeTransfer, RefusedWeightsError
from areal_gym.utils.files import read_json
from areal_gym.utils.http_servers.aiohttp_site import Handler, RequestBodyError

_PREFIX = "generate-tokens-"


class FakeVLLMServer(FakeServer):
    """Serves `engine` as vLLM serves a model. Use it as an asynchronous context manager.

    Args:
        engine: samples the requests; the server starts and closes it.
        model_path: the reported model; the `config.json` of a checkpoint is read.
        lacks: what the server was not started with: "dev mode", "scale out", "extension", "lora",
            "versions" (of tokens).
        logprobs_mode: reported; log-probabilities are those of the temperature all the same.
        emulate: the reported version.
        max_lora_rank: adapters of a higher rank are refused.
        max_logprobs: the most tokens that it lists in a place; -1 is the whole vocabulary.
        chunk_tokens: tokens sampled per engine call; abort and pause act between calls.
        host: the address to listen on.
        port: 0 takes a free one.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model_path: str = "fake",
        lacks: Sequence[Literal["dev mode", "scale out", "extension", "lora"]] = (),
        logprobs_mode: str = "processed_logprobs",
        emulate: str = "0.32.0",
        max_lora_rank: int = 16,
        max_logprobs: int = 20,
        chunk_tokens: int = 4,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._lacks = frozenset(lacks)
        self._logprobs_mode = logprobs_mode
        self._emulate = emulate
        self._max_lora_rank = max_lora_rank
        self._max_logprobs = max_logprobs
        self._is_asleep = False
        super().__init__(
            engine, model_path=model_path, chunk_tokens=chunk_tokens, host=host, port=port
        )

    def forget_weights(self) -> None:
        """Begin with the weights of `model_path` again."""
        super().forget_weights()
        self._transfer = FakeTransfer(self)
        self._is_asleep = False

    def _routes(self) -> list[tuple[str, str, Handler]]:
        dev: list[tuple[str, str, Handler]] = [
            ("GET", "/server_info", self._info),
            ("GET", "/get_world_size", self._world_size),
            ("GET", "/weight_info", self._weight_info),
            ("POST", "/update_weight_version", self._update_version),
            ("POST", "/pause", self._pause),
            ("POST", "/resume", self._resume),
            ("POST", "/abort_requests", self._abort),
            ("POST", "/collective_rpc", self._collective_rpc),
            ("POST", "/init_weight_transfer_engine", self._on_worker(self._init_transfer)),
            ("POST", "/start_weight_update", self._on_worker(self._start_update)),
            ("POST", "/update_weights", self._on_worker(self._update_weights)),
            ("POST", "/finish_weight_update", self._on_worker(self._finish_update)),
            ("POST", "/shutdown_weight_transfer_engine", self._on_worker(self._shutdown_transfer)),
            ("POST", "/sleep", self._sleep),
            ("POST", "/release_kv_cache_memory", self._release_cache),
            ("POST", "/wake_up", self._wake_up),
        ]
        adapters: list[tuple[str, str, Handler]] = [
            ("POST", "/v1/load_lora_adapter", self._load_adapter),
            ("POST", "/v1/unload_lora_adapter", self._unload_adapter),
        ]
        return [
            ("GET", "/health", self._health),
            ("GET", "/version", self._version),
            ("GET", "/v1/models", self._models),
            ("POST", "/inference/v1/generate", self._generate_tokens),
            *(() if "dev mode" in self._lacks else dev),
            *(() if "lora" in self._lacks else adapters),
        ]

    # ---- what it says of itself ----------------------------------------------------------------

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self._emulate})

    async def _models(self, request: web.Request) -> web.Response:
        names = {"object": "model", "owned_by": "vllm", "max_model_len": self.engine.max_context}
        base = {"id": "policy", "root": self.model_path, "parent": None, **names}
        adapters = [
            {"id": name, "root": str(adapter.path), "parent": "policy", **names}
            for name, adapter in self._adapters.items()
        ]
        return web.json_response({"object": "list", "data": [base, *adapters]})

    async def _info(self, request: web.Request) -> web.Response:
        model = {
            "logprobs_mode": self._logprobs_mode,
            "max_logprobs": self._max_logprobs,
            "enable_sleep_mode": False,
        }
        adapters = None if "lora" in self._lacks else {"max_lora_rank": self._max_lora_rank}
        return web.json_response({"vllm_config": {"model_config": model, "lora_config": adapters}})

    async def _world_size(self, request: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _update_version(self, request: web.Request) -> web.Response:
        self.version = (await read_request(VersionBody, request)).new_version
        return web.json_response({"success": True, "new_version": self.version})

    # ---- generation ---------------------------------------------------------------------------

    async def _generate_tokens(self, request: web.Request) -> web.Response:
        if "scale out" in self._lacks:
            message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out"
            raise RequestBodyError(f"{message} to enable them.", status=403)
        body = await read_request(GenerateBody, request)
        self.num_requests += 1
        await self._require(not self._transfer.is_torn)
        running = self._read_generate(body)
        adapter = None if body.model in (None, "policy", self.model_path) else body.model
        if adapter is not None and adapter not in self._adapters:
            message = f"The model `{adapter}` does not exist. Valid aliases: policy."
            raise RequestBodyError(message, status=404)
        async with self._sampled_as(adapter):
            finish = await self._run(running)
            scores = await prompt_logprobs(self, body, self._max_logprobs)
        has_versions = "versions" not in self._lacks
        return web.json_response(
            generated(running, finish, body, scores, has_versions=has_versions)
        )

    def _read_generate(self, body: GenerateBody) -> RunningRequest:
        sampling, context = body.sampling_params, self.engine.max_context
        if sampling.structured_outputs:
            raise RequestBodyError("this server takes no structured outputs")
        size = vocab_size_of(Path(self.model_path))
        if size is not None and max(body.token_ids) >= size:
            raise RequestBodyError(f"Token id {max(body.token_ids)} is out of vocabulary")
        try:
            token_ids, images = self.pictures.expanded(
                body.token_ids, [part.url for part in body.content_parts]
            )
        except ValueError as error:
            raise RequestBodyError(str(error)) from None
        room = context - len(token_ids)
        if room < 1:
            raise RequestBodyError(
                f"The decoder prompt (length {len(token_ids)}) plus the number of requested "
                f"output tokens (at least 1) is longer than the maximum model length of {context}."
            )
        ends = [] if sampling.ignore_eos else eos_token_ids(Path(self.model_path))
        params = SamplingParams(
            max_new_tokens=min(room, sampling.max_tokens or room),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(0, sampling.top_k),
            stop_token_ids=(*sampling.stop_token_ids, *ends),
            seed=sampling.seed,
        )
        rid = _PREFIX + (body.request_id or uuid.uuid4().hex)
        return RunningRequest(rid, token_ids, params, images=images)

    @asynccontextmanager
    async def _sampled_as(self, adapter: str | None) -> AsyncIterator[None]:
        try:
            async with self._prepared(adapter):
                yield
        except ValueError as error:
            raise RequestBodyError(str(error)) from None

    # ---- interruptions ------------------------------------------------------------------------

    async def _abort(self, request: web.Request) -> web.Response:
        ids = (await read_request(AbortBody, request)).request_ids
        named = [r for r in (*self._running, *self._waiting) if ids is None or r.rid in ids]
        for running in named:
            running.is_aborted = True
        await self._notify()
        number = len(named if ids is None else ids)
        return web.json_response({"status": "aborted", "aborted": number})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "keep"):
            raise RequestBodyError(f"this server does not pause with mode {mode!r}")
        for waiting in self._waiting if mode == "abort" else ():
            waiting.is_aborted = True
        await self.pause(mode)
        if mode == "keep":
            async with self.quiet():
                pass  # every request stands still now
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        await self.resume()
        return web.json_response({"status": "resumed"})

    async def _sleep(self, request: web.Request) -> web.Response:
        await self.pause("keep")
        self._is_asleep = True
        self.released = frozenset({"weights", "kv_cache"})
        return web.json_response({"status": "sleeping", "level": request.query.get("level", "1")})

    async def _release_cache(self, request: web.Request) -> web.Response:
        await self._require(self._pause_mode is not None)
        self._is_asleep = True
        self.released = self.released | {"kv_cache"}
        return web.json_response({"status": "kv_cache_released"})

    async def _wake_up(self, request: web.Request) -> web.Response:
        tags = request.query.getall("tags", []) or ["weights", "kv_cache"]
        self.released = self.released - set(tags)
        self._is_asleep = self._is_asleep and bool(self.released)
        if not self._is_asleep:
            await self.resume()
        state = "sleeping" if self._is_asleep else "awake"
        return web.json_response({"status": state, "tags": tags})

    # ---- weights ------------------------------------------------------------------------------

    def _on_worker(self, act: Callable[[web.Request], Awaitable[str]]) -> Handler:
        """Answer with the message of `act`; what it raises is an error in the worker."""

        async def handle(request: web.Request) -> web.Response:
            try:
                return web.json_response({"message": await act(request)})
            except RequestBodyError:
                raise
            except Exception as error:
                problem = f"Worker failed with error {str(error)!r}, please check the stack trace"
                raise web.HTTPInternalServerError(reason=problem[:200]) from None

        return handle

    async def _init_transfer(self, request: web.Request) -> str:
        await self._transfer.join((await request.json())["init_info"])
        return "Weight transfer initialized"

    async def _start_update(self, request: web.Request) -> str:
        self._transfer.start()
        return "Weight update started"

    async def _update_weights(self, request: web.Request) -> str:
        await self._transfer.update((await request.json())["update_info"])
        return "Weights updated"

    async def _finish_update(self, request: web.Request) -> str:
        version = (await read_request(FinishedUpdateBody, request)).weight_version
        await self._transfer.finish()
        self.version = version or self.version
        return "Weight update finished"

    async def _shutdown_transfer(self, request: web.Request) -> str:
        await self._transfer.leave()
        return "Weight transfer shut down"

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        method, arguments = str(body.get("method")), dict(body.get("kwargs") or {})
        known = {"load_weights_from", "describe_weight_loader"}
        if "extension" in self._lacks or method not in known:
            problem = f"Worker failed with error ''CPUWorker' object has no attribute {method}"
            raise web.HTTPInternalServerError(reason=problem)
        if method == "describe_weight_loader":
            size = vocab_size_of(Path(self.model_path))
            facts = {
                "device": "cpu",
                "dtype": "float32",
                "backend": "areal-gym",
                "vocab_size": size,
            }
            return web.json_response({"results": [facts]})
        try:
            number = await self._transfer.load_directory(str(arguments["directory"]))
        except RefusedWeightsError as refused:
            return web.json_response({"results": [{"refused": str(refused)}]})
        return web.json_response({"results": [{"num_tensors": number}]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await read_request(AdapterBody, request)
        if body.lora_name in self._adapters and not body.load_inplace:
            message = f"The lora adapter '{body.lora_name}' has already been loaded."
            raise RequestBodyError(message)
        try:
            rank = read_json(Path(body.lora_path, "adapter_config.json"))["r"]
            if rank > self._max_lora_rank:
                limit = f"max_lora_rank {self._max_lora_rank}"
                raise RequestBodyError(f"LoRA rank {rank} is greater than {limit}.")
            await self.load_adapter(body.lora_name, Path(body.lora_path))
        except RequestBodyError:
            raise
        except Exception as error:  # untrusted files
            raise RequestBodyError(f"{body.lora_path}: {error!r}", status=404) from None
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = (await read_request(AdapterBody, request)).lora_name
        if self._adapters.pop(name, None) is None:
            raise RequestBodyError(f"The lora adapter '{name}' cannot be found.", status=404)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve a checkpoint with the embedded engine."""
    parser = argparse.ArgumentParser(
        prog="python -m areal_gym.engines.vllm.fake_vllm",
        description="Serve a checkpoint behind vLLM's endpoints, without vLLM.",
        epilog="Other arguments of `vllm serve` are accepted and ignored.",
    )
    parser.add_argument("model", type=Path, help="a checkpoint directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--max-logprobs", type=int, default=20)
    parser.add_argument("--max-model-len", type=int, default=4096)
    options, _ = parser.parse_known_args(arguments)
    asyncio.run(
        serve_checkpoint(
            FakeVLLMServer,
            options.model,
            "a fake vLLM",
            num_slots=options.max_num_seqs,
            max_context=options.max_model_len,
            max_lora_rank=options.max_lora_rank,
            max_logprobs=options.max_logprobs,
            host=options.host,
            port=options.port,
        )
    )


if __name__ == "__main__":
    main()
