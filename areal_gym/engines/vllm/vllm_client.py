"""vLLM's protocol: the routes and bodies by which an engine uses a server.

Most of the routes must be enabled when the server is started; `probe` says which are missing, and
how to start it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_gym.engines.base import BROKEN_WEIGHTS
from areal_gym.engines.servers.launch import StartRecipe, module_folder
from areal_gym.engines.servers.replies import Reply, ScoreRequest, TurnRequest
from areal_gym.engines.servers.server_client import (
    ADAPTER_S,
    DISK_S,
    MEMORY_S,
    QUICK_S,
    WEIGHTS,
    RefusedError,
    ServerClient,
    ServerFacts,
)
from areal_gym.engines.servers.server_pictures import require_read_whole
from areal_gym.engines.vllm.lone_scores import LoneScores
from areal_gym.engines.vllm.vllm_replies import (
    GENERATE,
    generate_body,
    read_answer,
    read_scores,
    read_top,
    require_listed,
    score_body,
    tells_versions,
)
from areal_gym.errors import ConfigError, EngineError
from areal_gym.types import TopTokens
from areal_gym.utils.files import read_json

PAUSE_S = 60.0
"""A pause returns when nothing runs any more."""
_INFO = "/server_info?config_format=json"
_BACKEND = "areal-gym"
"""The weight transfer backend of `server_side/areal_gym_weights.py`."""
_NO_SCALE_OUT = 403
_NO_ROUTE = 404
_WORKER_FAILED = 500

RECIPE = StartRecipe(
    name="vllm",
    python_arguments=("-m", "vllm.entrypoints.cli.main", "serve"),
    model_flag=None,
    arguments=(
        "--enable-scale-out",
        *("--logprobs-mode", "processed_logprobs"),
        *("--worker-extension-cls", "areal_gym_weights.WeightLoader"),
        *("--weight-transfer-config", f'{{"backend": "{_BACKEND}"}}'),
    ),
    environment={"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
    modules=Path("vllm", "server_side"),
)


class VLLMClient(ServerClient):
    """Sends requests to one vLLM server."""

    kind = "vLLM"
    protocol = "vllm"
    context_flag = "--max-model-len"
    version_route = "/weight_info"
    survives_torn_updates = False
    pauses_to_abort = True
    can_wake_twice = True
    _is_raw = False
    """Log-probabilities are those of temperature 1, whatever is sampled at."""
    _max_logprobs = 20
    """The most tokens that it lists in a place, vLLM's default; -1 is the whole vocabulary."""
    _max_lora_rank: int | None = None
    """None if the server does not report it, or takes no adapters."""
    _is_on_cpu = False
    """Its workers have no memory to release, and fail when they are to release the cache alone."""
    _num_set_aside = 0
    _lone = LoneScores(is_needed=False)

    @staticmethod
    def command_to_start(model: str, host: str, port: int) -> str:
        """Return a shell command that starts a server."""
        variables = {**RECIPE.environment, "PYTHONPATH": module_folder(RECIPE.modules or Path())}
        settings = " ".join(f"{name}={shlex.quote(str(v))}" for name, v in variables.items())
        place = f"--host {host} --port {port}"
        return f"{settings} vllm serve {model} {place} {shlex.join(RECIPE.arguments)}"

    # ---- probes -------------------------------------------------------------------------------

    async def probe(self) -> ServerFacts:
        """Ask what the server can do; sets `num_ranks`.

        Raises:
            ConfigError: a route is missing; the hints say what the server must be started with.
            EngineError: it is not a vLLM server.
        """
        version = await self._vllm_version()
        weight_version = await self._require(
            self.weight_version(), version, "/weight_info", "VLLM_SERVER_DEV_MODE=1"
        )
        info = (await self.get(_INFO)).get("vllm_config") or {}
        model = info.get("model_config") or {}
        await self._require_generation(version)
        loader = await self._weight_loader(version)
        self._is_raw = not str(model.get("logprobs_mode", "raw_logprobs")).startswith("processed")
        self._max_logprobs = int(model.get("max_logprobs", self._max_logprobs))
        self._is_on_cpu = loader.get("device") == "cpu"
        self._max_lora_rank = (info.get("lora_config") or {}).get("max_lora_rank")
        has_adapters = self._max_lora_rank is not None
        self._lone = LoneScores(is_needed=has_adapters and self._is_on_cpu)
        served = (await self.get("/v1/models"))["data"]
        base = next(row for row in served if not row.get("parent"))
        self.num_ranks = int((await self.get("/get_world_size"))["world_size"])
        return ServerFacts(
            version=version,
            model_path=str(base.get("root") or base["id"]),
            weight_version=str(weight_version),
            max_context=int(base["max_model_len"]),
            vocab_size=loader.get("vocab_size"),
            can_set_aside=True,
            device=str(loader.get("device") or "unknown"),
            frees_memory=bool(model.get("enable_sleep_mode")),
            dtype=str(loader.get("dtype") or "unknown"),
        )

    async def _vllm_version(self) -> str:
        try:
            return str((await self.get("/version"))["version"])
        except (KeyError, RefusedError):
            raise self.is_another("it has no /version") from None

    async def _require(self, asking: Any, version: str, route: str, remedy: str) -> Any:
        """Return the answer of a route that has to be enabled."""
        try:
            return await asking
        except RefusedError as refused:
            if refused.status not in (_NO_SCALE_OUT, _NO_ROUTE):
                raise
            raise ConfigError(
                f"vLLM {version} at {self.url} does not answer {route}, which this engine needs",
                hints=[
                    f"it is enabled by {remedy}: {self.start_command}",
                    "vLLM 0.32.0 has it; older versions may not",
                ],
            ) from None

    async def _require_generation(self, version: str) -> None:
        body = {"token_ids": [], "sampling_params": {"max_tokens": 1}}
        try:
            await self._require(self.post(GENERATE, body), version, GENERATE, "--enable-scale-out")
        except RefusedError:
            return  # an empty prompt is refused, by a route that is there

    async def _weight_loader(self, version: str) -> dict[str, Any]:
        """Return what the worker extension tells of the first worker."""
        try:
            answer = await self._call_workers("describe_weight_loader")
        except RefusedError as refused:
            raise ConfigError(
                f"vLLM {version} at {self.url} cannot take weights: it runs without areal-gym's "
                f"worker extension ({refused.message})",
                hints=[f"start it so: {self.start_command}"],
            ) from None
        return dict(answer[0])

    async def set_version(self, version: str) -> None:
        """Let the server report `version`; requests in flight go on."""
        await self.post("/update_weight_version", {"new_version": version}, timeout_s=ADAPTER_S)

    # ---- generation ---------------------------------------------------------------------------

    async def sample(self, request: TurnRequest, *, timeout_s: float) -> Reply:
        """Sample the next tokens of a turn.

        Raises:
            ConfigError: the server's log-probabilities would not be those of the temperature.
        """
        if self._is_raw and request.params.temperature not in (0.0, 1.0):
            raise ConfigError(
                f"{self.url} reports log-probabilities of temperature 1, and the turn is sampled "
                f"at {request.params.temperature:g}",
                hints=["start it with --logprobs-mode processed_logprobs", "or sample at 1"],
            )
        num_before = self._num_set_aside
        try:
            async with self._lone.turn():
                body = generate_body(request)
                answer = await self.post_often(GENERATE, body, timeout_s=timeout_s)
        except RefusedError as refused:
            if refused.status != _NO_ROUTE or request.adapter is None:
                raise
            raise await self._without_adapter(refused, request.adapter) from None
        if request.images:
            num_read = len(answer.get("prompt_token_ids") or ())
            require_read_whole(self.url, num_read, len(request.prompt_ids))
        reply = read_answer(answer, request.version)
        if reply.versions and not tells_versions(answer) and self._num_set_aside != num_before:
            raise ConfigError(
                f"{self.url} does not tell which weights sampled a token, and requests were kept "
                "while weights changed",
                hints=["vLLM 0.32.0 tells it; or: engine.kwargs.interrupt=abort"],
            )
        return reply

    async def _without_adapter(self, refused: RefusedError, adapter: str) -> RefusedError:
        """Return the error for an adapter that the server does not serve."""
        served = [str(row["id"]) for row in (await self.get("/v1/models"))["data"]]
        return RefusedError(
            f"{self.url} does not serve the adapter {adapter!r}: {refused.message}",
            status=refused.status,
            hints=(
                f"it serves: {', '.join(served)}",
                "trainer.weight_sync=lora publishes adapters",
            ),
        )

    async def score(
        self, token_ids: Sequence[int], *, adapter: str | None, timeout_s: float
    ) -> list[float]:
        """Return the log-probabilities of `token_ids[1:]`, fewer than the context, at temp. 1."""
        body = score_body(token_ids, 0, adapter)
        return read_scores(await self._post_score(body, timeout_s), body["token_ids"])

    async def score_top(self, request: ScoreRequest, *, timeout_s: float) -> TopTokens:
        """Return the likeliest tokens in the places of a request at temperature 1.

        Raises:
            ConfigError: the server lists fewer tokens.
        """
        require_listed(self.url, self._max_logprobs, request.top_k)
        body = score_body(request.token_ids, request.top_k, request.adapter)
        return read_top(await self._post_score(body, timeout_s), request)

    async def _post_score(self, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        async with self._lone.scores():
            return await self.post_often(GENERATE, body, timeout_s=timeout_s)

    async def abort(self, request_id: str) -> None:
        """Do nothing: the server ends a request whose connection is closed."""

    async def abort_all(self) -> None:
        """Ask for all requests back, with the tokens that they have."""
        await self.post("/abort_requests", {}, timeout_s=PAUSE_S)

    async def abort_and_pause(self) -> None:
        """Get all requests back, and hold new ones until `resume`; caches are cleared."""
        await self.post("/pause?mode=abort&clear_cache=true", {}, timeout_s=PAUSE_S)

    async def set_aside(self) -> None:
        """Let requests wait in the server until `resume`; caches are cleared."""
        self._num_set_aside += 1
        await self.post("/pause?mode=keep&clear_cache=true", {}, timeout_s=PAUSE_S)

    async def resume(self) -> None:
        """Go on after `set_aside` or `abort_and_pause`."""
        await self.post("/resume", {}, timeout_s=PAUSE_S)

    # ---- weights ------------------------------------------------------------------------------

    async def _load(self, directory: str, version: str) -> None:
        """Load a checkpoint; a server that refuses keeps its weights.

        After any other failure the server reports `BROKEN_WEIGHTS`: its model is incomplete.
        """
        try:
            answers = await self._call_workers(
                "load_weights_from", timeout_s=DISK_S, directory=directory
            )
        except EngineError:
            await self.set_version(BROKEN_WEIGHTS)
            raise
        reasons = [row["refused"] for row in answers if "refused" in row]
        if len(reasons) not in (0, len(answers)):  # workers see different files
            await self.set_version(BROKEN_WEIGHTS)
        if reasons:
            message = f"{self.url} refused the weights in {directory}: {reasons[0]}"
            raise RefusedError(message, status=400)
        await self.set_version(version)

    async def _load_adapter(self, name: str, directory: Path) -> None:
        """Load a LoRA adapter, in place of an earlier one of that name."""
        body = {"lora_name": name, "lora_path": str(directory), "load_inplace": True}
        try:
            self._require_rank(directory)
            await self._post_to_workers("/v1/load_lora_adapter", body, timeout_s=ADAPTER_S)
        except RefusedError as refused:
            flags = "--enable-lora --max-lora-rank RANK --max-loras 2"
            raise RefusedError(
                refused.message,
                status=refused.status,
                hints=(
                    f"servers take adapters of at most RANK with: {flags}",
                    f"and with {' '.join(f'{k}={v}' for k, v in RECIPE.environment.items())}",
                ),
            ) from None

    def _require_rank(self, adapter: Path) -> None:
        """Refuse an adapter whose rank is too high, in the server's words, before it is sent."""
        file, limit = adapter / "adapter_config.json", self._max_lora_rank
        if limit is None or not file.is_file():
            return
        rank = read_json(file).get("r")
        if isinstance(rank, int) and rank > limit:
            message = f"LoRA rank {rank} is greater than max_lora_rank {limit}"
            raise RefusedError(f"{self.url} refused {adapter}: {message}", status=400)

    async def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter; requests that name it are sent back.

        A worker would load it again for a request that is still there, and ends when its files
        have gone. So nothing runs meanwhile, and what has come meanwhile is sent back, too.
        """
        await self.abort_and_pause()
        try:
            body = {"lora_name": name}
            await self.post("/v1/unload_lora_adapter", body, timeout_s=ADAPTER_S)
            await self.abort_and_pause()
        finally:
            await self.resume()

    async def begin_update(self) -> None:
        """Begin to take tensors.

        Raises:
            ConfigError: the server was started for another way.
        """
        loader = (await self._call_workers("describe_weight_loader"))[0]
        if loader.get("backend") != _BACKEND:
            raise ConfigError(
                f"{self.url} takes tensors by {loader.get('backend') or 'no backend'}",
                hints=[f"start it so: {self.start_command}", "trainer.weight_sync=disk"],
            )
        await self.post("/start_weight_update", {}, timeout_s=ADAPTER_S)

    async def end_update(self, version: int) -> None:
        """End `begin_update`: all tensors of `version` have come."""
        try:
            body = {"weight_version": str(version)}
            await self.post("/finish_weight_update", body, timeout_s=ADAPTER_S)
        except EngineError:
            await self.set_version(BROKEN_WEIGHTS)
            raise

    # ---- memory -------------------------------------------------------------------------------

    async def _release_memory(self, tags: Sequence[str]) -> None:
        """Release the memory of `tags`; requests have been set aside."""
        if WEIGHTS in tags:
            await self._post_to_workers("/sleep?level=2&mode=keep", {}, timeout_s=MEMORY_S)
        elif not self._is_on_cpu:
            await self._post_to_workers("/release_kv_cache_memory", {}, timeout_s=MEMORY_S)

    async def _take_memory(self, tags: Sequence[str]) -> None:
        """Take the memory of `tags` again."""
        if tags:
            query = "&".join(f"tags={tag}" for tag in tags)
            await self.post(f"/wake_up?{query}", {}, timeout_s=MEMORY_S)

    async def _call_workers(
        self, method: str, *, timeout_s: float = QUICK_S, **arguments: Any
    ) -> list[dict[str, Any]]:
        """Run a method of the worker extension in all workers; return what each answers."""
        body = {"method": method, "kwargs": arguments, "timeout": timeout_s}
        answer = await self._post_to_workers("/collective_rpc", body, timeout_s=timeout_s + QUICK_S)
        results = answer.get("results")
        if not results or not all(isinstance(row, dict) for row in results):
            raise EngineError(f"{self.url}: {method} answered {str(results)[:200]}")
        return list(results)

    async def _post_to_workers(
        self, route: str, body: dict[str, Any], *, timeout_s: float
    ) -> dict[str, Any]:
        """Send a POST request that all workers carry out.

        Where one of several workers fails, vLLM 0.32.0 does not read what the others answer, and
        takes it for the answer to the next request, and so on: only a restart helps. The server
        reports `BROKEN_WEIGHTS` until then.

        Raises:
            EngineError: one of several workers failed.
            RefusedError: the server refuses, or its only worker failed.
        """
        try:
            return await self.post(route, body, timeout_s=timeout_s)
        except RefusedError as refused:
            if refused.status != _WORKER_FAILED or self.num_ranks == 1:
                raise
            await self.set_version(BROKEN_WEIGHTS)
            raise EngineError(
                f"{refused.message}; a server of several workers must be restarted after it"
            ) from None
