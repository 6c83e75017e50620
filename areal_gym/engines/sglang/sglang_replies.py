"""Converts between the engine's types and the bodies of SGLang's `/generate`."""

from __future__ import annotations

from array import array
from base64 import b64decode
from collections.abc import Sequence
from typing import Any

from areal_gym.engines.base import SamplingParams
from areal_gym.engines.expert_encoding import decode_experts
from areal_gym.engines.scoring import require_shape
from areal_gym.engines.servers.json_bodies import load_json
from areal_gym.engines.servers.replies import (
    Reply,
    ScoreRequest,
    make_reply,
    shared_sampling_params,
)
from areal_gym.errors import EngineError
from areal_gym.types import TopTokens
from areal_gym.utils.packed_numbers import Floats, Ints

_ROWS = b'"output_token_logprobs":[['
_IDS = b'"output_ids":['


class _FlatRows(list[Any]):
    """The rows [log-probability, id, null] of all sampled tokens, one after the other."""


def load_answer(body: bytes) -> Any:
    """Parse the answer of `/generate`; raises ValueError for what is not JSON.

    The rows of all tokens are parsed as one list: a list for each token takes twice the time. The
    ids beside them are the same once more, and are left out.
    """
    start = body.find(_ROWS)
    if start < 0:
        return load_json(body)
    start += len(_ROWS)
    quote = body.find(b'"', start)
    end = body.rfind(b"]]", start, quote if quote > 0 else len(body))
    if end < 0:  # the rows hold the texts of tokens, for which our requests do not ask
        return load_json(body)
    head = body[: start - 1]
    if (ids := head.find(_IDS)) >= 0:
        ids += len(_IDS)
        head = head[:ids] + head[head.find(b"]", ids) :]
    try:
        answer = load_json(head + body[end + 1 :])
        flat = load_json(b"[%b]" % body[start:end].translate(None, b"[]"))
    except ValueError:  # lists inside of the lists, or no JSON at all
        return load_json(body)
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict) or len(flat) % 3:  # not what SGLang answers
        return load_json(body)
    meta["output_token_logprobs"] = _FlatRows(flat)
    return answer


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
        if isinstance(rows, _FlatRows):
            token_ids, logprobs = Ints(rows[1::3]), Floats(rows[::3])
        else:
            token_ids, logprobs = Ints([row[1] for row in rows]), Floats([row[0] for row in rows])
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


def score_request(token_ids: Sequence[int], start: int, adapter: str | None) -> dict[str, Any]:
    """Return the body of a request for the log-probabilities of `token_ids[start + 1:]`."""
    body: dict[str, Any] = {
        "input_ids": list(token_ids),
        "return_logprob": True,
        "logprob_start_len": start,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
    }
    return body if adapter is None else {**body, "lora_path": adapter}


def top_request(top_k: int) -> dict[str, Any]:
    """Return the fields that ask for the likeliest tokens of each place as packed arrays.

    Versions before the packed form ignore what they do not know, and answer with nested lists.
    """
    packed = {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
    return {"top_logprobs_num": top_k, **packed}


def read_top(answer: dict[str, Any], request: ScoreRequest) -> TopTokens:
    """Read the likeliest tokens in the places of a request.

    Raises:
        EngineError: the answer lacks them.
    """
    try:
        meta = answer["meta_info"]
        if "input_top_logprobs_idx_flat_b64" in meta:
            ids, logprobs = (
                b64decode(meta[f"input_top_logprobs_{name}_flat_b64"]) for name in ("idx", "val")
            )
            top = TopTokens(ids, logprobs, meta["input_top_logprobs_shape"][1])
        else:
            rows = [row for row in meta["input_top_logprobs"] if row]
            top = TopTokens(
                array("i", [entry[1] for row in rows for entry in row]).tobytes(),
                array("f", [entry[0] for row in rows for entry in row]).tobytes(),
                len(rows[0]),
            )
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise EngineError(
            f"/generate did not list the likeliest tokens ({error!r}): {str(answer)[:200]}"
        ) from None
    return require_shape(top, request.num_places, request.top_k)
