"""Converts between the engine's types and the bodies of vLLM's `/inference/v1/generate`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scoring import require_shape
from areal_gym.engines.servers.replies import (
    Reply,
    ScoreRequest,
    TurnRequest,
    make_reply,
    shared_sampling_params,
)
from areal_gym.engines.servers.server_pictures import image_urls, without_placeholders
from areal_gym.errors import ConfigError, EngineError
from areal_gym.types import TopTokens
from areal_gym.utils.packed_numbers import Floats, Ints

GENERATE = "/inference/v1/generate"
_SEEDS = 2**62
_MIX = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits spreads neighbouring numbers


def generate_body(request: TurnRequest) -> dict[str, Any]:
    """Return the body of a request for the next tokens of a turn."""
    body: dict[str, Any] = {
        "request_id": request.id,
        "token_ids": request.wire_ids,
        "sampling_params": sampling_params(
            request.params, request.max_new_tokens, num_before=len(request.prompt_ids)
        )
        | without_placeholders(request.banned_ids),
    }
    if request.images:
        urls = image_urls(request.images)
        body["content_parts"] = [{"type": "image_url", "url": url} for url in urls]
        body["return_token_ids"] = True
    if request.adapter is not None:
        body["model"] = request.adapter
    return body


def sampling_params(
    params: SamplingParams, max_new_tokens: int, *, num_before: int
) -> dict[str, Any]:
    """Return `params` in vLLM's form.

    vLLM also stops at the model's own end of text. `ignore_eos` prevents that, and stop tokens are
    obeyed all the same. Under a grammar the end of text is the only token left at the end.

    A seed begins a stream of random numbers for each request. The continuation of a turn must not
    draw the same ones again, so the number of tokens before it is part of its seed.
    """
    body = {
        **shared_sampling_params(params),
        "max_tokens": max_new_tokens,
        "logprobs": 0,
        "ignore_eos": params.grammar is None,
    }
    if params.grammar is not None:
        kind, text = params.grammar
        body["structured_outputs"] = {"json" if kind == "json_schema" else kind: text}
    if params.seed is not None:
        body["seed"] = (params.seed + num_before * _MIX) % _SEEDS
    return body


def read_answer(answer: dict[str, Any], version: int) -> Reply:
    """Read the sampled ids, log-probabilities and versions.

    Args:
        answer: the body of the answer.
        version: of the tokens, where the server does not report it.

    Raises:
        EngineError: the answer lacks a field.
    """
    try:
        choice = answer["choices"][0]
        finish = choice["finish_reason"]
        token_ids = Ints(choice["token_ids"])
        # A request that was aborted before its first token may have no log-probabilities at all.
        rows = (choice["logprobs"] or {"content": ()})["content"]
        logprobs = Floats([row["logprob"] for row in rows])
        spans = choice.get("weight_versions")
    except (KeyError, TypeError, IndexError, OverflowError) as error:
        raise EngineError(f"{GENERATE} answered without {error}: {str(answer)[:200]}") from None
    if len(logprobs) != len(token_ids):
        raise EngineError(
            f"{GENERATE} returned {len(token_ids)} tokens and {len(logprobs)} log-probabilities"
        )
    reply = make_reply(GENERATE, token_ids, logprobs, finish, spans, version)
    if token_ids:
        reply.routed_experts.append(None)
    return reply


def tells_versions(answer: dict[str, Any]) -> bool:
    """Return whether an answer has the version of each token."""
    return answer["choices"][0].get("weight_versions") is not None


def read_scores(answer: dict[str, Any], token_ids: list[int]) -> list[float]:
    """Return the log-probabilities of all prompt tokens but the first.

    Raises:
        EngineError: the answer lacks them.
    """
    try:
        rows = answer["prompt_logprobs"]
        return [rows[i][str(token)]["logprob"] for i, token in enumerate(token_ids) if i]
    except (KeyError, TypeError, IndexError) as error:
        raise EngineError(f"{GENERATE} did not score: {error!r}: {str(answer)[:200]}") from None


def score_body(token_ids: Sequence[int], top_k: int, adapter: str | None) -> dict[str, Any]:
    """Return the body of a request for the scores of a prompt, and `top_k` tokens of each place."""
    sampling = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": top_k}
    body: dict[str, Any] = {"token_ids": list(token_ids), "sampling_params": sampling}
    return body if adapter is None else {**body, "model": adapter}


def require_listed(url: str, limit: int, top_k: int) -> None:
    """Raise ConfigError if a server lists fewer than `top_k` tokens for each place of a prompt.

    Args:
        url: the server's address, for the message.
        limit: how many tokens the server lists for a place at most; -1 means any number.
        top_k: the number of tokens that are wanted.
    """
    if 0 <= limit < top_k:
        raise ConfigError(
            f"{url} lists at most {limit} tokens in a place; {top_k} are wanted",
            hints=[
                f"start it with --max-logprobs {top_k}",
                f"or ask for fewer: teacher.top_k={limit}",
            ],
        )


def read_top(answer: dict[str, Any], request: ScoreRequest) -> TopTokens:
    """Read the likeliest tokens in the places of a request.

    vLLM lists the prompt's own token, too, whatever its rank.

    Raises:
        EngineError: the answer lacks them.
    """
    ids, logprobs = array("i"), array("f")
    try:
        for row in answer["prompt_logprobs"][request.start :]:
            entries = sorted((-entry["logprob"], int(token)) for token, entry in row.items())
            best = entries[: request.top_k]
            if len(best) < request.top_k:
                raise ValueError(f"{len(best)} of {request.top_k} tokens")
            ids.extend(token for _, token in best)
            logprobs.extend(-negative for negative, _ in best)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EngineError(
            f"{GENERATE} did not list the likeliest tokens ({error!r}): {str(answer)[:200]}"
        ) from None
    top = TopTokens(ids.tobytes(), logprobs.tobytes(), request.top_k)
    return require_shape(top, request.num_places, request.top_k)
