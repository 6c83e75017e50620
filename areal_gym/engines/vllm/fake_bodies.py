"""Request bodies of the fake vLLM server, validated before use, and the bodies of its answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from areal_gym.engines.server import EngineServer, RunningRequest, version_spans
from areal_gym.engines.server_requests import Name, Request, TokenId
from areal_gym.utils.http_servers.aiohttp_site import RequestBodyError


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
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
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


async def prompt_logprobs(
    server: EngineServer, body: GenerateBody, limit: int
) -> list[dict[str, Any] | None] | None:
    """Return the likeliest tokens of each place and the prompt's own, if they are asked for.

    Raises:
        RequestBodyError: more than `limit` are asked for, or the engine does not score prompts.
    """
    top_k, ids = body.sampling_params.prompt_logprobs, body.token_ids
    if top_k is None:
        return None
    if 0 <= limit < top_k:
        raise RequestBodyError(
            f"Requested prompt logprobs of {top_k}, which is greater than max allowed: {limit}"
        )
    try:
        scorer = server.scorer
    except ValueError as error:
        raise RequestBodyError(str(error)) from None
    rows: list[dict[str, Any] | None] = [None]
    top = await scorer.score_top(ids, max(1, top_k))
    places = zip(*(part[:, :top_k].tolist() for part in top.arrays()), strict=True)
    own = zip(ids[1:], await scorer.score(ids), strict=True)
    for (token, score), place in zip(own, places, strict=True):
        listed = {token: score} | dict(zip(*place, strict=True))
        rows.append({str(id): {"logprob": value} for id, value in listed.items()})
    return rows


def generated(
    running: RunningRequest,
    finish: dict[str, Any],
    body: GenerateBody,
    scores: list[dict[str, Any] | None] | None,
    *,
    has_versions: bool,
) -> dict[str, Any]:
    """Return the answer to a request."""
    matched = finish.get("matched")
    rows = zip(running.token_ids, running.logprobs, strict=True)
    spans = version_spans(running.versions)
    content = [{"token_id": token, "logprob": logprob, "rank": 1} for token, logprob in rows]
    choice = {
        "index": 0,
        "finish_reason": finish["type"],
        "stop_reason": matched if matched in body.sampling_params.stop_token_ids else None,
        "token_ids": running.token_ids,
        **({"weight_versions": spans} if has_versions else {}),
        "logprobs": None if body.sampling_params.logprobs is None else {"content": content},
    }
    return {
        "request_id": running.rid,
        "model": body.model or "policy",
        "choices": [choice],
        "prompt_logprobs": scores,
        **({"prompt_token_ids": running.prompt_ids} if body.return_token_ids else {}),
    }
