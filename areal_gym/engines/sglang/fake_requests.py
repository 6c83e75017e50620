"""Bodies that the fake SGLang server takes, checked before anything is done with them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from areal_gym.errors import EngineError
from areal_gym.utils.http_servers.aiohttp_site import RequestBodyError, parse_json, read_body

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Rid = Annotated[str, Field(max_length=1024)]
Name = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]


class Request(BaseModel):
    """Fields that are not here change nothing."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Sampling(Request):
    """How to sample, in SGLang's words."""

    model_config = ConfigDict(extra="allow")

    max_new_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    stop_token_ids: list[TokenId] | None = None
    sampling_seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    ignore_eos: bool | None = None

    def given(self) -> dict[str, Any]:
        """Returns the fields that the client has sent a value for."""
        return {name: value for name, value in self if value is not None}


class GenerateRequest(Request):
    """`/generate`."""

    input_ids: list[list[TokenId]] | list[TokenId] | None = None
    sampling_params: Sampling | None = None
    rid: Rid | list[Rid] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    lora_path: Name | None = None


class AbortRequest(Request):
    """`/abort_request`."""

    rid: str | None = None
    abort_all: bool | None = None


class PauseGeneration(Request):
    """`/pause_generation`."""

    mode: Literal["abort", "in_place", "retract"] = "abort"


class WeightsOnDisk(Request):
    """`/update_weights_from_disk`."""

    model_path: Name
    weight_version: Name | None = None


class SerializedTensors(Request):
    """`/update_weights_from_tensor`."""

    serialized_named_tensors: Annotated[list[str], Field(min_length=1)]
    load_format: str | None = None
    weight_version: Name | None = None


class InitGroup(Request):
    """`/init_weights_update_group`."""

    master_address: Annotated[str, Field(min_length=1, max_length=255)]
    master_port: Annotated[int, Field(ge=1, le=65535)]
    rank_offset: Annotated[int, Field(ge=0, lt=2**15)]
    world_size: Annotated[int, Field(ge=1, lt=2**15)]
    group_name: Name
    backend: str


class DistributedTensors(Request):
    """`/update_weights_from_distributed`."""

    names: list[Name]
    dtypes: list[str]
    shapes: list[list[Annotated[int, Field(ge=0, lt=2**40)]]]
    group_name: Name
    weight_version: Name | None = None


class DestroyGroup(Request):
    """`/destroy_weights_update_group`."""

    group_name: Name


class NewVersion(Request):
    """`/update_weight_version`."""

    new_version: Name


class LoadAdapter(Request):
    """`/load_lora_adapter`."""

    lora_name: Name
    lora_path: Name


class UnloadAdapter(Request):
    """`/unload_lora_adapter`."""

    lora_name: Name


R = TypeVar("R", bound=Request)


async def read_request(model: type[R], request: web.Request) -> R:
    """Returns what a client asks for.

    Raises:
        RequestBodyError: the body is not what the route takes.
    """
    body = parse_json(await read_body(request) or b"{}")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise RequestBodyError(f"{place}: {problem['msg']}" if place else problem["msg"]) from None


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answers what cannot be served in SGLang's shape."""
    message: Any
    try:
        return await handler(request)
    except RequestBodyError as error:
        status, message = error.status, error.message
    except EngineError as error:
        status, message = 500, str(error)
    except web.HTTPException as error:
        status, message = error.status, f"{request.method} {request.path}: {error.reason}"
    return web.json_response({"error": {"message": message}}, status=status)
