"""Scores of given tokens in the embedded engine, between two steps of sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from areal_gym.engines.embedded.cached_network import CachedNetwork, Prompt, Step
from areal_gym.engines.embedded.scheduler import Scheduler
from areal_gym.errors import EngineError
from areal_gym.types import TopTokens

_CHUNK_TOKENS = 512
"""Tokens of a sequence whose logits exist at once."""
_T = TypeVar("_T")
_Scores = tuple[list[float], TopTokens]


class PromptScores:
    """The part of the embedded engine that scores tokens (`TopScoringEngine`)."""

    _scheduler: Scheduler
    max_context: int

    async def _between_steps(self, act: Callable[[], _T]) -> _T:
        """Run `act` on the engine's thread between two steps."""
        raise NotImplementedError

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities of `token_ids[1:]`; see `ScoringEngine.score`.

        Raises:
            EngineError: the tokens do not fit the context, or the engine has stopped.
        """
        return (await self._score(token_ids, 1, 1))[0]

    async def score_top(self, token_ids: Sequence[int], top_k: int, *, start: int = 1) -> TopTokens:
        """Return the likeliest tokens in the places of `token_ids[start:]`; see `TopScoringEngine`.

        Raises:
            EngineError: as `score`.
        """
        return (await self._score(token_ids, top_k, start))[1]

    async def _score(self, token_ids: Sequence[int], top_k: int, start: int) -> _Scores:
        if not 0 < start < len(token_ids) <= self.max_context:
            raise EngineError(
                f"{len(token_ids)} tokens to be scored from place {start} on; 2 to "
                f"{self.max_context} fit, from place 1 on"
            )
        scheduler = self._scheduler
        score = partial(_score_in, scheduler.network, token_ids, top_k, start)
        scores = None
        while scores is None:  # while all rows work, a step passes before each try
            scores = await self._between_steps(partial(scheduler.lend_row, score))
        return scores


def _score_in(
    network: CachedNetwork, token_ids: Sequence[int], top_k: int, start: int, row: int
) -> _Scores:
    """Return the scores of `token_ids[start:]`, with the cache's row for the sequence."""
    chosen, tops = [], []
    for begin in range(0, len(token_ids) - 1, _CHUNK_TOKENS):
        end = min(begin + _CHUNK_TOKENS, len(token_ids) - 1)
        on_device = partial(torch.tensor, device=network.device)
        step = Step(
            token_ids_N=on_device(list(token_ids[begin:end])),
            positions_N=on_device(range(begin, end)),
            rows_N=on_device([row] * (end - begin)),
            num_decoding=0,
            num_keys=1,
            prompts=[Prompt(row, begin, end)],
            families=[],
            scores_all=True,
        )
        logits_TV = network.forward(step)[max(0, start - 1 - begin) :]
        if not len(logits_TV):
            continue
        logprobs_TV = logits_TV.log_softmax(-1)
        targets_T = on_device(list(token_ids[end + 1 - len(logits_TV) : end + 1]))
        chosen += logprobs_TV.gather(1, targets_T[:, None])[:, 0].tolist()
        tops.append(logprobs_TV.topk(min(top_k, logprobs_TV.shape[-1]), dim=-1))
    logprobs_TK, ids_TK = (torch.cat(part).cpu() for part in zip(*tops, strict=True))
    return chosen, TopTokens.from_arrays(ids_TK.numpy(), logprobs_TK.numpy())
