"""An HTTP server around any engine, for clients in other processes.

It has the generation routes of SGLang (as of 0.5.23), and `SGLangEngine(is_guest=True)` is its
client: this is how rollout workers sample from the embedded engine of a run. Weights are published
to the engine itself, never through this server. Prompts and samples are token ids; streaming, `n`
above 1, grammars and adapters are not supported.
"""

from __future__ import annotations

import asyncio
import uuid
from base64 import b64encode
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from areal_gym.engines.base import Engine, Generation, SamplingParams
from areal_gym.engines.checkpoint_config import eos_token_ids, vocab_size_of
from areal_gym.engines.expert_encoding import encode_experts
from areal_gym.engines.scoring import TopScoringEngine
from areal_gym.engines.server_requests import GenerateRequest, errors_as_json, read_request
from areal_gym.engines.servers.server_pictures import PictureReader
from areal_gym.message_types import ImageRef
from areal_gym.types import FinishReason, RoutedExperts, TopTokens
from areal_gym.utils.http_servers.addresses import http_address
from areal_gym.utils.http_servers.aiohttp_site import Handler, HttpSite, RequestBodyError
from areal_gym.version import __version__

_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_PROMPT_MARGIN = 6
"""SGLang's prompts must be shorter than its context less this many tokens."""


@dataclass(eq=False, slots=True)
class RunningRequest:
    """A sequence that is being sampled."""

    rid: str
    prompt_ids: list[int]
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    """The server's name for the weights that sampled each token."""
    routed_experts: list[RoutedExperts | None] = field(default_factory=list)
    images: tuple[ImageRef, ...] = ()
    num_retractions: int = 0
    is_aborted: bool = False
    is_parked: bool = False

    @property
    def image_arguments(self) -> dict[str, Any]:
        """The engine's argument `images`, which text-only engines do not have."""
        return {"images": self.images} if self.images else {}

    def extend(self, generation: Generation, versions: Iterable[str]) -> None:
        """Append the tokens of `generation`."""
        self.token_ids += generation.token_ids
        self.logprobs += generation.logprobs
        self.versions += versions
        self.routed_experts.append(generation.routed_experts)

    def finish_reason(self, reason: FinishReason) -> dict[str, Any]:
        """Return SGLang's description of why sampling ended."""
        if reason is FinishReason.STOP:
            return {"type": "stop", "matched": self.token_ids[-1]}
        return {"type": "length", "length": len(self.token_ids)}


