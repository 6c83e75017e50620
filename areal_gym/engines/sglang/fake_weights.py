"""The control routes of the fake SGLang server that change weights: they really do.

What arrives is decoded as SGLang decodes it and put into the engine behind the server, which must
be one in this process (`LocalEngine`).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from areal_gym.engines.base import LocalEngine
from areal_gym.engines.sglang.fake_requests import (
    DestroyGroup,
    DistributedTensors,
    InitGroup,
    LoadAdapter,
    NewVersion,
    SerializedTensors,
    UnloadAdapter,
    WeightsOnDisk,
    read_request,
)
from areal_gym.errors import EngineError

if TYPE_CHECKING:
    from areal_gym.engines.sglang.fake import FakeSGLangServer

_NO_SESSION = "must run between begin_weight_update() and end_weight_update()"


def add_weight_routes(app: web.Application, server: FakeSGLangServer) -> WeightRoutes:
    """Add the routes that change what `server` serves."""
    routes = WeightRoutes(server)
    for route, handler in (
        ("/update_weights_from_disk", routes.from_disk),
        ("/update_weights_from_tensor", routes.from_tensor),
        ("/init_weights_update_group", routes.init_group),
        ("/update_weights_from_distributed", routes.from_distributed),
        ("/destroy_weights_update_group", routes.destroy_group),
        ("/update_weight_version", routes.update_version),
        ("/weights_checker", routes.check),
        ("/load_lora_adapter", routes.load_adapter),
        ("/unload_lora_adapter", routes.unload_adapter),
    ):
        app.router.add_post(route, handler)
    if server.has_update_sessions:
        app.router.add_post("/begin_weight_update", routes.begin)
        app.router.add_post("/end_weight_update", routes.end)
    return routes


class WeightRoutes:
    """What arrives at those routes, and what becomes of it.

    Adapters are merged into the weights when a request asks for one, so that all requests that are
    sampled at the same time use the same adapter, or none.
    """

    def __init__(self, server: FakeSGLangServer) -> None:
        self._server = server
        self._weights: dict[str, Any] = {}
        """What has arrived so far: a server loads tensors by name, in any number of parts."""
        self._groups: dict[str, Any] = {}
        self._num_published = 0
        self._adapters: dict[str, Path] = {}
        self._adapter: str | None = None
        """The one that is merged into what the engine has."""

    async def from_disk(self, request: web.Request) -> web.Response:
        """Load a checkpoint directory."""
        body = await read_request(WeightsOnDisk, request)
        from safetensors import SafetensorError

        try:
            tensors = await asyncio.to_thread(_read_weights, Path(body.model_path))
        except (OSError, SafetensorError) as error:
            return _said(f"Failed to get weights iterator: {error}.", success=False)
        if not tensors:
            reason = f"no weights in {body.model_path!r}"
            return _said(f"Failed to get weights iterator: {reason}.", success=False)
        return await self._load(tensors, body.weight_version, "Succeeded to update model weights.")

    async def from_tensor(self, request: web.Request) -> web.Response:
        """Load tensors that the body holds."""
        body = await read_request(SerializedTensors, request)
        if refusal := self._out_of_session("update_weights_from_tensor"):
            return refusal
        try:
            tensors = _unpacked(body)
        except Exception as error:  # bytes of anybody: whatever unpickling them raises
            return _said(f"Failed to read the tensors: {error!r}.", success=False)
        return await self._load(tensors, body.weight_version, "Success")

    async def init_group(self, request: web.Request) -> web.Response:
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
            return _said(f"Failed to initialize custom process group: {error}.", success=False)
        self._groups[body.group_name] = group
        return _said("Succeeded to initialize custom process group.")

    async def from_distributed(self, request: web.Request) -> web.Response:
        """Load what rank 0 of the group broadcasts."""
        body = await read_request(DistributedTensors, request)
        if refusal := self._out_of_session("update_weights_from_distributed"):
            return refusal
        group = self._groups.get(body.group_name)
        if group is None:
            return _said(f"Group {body.group_name} not in {list(self._groups)}.", success=False)
        try:
            tensors = await asyncio.to_thread(_receive, group, body)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            return _said(f"Failed to receive the tensors: {error}.", success=False)
        return await self._load(
            tensors, body.weight_version, "Succeeded to update parameter online."
        )

    async def destroy_group(self, request: web.Request) -> web.Response:
        """Leave the group."""
        import torch.distributed as dist

        body = await read_request(DestroyGroup, request)
        group = self._groups.pop(body.group_name, None)
        if group is None:
            return _said("The group to be destroyed does not exist.", success=False)
        await asyncio.to_thread(dist.destroy_process_group, group)
        return _said("Succeeded to destroy custom process group.")

    async def begin(self, request: web.Request) -> web.Response:
        """Tensors may come from now on."""
        self._server.update_session = True
        return _said("Success")

    async def end(self, request: web.Request) -> web.Response:
        """No more tensors come."""
        if not self._server.update_session:
            return _said("end_weight_update() without begin_weight_update()", success=False)
        self._server.update_session = False
        return _said("Success")

    async def update_version(self, request: web.Request) -> web.Response:
        """Call the weights something else."""
        body = await read_request(NewVersion, request)
        self._server.version = body.new_version
        return web.json_response(
            {
                "success": True,
                "message": f"Weight version updated to {body.new_version}",
                "new_version": body.new_version,
            }
        )

    async def check(self, request: web.Request) -> web.Response:
        """The action "checksum": a digest of each tensor that the server was given."""
        sums = {
            name: hashlib.sha256(tensor.contiguous().float().numpy().tobytes()).hexdigest()[:16]
            for name, tensor in self._weights.items()
        }
        return web.json_response(
            {"success": True, "message": "Success", "ranks": [{"checksums": sums}]}
        )

    async def load_adapter(self, request: web.Request) -> web.Response:
        """Remember an adapter's directory under a name."""
        body = await read_request(LoadAdapter, request)
        name, path = body.lora_name, Path(body.lora_path)
        if name in self._adapters:
            return self._adapters_now(f"LoRA adapter {name} is already loaded.")
        if not _is_file(path / "adapter_config.json"):
            return self._adapters_now(f"no adapter_config.json in {path}")
        self._adapters[name] = path
        return self._adapters_now()

    async def unload_adapter(self, request: web.Request) -> web.Response:
        """Forget it."""
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
        async with self._server.quiet():
            if name != self._adapter:
                weights = self._base()
                if name is not None:
                    try:
                        weights = _merged(weights, self._adapters[name])
                    except Exception as error:  # files of anybody
                        raise ValueError(f"the adapter {name} cannot be used: {error!r}") from None
                await self._publish(weights)
                self._adapter = name

    async def score(self, token_ids: list[int]) -> list[float]:
        """Log-probabilities of `token_ids[1:]`, each given those before it, at temperature 1."""
        return await asyncio.to_thread(self._score, token_ids)

    def _score(self, token_ids: list[int]) -> list[float]:
        import torch

        from areal_gym.models.tiny import causal_attend, load_checkpoint

        decoder = load_checkpoint(Path(self._server.model_path))
        decoder.load_state_dict(self._base())
        ids = torch.tensor(token_ids)
        with torch.no_grad():
            hidden = decoder(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
            logprobs = decoder.logits(hidden).log_softmax(-1)
        found: list[float] = logprobs[:-1].gather(1, ids[1:, None])[:, 0].tolist()
        return found

    def _base(self) -> dict[str, Any]:
        """The weights without any adapter."""
        if not self._weights:
            self._weights = _read_weights(Path(self._server.model_path))
        return self._weights

    async def _publish(self, tensors: dict[str, Any]) -> None:
        engine = self._server.engine
        if not isinstance(engine, LocalEngine):
            raise EngineError("the engine behind this server takes no weights")
        self._num_published += 1
        await engine.publish(tensors.items(), self._num_published)

    async def _load(
        self, tensors: dict[str, Any], version: str | None, message: str
    ) -> web.Response:
        complete = {**self._weights, **tensors}
        async with self._server.quiet():
            try:
                await self._publish(complete)
            except (EngineError, AttributeError, RuntimeError, TypeError, ValueError) as error:
                return _said(f"Failed to update weights: {error}.", success=False)
            self._weights, self._adapter = complete, None
            if version is not None:
                self._server.version = version
                message += f" Weight version updated to {version}."
        return _said(message)

    def _out_of_session(self, what: str) -> web.Response | None:
        if self._server.has_update_sessions and not self._server.update_session:
            return _said(f"{what} {_NO_SESSION}", success=False)
        return None


def _said(message: str, *, success: bool = True) -> web.Response:
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
    except OSError:  # a name that is too long, a directory that is closed to us
        return False


def _merged(weights: dict[str, Any], adapter: Path) -> dict[str, Any]:
    """W + alpha / r * B A of each adapted matrix (Hu et al. 2021, section 4.1)."""
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
    """Takes tensors and plain data, and no code: as strict as SGLang's, where it matters."""

    _ALLOWED = (
        ("collections", "OrderedDict"),
        ("types", "SimpleNamespace"),
        ("torch", "Size"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch.storage", "UntypedStorage"),
    )

    def find_class(self, module: str, name: str) -> Any:
        """Import what is allowed."""
        import torch

        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _storage_from_bytes
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        raise ValueError(f"{module}.{name} is not allowed in serialized tensors")


def _storage_from_bytes(raw: bytes) -> Any:
    """Does what `torch.storage._load_from_bytes` does, which would unpickle anything."""
    import torch

    return torch.load(io.BytesIO(raw), weights_only=True)


def _unpacked(body: SerializedTensors) -> dict[str, Any]:
    """Returns tensors by name."""
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
