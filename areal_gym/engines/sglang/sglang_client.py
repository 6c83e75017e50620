"""SGLang's protocol: the routes and bodies by which an engine uses a server.

SGLang crashes when told to release memory twice, or while it samples.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_gym.engines.servers.replies import Reply, ScoreRequest, TurnRequest
from areal_gym.engines.servers.server_client import (
    ADAPTER_S,
    DISK_S,
    MEMORY_S,
    RefusedError,
    ServerClient,
    ServerFacts,
)
from areal_gym.engines.servers.server_pictures import (
    image_urls,
    require_read_whole,
    without_placeholders,
)
from areal_gym.engines.sglang.adapter_limits import require_whole_groups
from areal_gym.engines.sglang.sglang_replies import (
    experts_request,
    load_answer,
    read_answer,
    read_top,
    sampling_params,
    score_request,
    top_request,
)
from areal_gym.errors import EngineError
from areal_gym.types import TopTokens

_NO_ROUTE = 404
_RESERVED_TOKENS = 6
"""Prompts are shorter than `max_req_input_len`, which is the context less this many tokens."""


class SGLangClient(ServerClient):
    """Sends requests to one SGLang server."""

    kind = "SGLang"
    protocol = "sglang"
    context_flag = "--context-length"
    version_route = "/model_info"
    needs_update_session = True
    """Whether tensors must be sent between `/begin_weight_update` and `/end_weight_update` (SGLang
    0.5.21 and later); set by `probe`."""
    _has_seeds = False
    """Whether a seed determines the tokens (`--enable-deterministic-inference`)."""
    _returns_experts = False
    """Whether requests may ask for experts of tokens (`--enable-return-routed-experts`)."""

    @staticmethod
    def command_to_start(model: str, host: str, port: int) -> str:
        """Return a shell command that starts a server."""
        place = f"--host {host} --port {port}"
        return f"python -m sglang.launch_server --model-path {model} {place}"

    async def probe(self) -> ServerFacts:
        """Ask what the server can do; sets `needs_update_session` and `num_ranks`."""
        try:
            weight_version = await self.weight_version()
        except RefusedError as refused:
            if refused.status != _NO_ROUTE:
                raise
            raise self.is_another(f"it has no {self.version_route}") from None
        info = await self.get("/server_info")
        max_context = info.get("max_req_input_len")
        if max_context is None:
            models = await self.get("/v1/models")
            max_context = models["data"][0]["max_model_len"] - _RESERVED_TOKENS
        states = info.get("internal_states") or [info]
        self.num_ranks = int(states[0].get("tp_size", 1))
        self.needs_update_session = await self._has_route("/begin_weight_update")
        self._has_seeds = bool(info.get("enable_deterministic_inference"))
        self._returns_experts = bool(info.get("enable_return_routed_experts"))
        return ServerFacts(
            version=str(info.get("version", "unknown")),
            model_path=str(info.get("model_path", "unknown")),
            weight_version=weight_version,
            max_context=int(max_context),
            vocab_size=await self._vocab_size(),
            # The pause exists before 0.5.21, too, but an update crashes while requests wait.
            can_set_aside=bool(info.get("updates_in_flight"))
            or (self.needs_update_session and await self._has_route("/pause_generation")),
            device=str(info.get("device") or "unknown"),
            frees_memory=bool(info.get("enable_memory_saver")),
            dtype=str(info.get("dtype") or "unknown"),
        )

    async def set_version(self, version: str) -> None:
        """Make the server report `version`; requests in flight continue."""
        body = {"new_version": version, "abort_all_requests": False}
        await self.post("/update_weight_version", body, timeout_s=ADAPTER_S)

    # ---- generation ---------------------------------------------------------------------------

    async def sample(self, request: TurnRequest, *, timeout_s: float) -> Reply:
        """Sample the next tokens of a turn."""
        body: dict[str, Any] = {
            "rid": request.id,
            "input_ids": request.wire_ids,
            "sampling_params": sampling_params(
                request.params, request.max_new_tokens, has_seeds=self._has_seeds
            )
            | without_placeholders(request.banned_ids),
            "return_logprob": True,
        }
        if request.images:
            body["image_data"] = image_urls(request.images)
        if request.adapter is not None:
            body["lora_path"] = request.adapter
        if self._returns_experts:
            body |= experts_request(len(request.prompt_ids))
        answer = await self.post_often("/generate", body, timeout_s=timeout_s)
        if request.images:
            num_read = answer.get("meta_info", {}).get("prompt_tokens")
            require_read_whole(self.url, num_read, len(request.prompt_ids))
        return read_answer(answer, request.version, request.num_layers)

    def _parse(self, route: str, body: bytes) -> Any:
        return load_answer(body) if route == "/generate" else super()._parse(route, body)

    async def score(
        self, token_ids: Sequence[int], *, adapter: str | None, timeout_s: float
    ) -> list[float]:
        """Return the log-probabilities of `token_ids[1:]` at temperature 1."""
        body = score_request(token_ids, 0, adapter)
        answer = await self.post_often("/generate", body, timeout_s=timeout_s)
        try:
            return [row[0] for row in answer["meta_info"]["input_token_logprobs"][1:]]
        except KeyError:
            raise EngineError(f"{self.url} did not score: {str(answer)[:200]}") from None

    async def score_top(self, request: ScoreRequest, *, timeout_s: float) -> TopTokens:
        """Return the likeliest tokens in the places of a request at temperature 1."""
        body = score_request(request.token_ids, request.start - 1, request.adapter)
        body |= top_request(request.top_k)
        answer = await self.post_often("/generate", body, timeout_s=timeout_s)
        return read_top(answer, request)

    async def abort(self, request_id: str) -> None:
        """End a request whose caller has gone."""
        await self.post("/abort_request", {"rid": request_id})

    async def abort_all(self) -> None:
        """Make the server return all requests with the tokens that they have.

        `/pause_generation` with mode "abort" does so repeatedly, but checks only once a second.
        """
        await self.post("/abort_request", {"rid": "", "abort_all": True})

    async def set_aside(self) -> None:
        """Hold requests in the server until `resume`, when their caches are recomputed."""
        await self.post("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        """Continue after `set_aside`."""
        await self.post("/continue_generation", {})

    # ---- weights ------------------------------------------------------------------------------

    async def _load(self, directory: str, version: str) -> None:
        """Load a checkpoint; a server that refuses keeps its weights."""
        body = {"model_path": directory, "weight_version": version, "flush_cache": True}
        await self.post("/update_weights_from_disk", body, timeout_s=DISK_S)

    async def _load_adapter(self, name: str, directory: Path) -> None:
        """Load a LoRA adapter, unless it would crash the server."""
        require_whole_groups(directory)
        body = {"lora_name": name, "lora_path": str(directory)}
        try:
            await self.post("/load_lora_adapter", body, timeout_s=ADAPTER_S)
        except RefusedError as refused:
            # An earlier run, or an interrupted publication, may have left one of that name.
            try:
                await self.unload_adapter(name)
            except RefusedError:
                raise refused from None
            await self.post("/load_lora_adapter", body, timeout_s=ADAPTER_S)

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter; return when no request uses it."""
        await self.post("/unload_lora_adapter", {"lora_name": name}, timeout_s=ADAPTER_S)

    async def begin_update(self) -> None:
        """Begin an update by tensors."""
        if self.needs_update_session:
            await self.post("/begin_weight_update", {}, timeout_s=ADAPTER_S)

    async def end_update(self, version: int) -> None:
        """End an update; the version came with the last tensors."""
        if self.needs_update_session:
            await self.post("/end_weight_update", {}, timeout_s=ADAPTER_S)

    async def abandon_update(self) -> None:
        """End an update that failed; some of the new weights are loaded under the old name."""
        try:
            await self.end_update(-1)
        finally:
            await super().abandon_update()

    # ---- memory -------------------------------------------------------------------------------

    async def _release_memory(self, tags: Sequence[str]) -> None:
        """Release the memory of `tags`; requests are held already."""
        await self.post("/release_memory_occupation", {"tags": list(tags)}, timeout_s=MEMORY_S)

    async def _take_memory(self, tags: Sequence[str]) -> None:
        """Allocate the memory of `tags` again."""
        if tags:
            await self.post("/resume_memory_occupation", {"tags": list(tags)}, timeout_s=MEMORY_S)

    # ---- probes -------------------------------------------------------------------------------

    async def _vocab_size(self) -> int | None:
        # SGLang reports it only when it refuses a logit bias. It must be known before sampling,
        # because a prompt with a larger id crashes the server.
        sampling = {"max_new_tokens": 1, "logit_bias": {str(2**30): 0.0}}
        try:
            await self.post("/generate", {"input_ids": [0], "sampling_params": sampling})
        except RefusedError as refused:
            last_id = re.search(r"\[0, (\d+)\]", refused.message)
            return int(last_id[1]) + 1 if last_id else None
        return None

    async def _has_route(self, route: str) -> bool:
        """Return whether a POST route exists: a GET request to it gives 405 then, otherwise 404."""
        try:
            await self.get(route)
        except RefusedError as refused:
            return refused.status != _NO_ROUTE
        return True