class EngineServer:
    """Serves `engine` over HTTP. Use it as an asynchronous context manager.

    The caller starts and closes the engine. Each token carries the policy version that sampled it,
    because weights may be published while requests are in flight.

    Args:
        engine: samples the requests.
        model_path: the checkpoint's directory, whose `config.json` is read if it exists.
        host: the address to listen on.
        port: the port; 0 takes a free one.
    """

    has_version_spans = True
    """Whether answers name the weights that sampled each token."""
    returns_routed_experts = True
    """Whether answers contain the experts of tokens if a request asks for them."""

    def __init__(
        self, engine: Engine, *, model_path: str = "engine", host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.engine = engine
        self.model_path = model_path
        self.pictures = PictureReader(Path(model_path))
        self.num_requests = 0
        """The number of calls of `/generate`."""
        self._host = host
        self._port = port
        self._running: set[RunningRequest] = set()
        self._site: HttpSite | None = None

    @property
    def num_running(self) -> int:
        """The number of sequences that are being sampled."""
        return len(self._running)

    @property
    def version(self) -> str:
        """The server's name for its weights."""
        return str(self.engine.policy_version)

    @property
    def url(self) -> str:
        """The server's base URL."""
        return http_address(self._host, self._port)

    async def start(self) -> None:
        """Begin to serve.

        Raises:
            OSError: the port is in use.
        """
        app = web.Application(client_max_size=1 << 30, middlewares=[errors_as_json])
        for method, route, handler in self._routes():
            app.router.add_route(method, route, handler)
        site = HttpSite(app, handler_cancellation=True)
        self._port = await site.start(self._host, self._port)
        self._site = site

    async def aclose(self) -> None:
        """Stop serving; open connections are closed. Idempotent."""
        site, self._site = self._site, None
        if site is not None:
            site.abort_connections()
            await site.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    # ---- routes -------------------------------------------------------------------------------

    def _routes(self) -> list[tuple[str, str, Handler]]:
        return [
            ("GET", "/health", self._health),
            ("GET", "/health_generate", self._health),
            ("GET", "/model_info", self._model_info),
            ("GET", "/get_model_info", self._model_info),
            ("GET", "/server_info", self._server_info),
            ("GET", "/get_server_info", self._server_info),
            ("GET", "/v1/models", self._models),
            ("POST", "/generate", self._generate),
        ]

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, request: web.Request) -> web.Response:
        paths = {"model_path": self.model_path, "tokenizer_path": self.model_path}
        return web.json_response({**paths, "is_generation": True, "weight_version": self.version})

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(self._facts())

    def _facts(self) -> dict[str, Any]:
        return {
            "model_path": self.model_path,
            "version": f"areal-gym {__version__}",
            "device": "cpu",
            "context_length": None,
            "max_req_input_len": self.engine.max_context - _PROMPT_MARGIN,
            "enable_deterministic_inference": True,
            "enable_return_routed_experts": self.returns_routed_experts,
            "updates_in_flight": True,
            "weight_version": self.version,
        }

    async def _models(self, request: web.Request) -> web.Response:
        names = {"id": self.model_path, "root": self.model_path, "owned_by": "sglang"}
        model = {"object": "model", **names, "max_model_len": self.engine.max_context}
        return web.json_response({"object": "list", "data": [model]})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await read_request(GenerateRequest, request)
        try:
            requests = self._read(body)
            self.num_requests += 1
            async with self._prepared(body.lora_path):
                answers = await asyncio.gather(*(self._answer(item, body) for item in requests))
        except ValueError as error:
            raise RequestBodyError(str(error)) from None
        is_batch = bool(body.input_ids) and isinstance((body.input_ids or [0])[0], list)
        return web.json_response(answers if is_batch else answers[0])

    # ---- one request: subclasses override these -------------------------------------------------

    @asynccontextmanager
    async def _prepared(self, adapter: str | None) -> AsyncIterator[None]:
        """Make the engine ready for an adapter; raise ValueError if the server does not have it."""
        if adapter is not None:
            raise ValueError("this server has no adapters")
        yield

    async def _run(self, request: RunningRequest) -> dict[str, Any]:
        self._running.add(request)
        try:
            return await self._sample(request)
        finally:
            self._running.discard(request)
            self.engine.release(request.rid)

    async def _sample(self, request: RunningRequest) -> dict[str, Any]:
        if not request.params.max_new_tokens:
            return request.finish_reason(FinishReason.LENGTH)
        generation = await self.engine.generate(
            request.prompt_ids, request.params, session=request.rid, **request.image_arguments
        )
        request.extend(generation, map(str, generation.versions))
        return request.finish_reason(generation.finish_reason)

    @property
    def scorer(self) -> TopScoringEngine:
        """The engine, which scores prompts; raises ValueError if it cannot."""
        if not isinstance(self.engine, TopScoringEngine):
            raise ValueError(f"this server does not score prompts: {type(self.engine).__name__}")
        return self.engine

    async def _scored(self, token_ids: list[int], body: GenerateRequest) -> dict[str, Any]:
        """Return what SGLang reports of a prompt's tokens from `logprob_start_len` on."""
        start = body.logprob_start_len or 0
        scores = (await self.scorer.score(token_ids))[start:]
        meta: dict[str, Any] = {"input_token_logprobs": _rows([None, *scores], token_ids[start:])}
        if body.top_logprobs_num:
            top = await self.scorer.score_top(token_ids, body.top_logprobs_num, start=start + 1)
            meta |= top_fields(top, is_packed=bool(body.return_flat_raw_top_logprobs_b64))
        return meta

    # ---- bodies and answers -------------------------------------------------------------------

    def _read(self, body: GenerateRequest) -> list[RunningRequest]:
        if body.stream or body.input_ids is None:
            raise ValueError("this server takes input_ids, and does not stream")
        prompts: list[Any] = list(body.input_ids)
        if prompts and not isinstance(prompts[0], list):
            prompts = [prompts]
        if not prompts or not all(prompts):
            raise ValueError("input_ids cannot be empty.")
        rids = [body.rid] if isinstance(body.rid, str) else body.rid
        if not rids:
            rids = [uuid.uuid4().hex for _ in prompts]
        if body.return_routed_experts and any(
            (body.routed_experts_start_len or 0) != len(prompt) - 1 for prompt in prompts
        ):
            raise ValueError(
                "this server returns the experts of sampled tokens only: routed_experts_start_len "
                "must be the prompt's length less 1"
            )
        if len(rids) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many rids; there are {len(rids)}")
        sampling = {} if body.sampling_params is None else body.sampling_params.set_fields()
        params = self._sampling_params(sampling)
        if body.image_data and len(prompts) > 1:
            raise ValueError("this server takes images for one prompt at a time")
        expanded = [self.pictures.expanded(prompt, body.image_data or ()) for prompt in prompts]
        for prompt, _ in expanded:
            self._check_length(len(prompt), params.max_new_tokens)
        return [
            RunningRequest(rid, prompt, params, images=images)
            for rid, (prompt, images) in zip(rids, expanded, strict=True)
        ]

    def _sampling_params(self, sampling: dict[str, Any]) -> SamplingParams:
        policy = Path(self.model_path)
        biased = set(sampling.get("logit_bias") or ())
        if biased - set(map(str, self.pictures.banned_ids)):
            size = vocab_size_of(policy)
            ids = f" for tokens of [0, {size - 1}]" if size else ""
            raise ValueError(f"this server has no logit_bias{ids}")
        if any(sampling.get(kind) for kind in _GRAMMARS):
            raise ValueError(
                f"Grammar-based generation ({', '.join(_GRAMMARS)}) is not supported when the "
                "server is launched with --grammar-backend none"
            )
        stops: list[int] = []
        if not sampling.get("ignore_eos"):
            stops = [*(sampling.get("stop_token_ids") or ()), *eos_token_ids(policy)]
        return SamplingParams(
            max_new_tokens=sampling.get("max_new_tokens", 128),
            temperature=sampling.get("temperature", 1.0),
            top_p=sampling.get("top_p", 1.0),
            top_k=max(0, sampling.get("top_k", 0)),
            stop_token_ids=tuple(stops),
            seed=sampling.get("sampling_seed"),
        )

    def _check_length(self, num_prompt: int, num_new: int) -> None:
        context = self.engine.max_context
        if num_prompt >= context - _PROMPT_MARGIN:
            raise ValueError(
                f"Input length ({num_prompt} tokens) exceeds the maximum allowed length "
                f"({context - _PROMPT_MARGIN} tokens)."
            )
        if num_prompt + num_new > context:
            raise ValueError(
                "Requested token count exceeds the model's maximum context length of "
                f"{context} tokens."
            )

    async def _answer(self, request: RunningRequest, body: GenerateRequest) -> dict[str, Any]:
        finish_reason = await self._run(request)
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": finish_reason,
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": len(request.token_ids),
            "cached_tokens": 0,
            "num_retractions": request.num_retractions,
            "weight_version": self.version,
        }
        if self.has_version_spans:
            meta["weight_versions"] = version_spans(request.versions)
        if body.return_logprob:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = _rows(request.logprobs, request.token_ids)
            meta["output_token_logprobs_length"] = len(request.token_ids)
        experts = RoutedExperts.joined(request.routed_experts)
        if body.return_routed_experts and self.returns_routed_experts and experts is not None:
            meta["routed_experts"] = encode_experts(experts)
        if body.logprob_start_len is not None and body.logprob_start_len >= 0:
            meta |= await self._scored(request.prompt_ids, body)
        return {"text": "", "output_ids": request.token_ids, "meta_info": meta}


