"""The control routes of the fake SGLang server that change weights.

Received tensors are decoded as SGLang decodes them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field

from areal_gym.engines.server_requests import Name, Request, read_request
from areal_gym.engines.servers.fake_server import FakeServer
from areal_gym.engines.servers.fake_tensors import read_weights, receive, unpacked
from areal_gym.errors import EngineError
from areal_gym.utils.http_servers.aiohttp_site import Handler


class _OnDisk(Request):
    model_path: Name
    weight_version: Name | None = None


class _Serialized(Request):
    serialized_named_tensors: Annotated[list[str], Field(min_length=1)]
    load_format: str | None = None
    weight_version: Name | None = None


class _Group(Request):
    group_name: Name


class _NewGroup(_Group):
    master_address: Annotated[str, Field(min_length=1, max_length=255)]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=0, lt=2**15)]
    world_size: Annotated[int, Field(ge=1, lt=2**15)]
    backend: str


class _Broadcast(_Group):
    names: list[Name]
    dtypes: list[str]
    shapes: list[list[Annotated[int, Field(ge=0, lt=2**40)]]]
    load_format: str | None = None
    weight_version: Name | None = None


class _NewVersion(Request):
    new_version: Name


class _Adapter(Request):
    lora_name: Name


class _NewAdapter(_Adapter):
    lora_path: Name


class _RefusedError(Exception):
    """A route refuses, with SGLang's message."""


