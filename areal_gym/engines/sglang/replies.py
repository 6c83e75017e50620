"""Converts between the engine's types and the bodies of `/generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_gym.engines.base import Generation, SamplingParams
from areal_gym.engines.expert_encoding import decode_experts
from areal_gym.errors import EngineError
from areal_gym.types import FinishReason, RoutedExperts
from areal_gym.utils.packed_numbers import Floats, Ints

INITIAL_WEIGHTS = "default"
"""SGLang's name for the weights that a server started with: our version 0."""


@dataclass(slots=True)
class Reply:
    """The tokens of one request, or of all requests of one turn so far."""

    token_ids: Ints = field(default_factory=Ints)
    logprobs: Floats = field(default_factory=Floats)
    versions: Sequence[int] = ()
    finish: str = ""
    """"stop", "length" or "abort"."""
    routed_experts: list[RoutedExperts | None] = field(default_factory=list)
    """The experts of the tokens of each request that sampled any."""

    def add(self, reply: Reply) -> None:
        """Append the tokens of the turn's next request."""
        self.token_ids = Ints.joined((self.token_ids, reply.token_ids))
        self.logprobs = Floats.joined((self.logprobs, reply.logprobs))
        self.versions = (*self.versions, *reply.versions)
        self.routed_experts += reply.routed_experts

    def generation(self, finish_reason: FinishReason) -> Generation:
        """Return the whole turn."""
        return Generation(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=finish_reason,
            routed_experts=RoutedExperts.joined(self.routed_experts),
        )


def sampling_params(
    params: SamplingParams, max_new_tokens: int, *, has_seeds: bool
) -> dict[str, Any]:
    """Return `params` in SGLang's form. Temperature 0 gives log-probabilities of temperature 1.

    SGLang also stops at the model's own end of text. `ignore_eos` prevents that, but also makes it
    ignore `stop_token_ids`.
    """
    body: dict[str, Any] = {"temperature": params.temperature, "max_new_tokens": max_new_tokens}
    if params.top_p != 1.0:
        body["top_p"] = params.top_p
    if params.top_k > 0:
        body["top_k"] = params.top_k
    if params.stop_token_ids:
        body["stop_token_ids"] = list(params.stop_token_ids)
    else:
        body["ignore_eos"] = True
    if params.grammar is not None:
        kind, text = params.grammar
        body[kind] = text
    if has_seeds and params.seed is not None:
        body["sampling_seed"] = params.seed % 2**31
    return body


def read_answer(answer: dict[str, Any], version: int, num_layers: int | None = None) -> Reply:
    """Read the sampled ids, log-probabilities and versions, and experts if there are any.

    Args:
        answer: the body of the answer.
        version: of the tokens, where the server does not report it (before SGLang 0.5.19).
        num_layers: of the model, which the form of experts does not tell.

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
    if finish not in ("stop", "length", "abort"):
        raise EngineError(f"/generate returned the unknown finish reason {finish!r}")
    if finish != "abort" and not token_ids:
        raise EngineError(f"/generate sampled no tokens, but reports {finish!r}")
    num_tokens = len(token_ids)
    versions = (version,) * num_tokens if spans is None else _versions(spans, num_tokens)
    reply = Reply(token_ids, logprobs, versions, finish)
    if num_tokens:
        is_told = packed is not None and num_layers is not None
        experts = decode_experts(packed, num_tokens, num_layers or 0) if is_told else None
        reply.routed_experts.append(experts)
    return reply


def experts_request(num_prompt: int) -> dict[str, Any]:
    """Return what asks for the experts of sampled tokens, in SGLang's form.

    An answer covers the positions from `routed_experts_start_len` to the last but one: beginning
    with the prompt's last token, that are the positions from which the tokens were sampled.
    """
    return {"return_routed_experts": True, "routed_experts_start_len": num_prompt - 1}


def version_of(name: str) -> int:
    """Return the version for a server's name of its weights; -1 for those of another run."""
    if name == INITIAL_WEIGHTS:
        return 0
    return int(name) if name.isdecimal() else -1


def _versions(spans: Sequence[dict[str, Any]], num_tokens: int) -> tuple[int, ...]:
    versions: tuple[int, ...] = ()
    for span in spans:
        end = min(span["end"], num_tokens)
        versions += (version_of(span["version"]),) * (end - len(versions))
    if len(versions) != num_tokens:
        raise EngineError(f"weight_versions {spans} do not cover {num_tokens} tokens")
    return versions
