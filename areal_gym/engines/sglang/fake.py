"""A stand-in for an SGLang server: any engine of this package behind SGLang's endpoints.

For tests, and for whoever has no GPU and no SGLang. It answers in the shapes that SGLang 0.5.23
was seen to answer in; one suite (`tests/sglang`) runs against it and against the real one::

    async with FakeSGLangServer(EmbeddedEngine.from_checkpoint(policy)) as server:
        engine = SGLangEngine(policy, urls=[server.url])

    python -m areal_gym.engines.sglang.fake --model-path POLICY --port 30000

What it does not do: text in or out, streams, `n` above 1. It scores prompts where the model is a
checkpoint directory. Its pause "in_place" is a "retract": no cache is kept under new weights.
Grammars it refuses, as a server that was started with `--grammar-backend none` does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from areal_gym.engines.base import Engine, SamplingParams
from areal_gym.engines.sglang.fake_requests import (
    AbortRequest,
    GenerateRequest,
    PauseGeneration,
    errors_as_json,
    read_request,
)
from areal_gym.engines.sglang.fake_weights import WeightRoutes, add_weight_routes
from areal_gym.engines.sglang.replies import INITIAL_WEIGHTS
from areal_gym.engines.sglang.server_client import vocab_size_of
from areal_gym.types import FinishReason
from areal_gym.utils.http_servers.aiohttp_site import HttpSite, RequestBodyError

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_PROMPT_MARGIN = 6
"""SGLang takes prompts that are shorter than its context by this much."""


@dataclass(eq=False, slots=True)
class _Running:
    """One sequence that is being sampled."""

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """What the weights of each token were called."""
    num_retractions: int = 0
    is_aborted: bool = False
    is_parked: bool = False


class FakeSGLangServer:
    """Serves `engine` as SGLang serves a model. Use it as an asynchronous context manager.

    Args:
        engine: samples; the server starts and ends it.
        model_path: what the server says that it serves; a checkpoint's `config.json` is read.
        emulate: which version of SGLang to be: before 0.5.21 there are no update sessions, before
            0.5.19 no versions per token.
        chunk_tokens: tokens that are sampled at a stretch; abort and pause act between chunks.
        is_shared: somebody else starts the engine, publishes to it and ends it; the weights are
            called what the engine calls them, and turns are sampled in one piece.
        host: to listen on.
        port: 0 takes a free one.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        model_path: str = "fake",
        emulate: str = "0.5.23",
        chunk_tokens: int = 4,
        is_shared: bool = False,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.engine = engine
        self.model_path = model_path
        self.emulate = emulate
        self._version = INITIAL_WEIGHTS
        self.update_session = False
        """Between `/begin_weight_update` and `/end_weight_update`."""
        self.num_requests = 0
        """How often `/generate` was asked."""
        number = tuple(int(part) for part in re.findall(r"\d+", emulate)[:3])
        self.has_update_sessions = number >= (0, 5, 21)
        self._has_spans = number >= (0, 5, 19)
        self._is_shared = is_shared
        self._chunk_tokens = engine.max_context if is_shared else chunk_tokens
        self._host = host
        self._port = port
        self._running: set[_Running] = set()
        self._pause: str | None = None
        self._changed = asyncio.Condition()
        self._site: HttpSite | None = None
        self._weights: WeightRoutes

    @property
    def num_running(self) -> int:
        """Sequences that are being sampled now."""
        return len(self._running)

    @property
    def version(self) -> str:
        """What it calls its weights; routes that change them set it."""
        return str(self.engine.policy_version) if self._is_shared else self._version

    @version.setter
    def version(self, name: str) -> None:
        self._version = name

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Start the engine and answer from now on.

        Raises:
            OSError: the port is taken.
        """
        if not self._is_shared:
            await self.engine.start()
        app = web.Application(client_max_size=1 << 30, middlewares=[errors_as_json])
        for route, handler in (
            ("/health", self._health),
            ("/health_generate", self._health),
            ("/model_info", self._model_info),
            ("/get_model_info", self._model_info),
            ("/server_info", self._server_info),
            ("/get_server_info", self._server_info),
            ("/v1/models", self._models),
            ("/flush_cache", self._flush_cache),
        ):
            app.router.add_get(route, handler)
        for route, handler in (
            ("/generate", self._generate),
            ("/abort_request", self._abort_request),
            ("/pause_generation", self._pause_generation),
            ("/continue_generation", self._continue_generation),
            ("/flush_cache", self._flush_cache),
        ):
            app.router.add_post(route, handler)
        self._weights = add_weight_routes(app, self)
        site = HttpSite(app, handler_cancellation=True)
        self._port = await site.start(self._host, self._port)
        self._site = site

    async def aclose(self) -> None:
        """Stop answering, end the engine. Idempotent."""
        await self.die()
        if not self._is_shared:
            await self.engine.aclose()

    async def die(self) -> None:
        """Hang up on everybody, in the middle of whatever it is, as kill -9 would."""
        site, self._site = self._site, None
        if site is not None:
            site.abort_connections()
            await site.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Nothing is sampled inside: weights can change.

        While generation is paused, what runs is set aside already, or will be at its next chunk;
        else an update waits until all that runs has ended, as SGLang's does.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: all(request.is_parked for request in self._running)
            )
            yield

    # ---- looking ------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self.model_path,
                "tokenizer_path": self.model_path,
                "is_generation": True,
                "weight_version": self.version,
            }
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self.model_path,
                "version": self.emulate,
                "context_length": None,
                "max_req_input_len": self.engine.max_context - _PROMPT_MARGIN,
                # A turn in one piece is sampled with its seed as it is.
                "enable_deterministic_inference": self._is_shared,
                "weight_version": self.version,
            }
        )

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self.model_path,
            "object": "model",
            "owned_by": "sglang",
            "root": self.model_path,
            "max_model_len": self.engine.max_context,
        }
        return web.json_response({"object": "list", "data": [model]})

    # ---- generation ---------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.Response:
        body = await read_request(GenerateRequest, request)
        try:
            sequences = self._read(body)
            self.num_requests += 1
            await self._weights.use_adapter(body.lora_path)
            answers = await asyncio.gather(*(self._sample(sequence) for sequence in sequences))
            shown = [self._show(sequence, kind, body) for sequence, kind in answers]
            if body.logprob_start_len == 0:
                for answer, sequence in zip(shown, sequences, strict=True):
                    scores = [None, *await self._weights.score(sequence.prompt_ids)]
                    answer["meta_info"]["input_token_logprobs"] = [
                        [score, token, None]
                        for score, token in zip(scores, sequence.prompt_ids, strict=True)
                    ]
        except (_BadRequestError, ValueError) as error:
            raise RequestBodyError(str(error)) from None
        is_batch = bool(body.input_ids) and isinstance((body.input_ids or [0])[0], list)
        return web.json_response(shown if is_batch else shown[0])

    def _read(self, body: GenerateRequest) -> list[_Running]:
        if (body.logprob_start_len or -1) > 0:
            raise _BadRequestError("the fake server scores whole prompts: logprob_start_len is 0")
        if body.stream or body.input_ids is None:
            raise _BadRequestError("the fake server takes input_ids, and does not stream")
        prompts = _prompts(body.input_ids)
        rids = [body.rid] if isinstance(body.rid, str) else body.rid
        if not rids:
            rids = [uuid.uuid4().hex for _ in prompts]
        if len(rids) != len(prompts):
            raise _BadRequestError("as many rids are needed as there are prompts")
        sampling = {} if body.sampling_params is None else body.sampling_params.given()
        if sampling.get("logit_bias"):
            vocab_size = vocab_size_of(Path(self.model_path))
            raise _BadRequestError(
                "the fake server has no logit_bias"
                + (f" for tokens of [0, {vocab_size - 1}]" if vocab_size else "")
            )
        if any(sampling.get(kind) for kind in _GRAMMARS):
            raise _BadRequestError(
                f"Grammar-based generation ({', '.join(_GRAMMARS)}) is not supported when the "
                "server is launched with --grammar-backend none"
            )
        params = SamplingParams(
            max_new_tokens=sampling.get("max_new_tokens", 128),
            temperature=sampling.get("temperature", 1.0),
            top_p=sampling.get("top_p", 1.0),
            top_k=max(0, sampling.get("top_k", 0)),
            stop_token_ids=self._stop_token_ids(sampling),
            seed=sampling.get("sampling_seed"),
        )
        for prompt in prompts:
            self._check_length(len(prompt), params.max_new_tokens)
        return [_Running(rid, prompt, params) for rid, prompt in zip(rids, prompts, strict=True)]

    def _stop_token_ids(self, sampling: dict[str, Any]) -> tuple[int, ...]:
        if sampling.get("ignore_eos"):
            return ()
        return (*(sampling.get("stop_token_ids") or ()), *_eos_ids(Path(self.model_path)))

    def _check_length(self, num_prompt: int, num_new: int) -> None:
        context = self.engine.max_context
        if num_prompt > context - _PROMPT_MARGIN:
            raise _BadRequestError(
                f"Input length ({num_prompt} tokens) exceeds the maximum allowed length "
                f"({context - _PROMPT_MARGIN} tokens)."
            )
        if num_prompt + num_new > context:
            raise _BadRequestError(
                "Requested token count exceeds the model's maximum context length of "
                f"{context} tokens."
            )

    async def _sample(self, running: _Running) -> tuple[_Running, dict[str, Any]]:
        """Sample chunk by chunk; the second of what is returned is SGLang's finish reason."""
        async with self._changed:  # a request that comes while generation is paused is held
            await self._changed.wait_for(lambda: self._pause is None)
            self._running.add(running)
        try:
            while len(running.token_ids) < running.params.max_new_tokens:
                await self._park(running)
                if running.is_aborted:
                    reason = {"type": "abort", "message": "Aborted"}
                    return running, {**reason, "status_code": None, "err_type": None}
                if await self._sample_chunk(running) is FinishReason.STOP:
                    return running, {"type": "stop", "matched": running.token_ids[-1]}
            return running, {"type": "length", "length": len(running.token_ids)}
        finally:
            self._running.discard(running)
            self.engine.release(running.rid)
            await self._tell()

    async def _sample_chunk(self, running: _Running) -> FinishReason:
        name = self.version
        left = running.params.max_new_tokens - len(running.token_ids)
        generation = await self.engine.generate(
            [*running.prompt_ids, *running.token_ids],
            replace(running.params, max_new_tokens=min(left, self._chunk_tokens)),
            session=running.rid,
        )
        running.token_ids += generation.token_ids
        running.logprobs += generation.logprobs
        running.names += (
            [str(version) for version in generation.versions]
            if self._is_shared
            else [name] * len(generation.token_ids)
        )
        return generation.finish_reason

    async def _park(self, running: _Running) -> None:
        """Wait while generation is paused."""
        if self._pause is None:
            return
        async with self._changed:
            running.is_parked = True
            running.num_retractions += self._pause == "retract"
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._pause is None or running.is_aborted)
            running.is_parked = False

    def _show(
        self, running: _Running, finish_reason: dict[str, Any], body: GenerateRequest
    ) -> dict[str, Any]:
        num_tokens = len(running.token_ids)
        meta: dict[str, Any] = {
            "id": running.rid,
            "finish_reason": finish_reason,
            "prompt_tokens": len(running.prompt_ids),
            "completion_tokens": num_tokens,
            "cached_tokens": 0,
            "num_retractions": running.num_retractions,
            "weight_version": self.version,
        }
        if self._has_spans:
            meta["weight_versions"] = _spans(running.names)
        if body.return_logprob:
            rows = zip(running.logprobs, running.token_ids, strict=True)
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in rows]
            meta["output_token_logprobs_length"] = num_tokens
        return {"text": "", "output_ids": running.token_ids, "meta_info": meta}

    # ---- interruptions ------------------------------------------------------------------------

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = await read_request(AbortRequest, request)
        self._abort(None if body.abort_all else body.rid or "")
        await self._tell()
        return web.Response()

    def _abort(self, rid: str | None) -> None:
        for running in self._running:
            if rid is None or running.rid == rid:
                running.is_aborted = True

    async def _pause_generation(self, request: web.Request) -> web.Response:
        mode = (await read_request(PauseGeneration, request)).mode
        self._pause = mode
        if mode == "abort":
            self._abort(None)
            async with self._changed:
                self._changed.notify_all()
                await self._changed.wait_for(lambda: not self._running)
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, request: web.Request) -> web.Response:
        self._pause = None
        await self._tell()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush_cache(self, request: web.Request) -> web.Response:
        return web.Response(text="Cache flushed.\n")

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class _BadRequestError(Exception):
    """Answered with HTTP 400."""