class FakeWeights(FakeServer):
    """A `FakeServer` with SGLang's routes that change weights."""

    has_update_sessions = True
    """Whether tensors must be sent between a begin and an end."""
    _is_in_session = False

    def forget_weights(self) -> None:
        """Return to the weights of `model_path`."""
        super().forget_weights()
        self._is_in_session = False
        self._groups: dict[str, Any] = {}

    def _routes(self) -> list[tuple[str, str, Handler]]:
        rows: list[tuple[str, Callable[[Any], Awaitable[_Answer]], type[Request]]] = [
            ("/update_weights_from_disk", self._from_disk, _OnDisk),
            ("/update_weights_from_tensor", self._from_tensor, _Serialized),
            ("/init_weights_update_group", self._init_group, _NewGroup),
            ("/update_weights_from_distributed", self._from_distributed, _Broadcast),
            ("/destroy_weights_update_group", self._destroy_group, _Group),
            ("/update_weight_version", self._update_version, _NewVersion),
            ("/weights_checker", self._check, Request),
            ("/load_lora_adapter", self._load_adapter, _NewAdapter),
            ("/unload_lora_adapter", self._unload_adapter, _Adapter),
        ]
        if self.has_update_sessions:
            rows.append(("/begin_weight_update", self._begin, Request))
            rows.append(("/end_weight_update", self._end, Request))
        weights = [("POST", path, _handler(answer, body)) for path, answer, body in rows]
        return [*super()._routes(), *weights]

    async def _from_disk(self, body: _OnDisk) -> _Answer:
        from safetensors import SafetensorError

        directory = Path(body.model_path)
        with _refusing("Failed to get weights iterator", OSError, SafetensorError):
            tensors = await asyncio.to_thread(read_weights, directory)
            if not tensors:
                raise OSError(f"no weights in {body.model_path!r}")
        return await self._load(tensors, body.weight_version, "Succeeded to update model weights.")

    async def _from_tensor(self, body: _Serialized) -> _Answer:
        self._require_session("update_weights_from_tensor")
        # Unpickling untrusted bytes may raise anything.
        with _refusing("Failed to read the tensors", Exception):
            tensors = unpacked(body.serialized_named_tensors[0], body.load_format)
        return await self._load(tensors, body.weight_version, "Success")

    async def _init_group(self, body: _NewGroup) -> _Answer:
        from areal_gym.models.process_groups import join_group

        failures = (OSError, RuntimeError, ValueError)
        with _refusing("Failed to initialize custom process group", *failures):
            self._groups[body.group_name] = await asyncio.to_thread(
                join_group,
                body.master_address,
                body.master_port,
                rank=body.rank_offset,
                world_size=body.world_size,
                name=body.group_name,
                backend=body.backend,
                timeout_s=60,
            )
        return "Succeeded to initialize custom process group."

    async def _from_distributed(self, body: _Broadcast) -> _Answer:
        self._require_session("update_weights_from_distributed")
        group = self._groups.get(body.group_name)
        if group is None:
            raise _RefusedError(f"Group {body.group_name} not in {list(self._groups)}.")
        failures = (AttributeError, RuntimeError, TypeError, ValueError)
        with _refusing("Failed to receive the tensors", *failures):
            facts = (body.names, body.dtypes, body.shapes, body.load_format)
            tensors = await asyncio.to_thread(receive, group, *facts)
        message = "Succeeded to update parameter online."
        return await self._load(tensors, body.weight_version, message)

    async def _destroy_group(self, body: _Group) -> _Answer:
        import torch.distributed as dist

        group = self._groups.pop(body.group_name, None)
        if group is None:
            raise _RefusedError("The group to be destroyed does not exist.")
        await asyncio.to_thread(dist.destroy_process_group, group)
        return "Succeeded to destroy custom process group."

    async def _begin(self, body: Request) -> _Answer:
        self._is_in_session = True
        return "Success"

    async def _end(self, body: Request) -> _Answer:
        if not self._is_in_session:
            raise _RefusedError("end_weight_update() without begin_weight_update()")
        self._is_in_session = False
        return "Success"

    async def _update_version(self, body: _NewVersion) -> _Answer:
        self.version = body.new_version
        message = f"Weight version updated to {body.new_version}"
        return {"success": True, "message": message, "new_version": body.new_version}

    async def _check(self, body: Request) -> _Answer:
        """Return a checksum of each tensor that the server received."""
        sums = {
            name: hashlib.sha256(tensor.contiguous().float().numpy().tobytes()).hexdigest()[:16]
            for name, tensor in self._weights.items()
        }
        return {"success": True, "message": "Success", "ranks": [{"checksums": sums}]}

    async def _load_adapter(self, body: _NewAdapter) -> _Answer:
        name, path = body.lora_name, Path(body.lora_path)
        if name in self._adapters:
            return self._adapters_now(f"LoRA adapter {name} is already loaded.")
        try:
            await self.load_adapter(name, path)
        except Exception as error:  # untrusted files
            return self._adapters_now(f"{path} cannot be read: {error!r}")
        return self._adapters_now()

    async def _unload_adapter(self, body: _Adapter) -> _Answer:
        name = body.lora_name
        if self._adapters.pop(name, None) is None:
            return self._adapters_now(f"LoRA adapter {name} is not loaded.")
        async with self._changed:  # no new request gets it, but running ones keep it
            await self._changed.wait_for(lambda: not self._num_users[name])
        return self._adapters_now()

    def _adapters_now(self, error: str = "") -> _Answer:
        loaded = {name: str(adapter.path) for name, adapter in self._adapters.items()}
        return {"success": not error, "error_message": error, "loaded_adapters": loaded}

    async def _load(self, tensors: dict[str, Any], version: str | None, message: str) -> _Answer:
        failures = (EngineError, AttributeError, RuntimeError, TypeError, ValueError)
        with _refusing("Failed to update weights", *failures):
            await self.load(tensors, version)
        return message + (f" Weight version updated to {version}." if version is not None else "")

    def _require_session(self, route: str) -> None:
        if self.has_update_sessions and not self._is_in_session:
            between = "must run between begin_weight_update() and end_weight_update()"
            raise _RefusedError(f"{route} {between}")


_Answer = str | dict[str, Any]
"""The message of a success, or a whole response body."""


def _handler(answer: Callable[[Any], Awaitable[_Answer]], model: type[Request]) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        try:
            reply = await answer(await read_request(model, request))
        except _RefusedError as refused:
            reply = {"success": False, "message": str(refused)}
        body = {"success": True, "message": reply} if isinstance(reply, str) else reply
        return web.json_response(body, status=200 if body["success"] else 400)

    return handle


@contextmanager
def _refusing(problem: str, *error_types: type[Exception]) -> Iterator[None]:
    try:
        yield
    except error_types as error:
        raise _RefusedError(f"{problem}: {error}.") from None
