"""The part of the engine contract that teachers have: the scores of given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from areal_gym.errors import EngineError
from areal_gym.types import TopTokens


@runtime_checkable
class ScoringEngine(Protocol):
    """An engine that can score given tokens, as a teacher does."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities of `token_ids[1:]`, each given those before, at temp. 1.

        Raises:
            EngineError: scoring failed. A retry is safe.
        """


@runtime_checkable
class TopScoringEngine(ScoringEngine, Protocol):
    """An engine that can tell which tokens it holds likeliest at the places of given tokens."""

    async def score_top(self, token_ids: Sequence[int], top_k: int, *, start: int = 1) -> TopTokens:
        """Return the likeliest tokens, at temperature 1, in the places of `token_ids[start:]`.

        Args:
            token_ids: the sequence; each place is given the tokens before it.
            top_k: the tokens of each place, at most the size of the vocabulary.
            start: the first place, at least 1.

        Raises:
            ConfigError: the server does not list as many tokens; the hints say how it would.
            EngineError: scoring failed. A retry is safe.
        """


def require_shape(top: TopTokens, num_places: int, top_k: int) -> TopTokens:
    """Return the last `num_places` places of what a server listed.

    Raises:
        EngineError: it listed fewer places, or another number of tokens.
    """
    if len(top) < num_places or top.top_k != top_k:
        raise EngineError(
            f"the server listed {top.top_k} tokens in {len(top)} places; {top_k} in {num_places} "
            "were asked for"
        )
    return top[len(top) - num_places :]
