"""Compares a server's log-probabilities with the trainer's, before it samples a new version.

A server may report a version whose weights it does not have: a loader reported success but loaded
only half of them, a tied matrix was left out, or the files were of another version.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_gym.engines.base import BROKEN_WEIGHTS, ReferenceScores
from areal_gym.engines.servers.server_client import RefusedError, ServerClient, ServerFacts
from areal_gym.errors import EngineError

CHECK_S = 120.0
"""Seconds; the first request after a publication may wait for those that were interrupted."""
_CANNOT_SCORE = frozenset({400, 422, 501})
"""HTTP statuses of a server that does not support log-probabilities of prompts."""


class WrongWeightsError(EngineError):
    """A server reports a version whose weights it does not have."""


async def require_reference_scores(
    client: ServerClient, facts: ServerFacts | None, reference: ReferenceScores, adapter: str | None
) -> None:
    """Let the server score the reference row, and compare with the trainer's scores.

    A server that fails the comparison reports `BROKEN_WEIGHTS` from then on, so that other
    processes do not use it, either. A server that does not score prompts at all cannot be compared,
    and is accepted.

    Raises:
        WrongWeightsError: its log-probabilities are not the trainer's.
        EngineError: it did not answer.
    """
    try:
        scores = await client.score(reference.token_ids, adapter=adapter, timeout_s=CHECK_S)
    except RefusedError as refused:
        if refused.status in _CANNOT_SCORE:
            return
        raise
    gap = _mean_gap(scores, reference.logprobs)
    is_exact = facts is not None and facts.dtype == "float32"
    allowed = reference.max_gap if is_exact else reference.max_rounded_gap
    if gap <= allowed:
        return
    await client.set_version(BROKEN_WEIGHTS)
    raise WrongWeightsError(
        f"{client.url} reports version {reference.version} and has other weights: "
        f"log-probabilities of {len(scores)} tokens differ from the trainer's by {gap:.2g} on "
        f"average (allowed: {allowed:.2g})",
        hints=[
            "its log says what it has loaded",
            "if this much is expected of its dtype or quantization, raise engine.max_logprob_gap",
        ],
    )


def _mean_gap(scores: Sequence[float], expected: Sequence[float]) -> float:
    """Return the mean difference; infinity if numbers are not finite, or not equally many."""
    if len(scores) != len(expected):
        return float("inf")
    gap = sum(abs(a - b) for a, b in zip(scores, expected, strict=True)) / len(expected)
    return gap if gap == gap else float("inf")  # NaN
