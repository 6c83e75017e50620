"""Converts between the engine's types and the bodies of SGLang's `/generate`."""

from __future__ import annotations

from typing import Any

from areal_gym.engines.base import SamplingParams
from areal_gym.engines.expert_encoding import decode_experts
from areal_gym.engines.servers.replies import Reply, make_reply, shared_sampling_params
from areal_gym.errors import EngineError
from areal_gym.utils.packed_numbers import Floats, Ints


def sampling_params(
    params: SamplingParams, max_new_tokens: int, *, has_seeds: bool
) -> dict[str, Any]:
    """Return `params` in SGLang's form. Temperature 0 gives log-probabilities of temperature 1.

    SGLang also stops at the model's own end of text. `ignore_eos` prevents that, but also makes it
    ignore `stop_token_ids`.
    """
    body = {**shared_sampling_params(params), "max_new_tokens": max_new_tokens}
    if not params.stop_token_ids:
        body["ignore_eos"] = True
    if params.grammar is not None:
        grammar_type, text = params.grammar
        body[grammar_type] = text
    if has_seeds and params.seed is not None:
        body["sampling_seed"] = params.seed % 2**31
    return body


def read_answer(answer: dict[str, Any], version: int, num_layers: int | None = None) -> Reply:
    """Read the sampled ids, log-probabilities, versions and, if present, experts.

    Args:
        answer: the body of the answer.
        version: the version of the tokens, unless the server reports it (SGLang 0.5.19 and later).
        num_layers: the model's number of layers, which encoded experts do not contain.

    Raises:
        EngineError: the answer lacks a field.
    """
    try:
        meta = answer["meta_info"]
        finish = meta["finish_reason"]["type"]
        # A request that was aborted before its first token has no log-probabilities at all.
        rows = meta.get("output_token_logprobs") or ()
        token_ids = Ints([row[1] for row in rows])
        logprobs = Floats([row[0] for row in rows])
        spans = meta.get("weight_versions")
        packed = meta.get("routed_experts")
    except (KeyError, TypeError, IndexError, OverflowError) as error:
        raise EngineError(f"/generate answered without {error}: {str(answer)[:200]}") from None
    reply = make_reply("/generate", token_ids, logprobs, finish, spans, version)
    num_tokens = len(token_ids)
    if num_tokens:
        has_experts = packed is not None and num_layers is not None
        experts = decode_experts(packed, num_tokens, num_layers or 0) if has_experts else None
        reply.routed_experts.append(experts)
    return reply


def experts_request(num_prompt: int) -> dict[str, Any]:
    """Return the fields that ask for the experts of sampled tokens, in SGLang's form.

    An answer covers the positions from `routed_experts_start_len` to the last but one. From the
    prompt's last token on, those are the positions at which the tokens were sampled.
    """
    return {"return_routed_experts": True, "routed_experts_start_len": num_prompt - 1}