def _rows(logprobs: Sequence[float | None], token_ids: Sequence[int]) -> list[list[Any]]:
    """Return log-probabilities in SGLang's form: (log-probability, token, its unknown text)."""
    return [[logprob, token, None] for logprob, token in zip(logprobs, token_ids, strict=True)]


def top_fields(top: TopTokens, *, is_packed: bool) -> dict[str, Any]:
    """Return the likeliest tokens of a prompt's places in SGLang's forms: packed, or as lists."""
    if is_packed:
        return {
            "input_top_logprobs_val_flat_b64": b64encode(top.logprobs).decode("ascii"),
            "input_top_logprobs_idx_flat_b64": b64encode(top.ids).decode("ascii"),
            "input_top_logprobs_shape": [len(top), top.top_k],
            "input_top_logprobs_null_prefix": 1,
        }
    places = zip(*(part.tolist() for part in top.arrays()), strict=True)
    return {"input_top_logprobs": [None, *(_rows(logprobs, ids) for ids, logprobs in places)]}


def version_spans(versions: Sequence[str]) -> list[dict[str, Any]]:
    """Return runs of tokens with equal versions, in the form of SGLang and vLLM."""
    spans: list[dict[str, Any]] = []
    for position, name in enumerate(versions):
        if not spans or spans[-1]["version"] != name:
            spans.append({"version": name, "start": position, "end": position})
        spans[-1]["end"] = position + 1
    return spans
