"""The control routes of the fake SGLang server that change weights.

Received tensors are decoded as SGLang decodes them and loaded into the engine behind the server,
which must be in this process (`LocalEngine`).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import pickle
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from aiohttp import web

from areal_gym.engines.base import Engine, LocalEngine
from areal_gym.engines.server_requests import read_request
from areal_gym.engines.sglang.fake_requests import (
    DestroyGroup,
    DistributedTensors,
    InitGroup,
    LoadAdapter,
    NewVersion,
    SerializedTensors,
    UnloadAdapter,
    WeightsOnDisk,
)
from areal_gym.engines.sglang.replies import INITIAL_WEIGHTS
from areal_gym.errors import EngineError
from areal_gym.utils.http_servers.aiohttp_site import Handler

_NO_SESSION = "must run between begin_weight_update() and end_weight_update()"


class FakeWeights:
    """The weights of a fake server, and the routes that change them.

    Adapters are merged into the weights when a request asks for one, so that all requests that are
    sampled at the same time use the same adapter, or none.

    Args:
        engine: takes the weights.
        policy: the checkpoint directory whose weights the engine began with.
        quiet: a context in which nothing is sampled.
        has_update_sessions: whether tensors must come between a begin and an end.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Path,
        *,
        quiet: Callable[[], AbstractAsyncContextManager[None]],
        has_update_sessions: bool,
    ) -> None:
        self.version = INITIAL_WEIGHTS
        """The server's name for the weights."""
        self._engine = engine
        self._policy = policy
        self._quiet = quiet
        self._has_update_sessions = has_update_sessions
        self._is_in_session = False
        self._weights: dict[str, Any] = {}
        """Tensors received so far: a server loads them by name, in any number of parts."""
        self._groups: dict[str, Any] = {}
        self._num_published = 0
        self._adapters: dict[str, Path] = {}
        self._adapter: str | None = None
        """The adapter that is merged into the engine's weights."""

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Return the method, path and handler of each route."""
        handlers: dict[str, Handler] = {
            "/update_weights_from_disk": self._from_disk,
            "/update_weights_from_tensor": self._from_tensor,
            "/init_weights_update_group": self._init_group,
            "/update_weights_from_distributed": self._from_distributed,
            "/destroy_weights_update_group": self._destroy_group,
            "/update_weight_version": self._update_version,
            "/weights_checker": self._check,
            "/load_lora_adapter": self._load_adapter,
            "/unload_lora_adapter": self._unload_adapter,
        }
        if self._has_update_sessions:
            handlers["/begin_weight_update"] = self._begin
            handlers["/end_weight_update"] = self._end
        return [("POST", path, handler) for path, handler in handlers.items()]

    async def _from_disk(self, request: web.Request) -> web.Response:
        """Load a checkpoint directory."""
        body = await read_request(WeightsOnDisk, request)
        from safetensors import SafetensorError

        try:
            tensors = await asyncio.to_thread(_read_weights, Path(body.model_path))
        except (OSError, SafetensorError) as error:
            return _result(f"Failed to get weights iterator: {error}.", success=False)
        if not tensors:
            reason = f"no weights in {body.model_path!r}"
            return _result(f"Failed to get weights iterator: {reason}.", success=False)
        return await self._load(tensors, body.weight_version, "Succeeded to update model weights.")

    async def _from_tensor(self, request: web.Request) -> web.Response:
        """Load the tensors in the body."""
        body = await read_request(SerializedTensors, request)
        if refusal := self._out_of_session("update_weights_from_tensor"):
            return refusal
        try:
            tensors = _unpacked(body)
        except Exception as error:  # untrusted bytes: unpickling may raise anything
            return _result(f"Failed to read the tensors: {error!r}.", success=False)
        return await self._load(tensors, body.weight_version, "Success")

    async def _init_group(self, request: web.Request) -> web.Response:
        """Join a process group."""
        from areal_gym.models.process_groups import join_group

        body = await read_request(InitGroup, request)
        try:
            group = await asyncio.to_thread(
                join_group,
                body.master_address,
                body.master_port,
                rank=body.rank_offset,
                world_size=body.world_size,
                name=body.group_name,
                backend=body.backend,
                timeout_s=60,
            )
        except (OSError, RuntimeError, ValueError) as error:
            return _result(f"Failed to initialize custom process group: {error}.", success=False)
        self._groups[body.group_name] = group
        return _result("Succeeded to initialize custom process group.")

    async def _from_distributed(self, request: web.Request) -> web.Response:
        """Load the tensors that rank 0 of the group broadcasts."""
        body = await read_request(DistributedTensors, request)
        if refusal := self._out_of_session("update_weights_from_distributed"):
            return refusal
        group = self._groups.get(body.group_name)
        if group is None:
            return _result(f"Group {body.group_name} not in {list(self._groups)}.", success=False)
        try:
            tensors = await asyncio.to_thread(_receive, group, body)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            return _result(f"Failed to receive the tensors: {error}.", success=False)
        return await self._load(
            tensors, body.weight_version, "Succeeded to update parameter online."
        )

    async def _destroy_group(self, request: web.Request) -> web.Response:
        """Leave a process group."""
        import torch.distributed as dist

        body = await read_request(DestroyGroup, request)
        group = self._groups.pop(body.group_name, None)
        if group is None:
            return _result("The group to be destroyed does not exist.", success=False)
        await asyncio.to_thread(dist.destroy_process_group, group)
        return _result("Succeeded to destroy custom process group.")

    async def _begin(self, request: web.Request) -> web.Response:
        """Open an update session: tensors may come from now on."""
        self._is_in_session = True
        return _result("Success")

    async def _end(self, request: web.Request) -> web.Response:
        """Close the update session."""
        if not self._is_in_session:
            return _result("end_weight_update() without begin_weight_update()", success=False)
        self._is_in_session = False
        return _result("Success")

    async def _update_version(self, request: web.Request) -> web.Response:
        """Rename the weights."""
        body = await read_request(NewVersion, request)
        self.version = body.new_version
        return web.json_response(
            {
                "success": True,
                "message": f"Weight version updated to {body.new_version}",
                "new_version": body.new_version,
            }
        )

    async def _check(self, request: web.Request) -> web.Response:
        """Return a checksum of each tensor that the server received."""
        sums = {
            name: hashlib.sha256(tensor.contiguous().float().numpy().tobytes()).hexdigest()[:16]
            for name, tensor in self._weights.items()
        }
        return web.json_response(
            {"success": True, "message": "Success", "ranks": [{"checksums": sums}]}
        )

    async def _load_adapter(self, request: web.Request) -> web.Response:
        """Remember an adapter's directory under a name."""
        body = await read_request(LoadAdapter, request)
        name, path = body.lora_name, Path(body.lora_path)
        if name in self._adapters:
            return self._adapters_now(f"LoRA adapter {name} is already loaded.")
        if not _is_file(path / "adapter_config.json"):
            return self._adapters_now(f"no adapter_config.json in {path}")
        self._adapters[name] = path
        return self._adapters_now()

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        """Forget an adapter."""
        name = (await read_request(UnloadAdapter, request)).lora_name
        if name not in self._adapters:
            return self._adapters_now(f"LoRA adapter {name} is not loaded.")
        del self._adapters[name]
        return self._adapters_now()

    def _adapters_now(self, error: str = "") -> web.Response:
        loaded = {name: str(path) for name, path in self._adapters.items()}
        body = {"success": not error, "error_message": error, "loaded_adapters": loaded}
        return web.json_response(body, status=400 if error else 200)

    async def use_adapter(self, name: str | None) -> None:
        """Sample with this adapter from now on.

        Raises:
            ValueError: no adapter of this name was loaded.
        """
        if name == self._adapter:
            return
        if name is not None and name not in self._adapters:
            raise ValueError(f"Got LoRA adapter that has never been loaded: {name}")
        async with self._quiet():
            if name != self._adapter:
                weights = self._base()
                if name is not None:
                    try:
                        weights = _merged(weights, self._adapters[name])
                    except Exception as error:  # untrusted files
                        raise ValueError(f"the adapter {name} cannot be used: {error!r}") from None
                await self._publish(weights)
                self._adapter = name

    async def score(self, token_ids: list[int]) -> list[float]:
        """Return the log-probabilities of `token_ids[1:]` at temperature 1."""
        return await asyncio.to_thread(self._score, token_ids)

    def _score(self, token_ids: list[int]) -> list[float]:
        import torch

        from areal_gym.models.tiny import causal_attend, load_checkpoint

        decoder = load_checkpoint(self._policy)
        decoder.load_state_dict(self._base())
        ids = torch.tensor(token_ids)
        with torch.no_grad():
            hidden = decoder.hidden_states(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
            logprobs = decoder.logits(hidden).log_softmax(-1)
        scores: list[float] = logprobs[:-1].gather(1, ids[1:, None])[:, 0].tolist()
        return scores

    def _base(self) -> dict[str, Any]:
        """Return the weights without any adapter."""
        if not self._weights:
            self._weights = _read_weights(self._policy)
        return self._weights

    async def _publish(self, tensors: dict[str, Any]) -> None:
        engine = self._engine
        if not isinstance(engine, LocalEngine):
            raise EngineError("the engine behind this server takes no weights")
        self._num_published += 1
        await engine.publish(tensors.items(), self._num_published)

    async def _load(
        self, tensors: dict[str, Any], version: str | None, message: str
    ) -> web.Response:
        complete = {**self._weights, **tensors}
        async with self._quiet():
            try:
                await self._publish(complete)
            except (EngineError, AttributeError, RuntimeError, TypeError, ValueError) as error:
                return _result(f"Failed to update weights: {error}.", success=False)
            self._weights, self._adapter = complete, None
            if version is not None:
                self.version = version
                message += f" Weight version updated to {version}."
        return _result(message)

    def _out_of_session(self, what: str) -> web.Response | None:
        if self._has_update_sessions and not self._is_in_session:
            return _result(f"{what} {_NO_SESSION}", success=False)
        return None


def _result(message: str, *, success: bool = True) -> web.Response:
    body = {"success": success, "message": message}
    return web.json_response(body, status=200 if success else 400)


def _read_weights(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is too long, or the directory is not readable
        return False


def _merged(weights: dict[str, Any], adapter: Path) -> dict[str, Any]:
    """Return W + alpha / r * B A for each adapted matrix (Hu et al. 2021, section 4.1)."""
    parts = _read_weights(adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    merged = dict(weights)
    for key, down in parts.items():
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").replace(".lora_A.", ".")
            up = parts[key.replace(".lora_A.", ".lora_B.")]
            merged[name] = weights[name] + scale * (up @ down)
    return merged


class _Unpickler(pickle.Unpickler):
    """Unpickles tensors and plain data only, never code; as strict as SGLang's."""

    _ALLOWED = (
        ("collections", "OrderedDict"),
        ("types", "SimpleNamespace"),
        ("torch", "Size"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.storage", "UntypedStorage"),
    )

    def find_class(self, module: str, name: str) -> Any:
        """Import an allowed class."""
        import torch

        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage_from_bytes
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        raise ValueError(f"{module}.{name} is not allowed in serialized tensors")


def _storage_from_bytes(raw: bytes) -> Any:
    """Load a storage as `torch.storage._load_from_bytes` does, but never unpickle code."""
    import torch

    return torch.load(io.BytesIO(raw), weights_only=True)


def _unpacked(body: SerializedTensors) -> dict[str, Any]:
    """Return tensors by name."""
    raw = base64.b64decode(body.serialized_named_tensors[0])
    content = _Unpickler(io.BytesIO(raw)).load()
    if body.load_format == "flattened_bucket":
        content = _unflatten(content["flattened_tensor"], content["metadata"])
    return dict(content)


def _unflatten(flat: Any, metadata: list[Any]) -> dict[str, Any]:
    return {
        meta.name: flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
        for meta in metadata
    }


def _receive(group: Any, body: DistributedTensors) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    tensors = {}
    for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True):
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        dist.broadcast(tensors[name], src=0, group=group)
    return tensors