def _prompts(input_ids: Sequence[Any]) -> list[list[int]]:
    """Returns one prompt, or a batch of them, as a batch."""
    prompts = list(input_ids)
    if prompts and not isinstance(prompts[0], list):
        prompts = [prompts]
    if not prompts or not all(prompts):
        raise _BadRequestError("input_ids cannot be empty.")
    return prompts


def _spans(names: Sequence[str]) -> list[dict[str, Any]]:
    """Runs of equal names, as SGLang gives them."""
    spans: list[dict[str, Any]] = []
    for position, name in enumerate(names):
        if not spans or spans[-1]["version"] != name:
            spans.append({"version": name, "start": position, "end": position})
        spans[-1]["end"] = position + 1
    return spans


def _eos_ids(policy: Path) -> list[int]:
    """Where a checkpoint's model ends its text; SGLang asks both files."""
    ids: list[int] = []
    for name in ("config.json", "generation_config.json"):
        try:
            eos = json.loads((policy / name).read_text()).get("eos_token_id")
        except FileNotFoundError:
            continue
        if eos is not None:
            ids += eos if isinstance(eos, list) else [eos]
    return ids


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
        host=options.host,
        port=options.port,
    )
    async with server:
        print(
            f"a fake SGLang {options.emulate} serves {options.model_path} at {server.url}",
            flush=True,
        )
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
    parser.add_argument("--emulate", default="0.5.23", help="which version of SGLang to be")
    options, _ = parser.parse_known_args(arguments)
    asyncio.run(_serve(options))


if __name__ == "__main__":
    main()
