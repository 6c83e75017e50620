"""Request bodies of the fake vLLM server, validated before use."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from areal_gym.engines.server_requests import Name, Request, TokenId


class SamplingBody(Request):
    """vLLM's sampling parameters; unknown ones are ignored."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31)] = 0
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    structured_outputs: dict[str, Any] | None = None
    logit_bias: dict[str, float] | None = None


class ImageBody(Request):
    """An image of a prompt."""

    type: Literal["image_url"]
    url: str


class GenerateBody(Request):
    """The body of `/inference/v1/generate`."""

    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: SamplingBody = SamplingBody()
    content_parts: list[ImageBody] = Field(default_factory=list)
    return_token_ids: bool = False
    request_id: Name | None = None
    model: Name | None = None


class AbortBody(Request):
    """The body of `/abort_requests`."""

    request_ids: list[Name] | None = None


class VersionBody(Request):
    """The body of `/update_weight_version`."""

    new_version: Name


class FinishedUpdateBody(Request):
    """The body of `/finish_weight_update`."""

    weight_version: Name | None = None


class AdapterBody(Request):
    """The body of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

    lora_name: Name
    lora_path: Name = ""
    load_inplace: bool = False
