"""The token row on which servers are compared with the trainer after each publication."""

from __future__ import annotations

from collections.abc import Callable

from areal_gym.chat import Renderer
from areal_gym.config import RunConfig
from areal_gym.engines.base import ReferenceScores
from areal_gym.trainer.base import GroupTrainer, ReferenceTrainer
from areal_gym.trainer.batch.sequences import Sequence as TokenSequence

_TEXT = "The quick brown fox jumps over the lazy dog. So 17 + 25 = 42, because 17 + 20 = 37."
_MAX_TOKENS = 32
_ROUNDED = 4.0
"""The tolerated gap in multiples of `engine.max_logprob_gap`, which is meant for tokens that the
policy sampled. Low precision is less exact at unlikely tokens; wrong weights differ by 0.5 or more.
"""
_EXACT = 0.02
"""The multiple for float32, in which servers differ by less than 1e-6."""
_UNROUNDED = frozenset({"auto", "disk", "distributed", "tensor", "lora"})
"""Weight syncs that send weights in the trainer's type unless set otherwise."""


def reference_maker(
    config: RunConfig, trainer: GroupTrainer, renderer: Renderer
) -> Callable[[int], ReferenceScores | None]:
    """Return a function that scores the row with the trainer's weights of a version.

    The function returns None if the trainer cannot score at temperature 1, as servers do.
    """
    token_ids = renderer.encode(_TEXT)[: min(_MAX_TOKENS, config.engine.max_context // 2)]
    row = TokenSequence(
        token_ids=token_ids,
        loss_mask=(False, *[True] * (len(token_ids) - 1)),
        old_logprobs=[0.0] * len(token_ids),
        versions=[-1] * len(token_ids),
    )
    sync = config.trainer.weight_sync
    sent = sync.kwargs.get("dtype") or (config.trainer.dtype if sync.id in _UNROUNDED else None)
    is_exact = config.trainer.dtype == sent == "float32"
    allowed = config.engine.max_logprob_gap

    def make(version: int) -> ReferenceScores | None:
        if isinstance(trainer, ReferenceTrainer):
            (logprobs,) = trainer.score_at([row], 1.0)
        elif config.rollout.temperature == 1.0:
            (logprobs,) = trainer.score([row])
        else:
            return None
        return ReferenceScores(
            version=version,
            token_ids=token_ids,
            logprobs=logprobs.tolist(),
            max_gap=allowed * (_EXACT if is_exact else _ROUNDED),
            max_rounded_gap=allowed * _ROUNDED,
        )

    return make
