"""Refuses models in which packed sequences would leak into each other.

The check asks the model itself: a few short sequences are forwarded packed and one by one. It costs
two forward passes of about a hundred tokens, and finds layers of kinds that are new to us.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from areal_gym.errors import ConfigError
from areal_gym.models.context_parallel import WHOLE
from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.policy_model import Pack, PolicyModel

_NUM_SHARED, _LENGTHS = 9, (21, 14, 33)
_NOISE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Nats by which two orders of the same sums may differ. In float32 that holds for every token; in
bfloat16, where single tokens differ by more, for the mean of a sequence. A leak makes 1 to 5."""


@torch.no_grad()
def packing_gap(policy: PolicyModel, pack: Pack, dtype: torch.dtype = torch.float32) -> float:
    """Return the largest difference, in nats, between packed and separate log-probabilities.

    It is that of a token in float32, and the mean of a sequence in bfloat16.
    """
    generator = torch.Generator().manual_seed(0)
    highest = min(policy.shape.vocab_size, 30_000)

    def draw(count: int) -> list[int]:
        return torch.randint(0, highest, (count,), generator=generator).tolist()

    prompt = draw(_NUM_SHARED)
    rows = [[*prompt, *draw(length - _NUM_SHARED)] for length in _LENGTHS]
    num_shared = _NUM_SHARED if policy.can_share_prompts else 0
    packed = pack(rows, num_shared)
    together = list(_logprobs(policy, packed, rows, num_shared))
    context, policy.context = policy.context, WHOLE  # each rank by itself
    try:
        alone = [next(_logprobs(policy, pack([row], 0), [row], 0)) for row in rows]
    finally:
        policy.context = context
    gaps = [(a - b).abs() for a, b in zip(together, alone, strict=True)]
    return max(float(gap.max() if dtype == torch.float32 else gap.mean()) for gap in gaps)


def require_exact_packing(
    policy: PolicyModel, pack: Pack, dtype: torch.dtype = torch.float32
) -> None:
    """Refuse a model whose packed sequences see each other; every rank must call this.

    `dtype` is what it computes in.

    Raises:
        ConfigError: names the architecture and what to do.
    """
    gap = packing_gap(policy, pack, dtype)
    if gap > _NOISE[dtype]:
        config: Any = policy.network.config
        name = (getattr(config, "architectures", None) or [type(policy.network).__name__])[0]
        raise ConfigError(
            f"{name} cannot be trained: log-probabilities of packed sequences differ by {gap:.3g} "
            "nats from those of the same sequences one by one, so that one sequence sees another",
            hints=["train a checkpoint of an architecture in docs/models.md's table"],
        )


def _logprobs(
    policy: PolicyModel, batch: PackedBatch, rows: Sequence[Sequence[int]], num_shared: int
) -> Iterator[Tensor]:
    """Yield each row's log-probabilities of its tokens but the first, [T - 1]."""
    hidden_NC = policy.context.whole(policy(batch), len(batch.token_ids_N))
    logprobs_NV = policy.logits(hidden_NC).float().log_softmax(-1)
    start = num_shared
    for row in rows:
        own = range(start, start + len(row) - num_shared)
        places = [*range(num_shared), *own]
        start = own.stop
        index = torch.tensor(places[:-1], device=logprobs_NV.device)
        targets = torch.tensor(row[1:], device=logprobs_NV.device)
        scores: Tensor = logprobs_NV[index, targets]
        yield scores
