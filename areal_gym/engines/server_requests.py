"""Request bodies of `EngineServer`, validated before use, and errors in SGLang's shape."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from areal_gym.errors import EngineError
from areal_gym.utils.http_servers.aiohttp_site import (
    Handler,
    RequestBodyError,
    parse_json,
    read_body,
)

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Rid = Annotated[str, Field(max_length=1024)]
Name = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]


class Request(BaseModel):
    """A JSON body; unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Sampling(Request):
    """SGLang's sampling parameters."""

    model_config = ConfigDict(extra="allow")

    max_new_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    stop_token_ids: list[TokenId] | None = None
    sampling_seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None

    def set_fields(self) -> dict[str, Any]:
        """Return the fields to which the client gave a value."""
        return {name: value for name, value in self if value is not None}


class GenerateRequest(Request):
    """The body of `/generate`."""

    input_ids: list[list[TokenId]] | list[TokenId] | None = None
    sampling_params: Sampling | None = None
    rid: Rid | list[Rid] | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=2**20)] | None = None
    return_flat_raw_top_logprobs_b64: bool | None = None
    lora_path: Name | None = None
    image_data: list[str] | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: Annotated[int, Field(ge=0)] | None = None


R = TypeVar("R", bound=Request)


async def read_request(model: type[R], request: web.Request) -> R:
    """Return the body of `request` as a `model`.

    Raises:
        RequestBodyError: the body does not have the fields that the route takes.
    """
    body = parse_json(await read_body(request) or b"{}")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in problem["loc"])
        raise RequestBodyError(f"{field}: {problem['msg']}" if field else problem["msg"]) from None


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer failed requests with a JSON error in SGLang's shape."""
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
