"""SGLang's protocol: the routes and bodies by which an engine uses a server.

SGLang ends when it is asked to release memory that it has released, or while it samples.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_gym.engines.base import adapter_name
from areal_gym.engines.servers.replies import Reply, TurnRequest
from areal_gym.engines.servers.server_client import (
    ADAPTER_S,
    DISK_S,
    MEMORY_S,
    QUICK_S,
    RefusedError,
    ServerClient,
    ServerFacts,
    name_of_sleep,
)
from areal_gym.engines.sglang.sglang_replies import experts_request, read_answer, sampling_params
from areal_gym.errors import EngineError

_RESERVED_TOKENS = 6
"""SGLang's limit for prompts (`max_req_input_len`) is its context less this many tokens."""


class SGLangClient(ServerClient):
    """Sends requests to one SGLang server."""

    kind = "SGLang"
    protocol = "sglang"
    needs_update_session = True
    """Weights other than a directory's must come between `/begin_weight_update` and
    `/end_weight_update` (SGLang 0.5.21 and later); set by `probe`."""
    _has_seeds = False
    """The same seed gives the same tokens (`--enable-deterministic-inference`)."""
    _returns_experts = False
    """Requests may ask for the experts of tokens (`--enable-return-routed-experts`)."""

    @staticmethod
    def command_to_start(model: str, host: str, port: int) -> str:
        """Return a shell command that starts a server."""
        place = f"--host {host} --port {port}"
        return f"python -m sglang.launch_server --model-path {model} {place}"

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
        self._has_seeds = bool(info.get("enable_deterministic_inference"))
        self._returns_experts = bool(info.get("enable_return_routed_experts"))
        return ServerFacts(
            version=str(info.get("version", "unknown")),
            model_path=str(info.get("model_path", "unknown")),
            weight_version=weight_version,
            max_context=int(max_prompt) + 1,
            vocab_size=await self._vocab_size(),
            # Before 0.5.21 there is the pause, too, but an update crashes while requests wait.
            can_set_aside=bool(info.get("updates_in_flight"))
            or (self.needs_update_session and await self._has_route("/pause_generation")),
            device=str(info.get("device") or "unknown"),
            frees_memory=bool(info.get("enable_memory_saver")),
            dtype=str(info.get("dtype") or "unknown"),
        )

    async def weight_version(self, *, timeout_s: float = QUICK_S) -> str:
        """Return the server's name for its weights; "default" before the first update."""
        info = await self.get("/model_info", timeout_s=timeout_s)
        if "weight_version" not in info:
            raise EngineError(f"{self.url} is not an SGLang server: it has no weight version")
        return str(info["weight_version"])

    async def set_version(self, version: str) -> None:
        """Let the server report `version`; requests in flight go on."""
        body = {"new_version": version, "abort_all_requests": False}
        await self.post("/update_weight_version", body, timeout_s=ADAPTER_S)

    # ---- generation ---------------------------------------------------------------------------

    async def sample(self, request: TurnRequest, *, timeout_s: float) -> Reply:
        """Sample the next tokens of a turn."""
        body: dict[str, Any] = {
            "rid": request.id,
            "input_ids": request.prompt_ids,
            "sampling_params": sampling_params(
                request.params, request.max_new_tokens, has_seeds=self._has_seeds
            ),
            "return_logprob": True,
        }
        if request.adapter is not None:
            body["lora_path"] = request.adapter
        if self._returns_experts:
            body |= experts_request(len(request.prompt_ids))
        answer = await self.post("/generate", body, timeout_s=timeout_s)
        return read_answer(answer, request.version, request.num_layers)

    async def score(
        self, token_ids: Sequence[int], *, adapter: str | None, timeout_s: float
    ) -> list[float]:
        """Return the log-probabilities of `token_ids[1:]` at temperature 1."""
        body: dict[str, Any] = {
            "input_ids": list(token_ids),
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
        }
        if adapter is not None:
            body["lora_path"] = adapter
        answer = await self.post("/generate", body, timeout_s=timeout_s)
        try:
            return [row[0] for row in answer["meta_info"]["input_token_logprobs"][1:]]
        except KeyError:
            raise EngineError(f"{self.url} did not score: {str(answer)[:200]}") from None

    async def abort(self, request_id: str) -> None:
        """End a request whose caller has gone."""
        await self.post("/abort_request", {"rid": request_id})

    async def abort_all(self) -> None:
        """Ask for all requests back, with the tokens that they have.

        `/pause_generation` with mode "abort" does so repeatedly, but checks only once a second.
        """
        await self.post("/abort_request", {"rid": "", "abort_all": True})

    async def set_aside(self) -> None:
        """Let requests wait in the server until `resume`; they are computed anew then."""
        await self.post("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        """Go on after `set_aside`."""
        await self.post("/continue_generation", {})

    # ---- weights ------------------------------------------------------------------------------

    async def load_from_disk(self, directory: Path, version: int, *, is_kept: bool = True) -> None:
        """Load the checkpoint in `directory`; a server that refuses keeps its weights."""
        path = str(Path(directory).absolute())
        body = {"model_path": path, "weight_version": str(version), "flush_cache": True}
        await self.post("/update_weights_from_disk", body, timeout_s=DISK_S)
        if is_kept:
            self.loaded_from = (Path(directory), version)

    async def reload(self, model_path: str) -> None:
        """Load the weights that the server was started with, from its own `model_path`."""
        body = {"model_path": model_path, "flush_cache": True}
        await self.post("/update_weights_from_disk", body, timeout_s=DISK_S)

    async def load_adapter(self, directory: Path, version: int) -> None:
        """Load the LoRA adapter in `directory`, for requests that name `adapter_name(version)`."""
        name = adapter_name(version)
        body = {"lora_name": name, "lora_path": str(Path(directory).absolute())}
        try:
            await self.post("/load_lora_adapter", body, timeout_s=ADAPTER_S)
        except RefusedError as refused:
            # An earlier run, or a publication that was cut off, may have left one of that name.
            try:
                await self.unload_adapter(name)
            except RefusedError:
                raise refused from None
            await self.post("/load_lora_adapter", body, timeout_s=ADAPTER_S)
        self.loaded_adapter = (Path(directory), version)

    async def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter; returns when no request uses it."""
        await self.post("/unload_lora_adapter", {"lora_name": name}, timeout_s=ADAPTER_S)

    async def begin_update(self) -> None:
        """Begin to take tensors."""
        if self.needs_update_session:
            await self.post("/begin_weight_update", {}, timeout_s=ADAPTER_S)

    async def end_update(self, version: int) -> None:
        """End `begin_update`; the version came with the last tensors."""
        if self.needs_update_session:
            await self.post("/end_weight_update", {}, timeout_s=ADAPTER_S)

    async def abandon_update(self) -> None:
        """End an update that failed: some of the new weights are loaded, under the old name."""
        try:
            await self.end_update(-1)
        finally:
            await super().abandon_update()

    # ---- memory -------------------------------------------------------------------------------

    async def fall_asleep(self, tags: Sequence[str]) -> None:
        """Set requests aside, and release the memory of `tags`."""
        await self.set_aside()
        await self.set_version(name_of_sleep(tags))
        await self.post("/release_memory_occupation", {"tags": list(tags)}, timeout_s=MEMORY_S)

    async def take_memory(self, tags: Sequence[str]) -> None:
        """Take the memory of `tags` again."""
        if tags:
            await self.post("/resume_memory_occupation", {"tags": list(tags)}, timeout_s=MEMORY_S)

    # ---- probes -------------------------------------------------------------------------------

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
