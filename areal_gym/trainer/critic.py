"""PPO's critic predicts, before each token, the rewards that its trajectory has yet to earn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from areal_gym.config import TrainerConfig
from areal_gym.models.flat_batch import PackedBatch
from areal_gym.models.policy_model import PolicyModel
from areal_gym.trainer.chunked_logprobs import places_before
from areal_gym.trainer.optimizer import Optimizer
from areal_gym.trainer.parallel.fsdp import prepare_decoder, shard_head
from areal_gym.trainer.parallel.rank_group import ALONE, Ranks
from areal_gym.trainer.states import below, prefixed


class Critic(nn.Module):
    """A linear head on a decoder's hidden states, which predicts 0 everywhere at first.

    With `critic.trunk="own"` it has a copy of the policy, which is trained separately; with
    "shared" it reads the policy's hidden states, and its gradient reaches the policy.
    """

    def __init__(self, decoder: PolicyModel, config: TrainerConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.trunk: PolicyModel | None = None
        if config.critic.trunk == "own":
            self.trunk = decoder.duplicate_trunk()
            prepare_decoder(self.trunk, config, ranks)
        device = next(decoder.parameters()).device
        self.head = nn.Linear(decoder.shape.hidden_size, 1, device=device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        shard_head(self.head, config, ranks)
        self._scale = config.critic.lr_scale
        own_lr = config.model_copy(update={"lr_groups": {}})  # patterns name the policy's weights
        self.optimizer = Optimizer(self, own_lr, ranks)

    def of(self, decoder: PolicyModel, hidden_tC: Tensor, num_tokens: int) -> Tensor:
        """Return the values at `num_tokens` hidden states of `decoder`: [T], float32.

        A rank that shares the tokens passes its part of the hidden states, and gets all values.
        """
        values_t1: Tensor = self.head(hidden_tC)
        return decoder.context.whole(values_t1.squeeze(1).float(), num_tokens)

    def before(
        self, decoder: PolicyModel, batch: PackedBatch, masks: Sequence[Sequence[bool]]
    ) -> Tensor:
        """Return the predictions before the tokens that `masks` marks, [T]."""
        return self._at(decoder, batch, places_before(batch, masks)[0])

    def before_and_after(
        self, decoder: PolicyModel, batch: PackedBatch, masks: Sequence[Sequence[bool]]
    ) -> tuple[Tensor, Tensor]:
        """Return what `before` does, [T], and the predictions after each row's last token, [B]."""
        sources, _ = places_before(batch, masks)
        last = [int(index[-1]) for index in batch.row_index]
        values = self._at(decoder, batch, np.append(sources, last))
        return values[: len(sources)], values[len(sources) :]

    def step(self, scale: float, *, is_usable: bool = True) -> float:
        """Take an optimizer step; return the gradient's norm."""
        return self.optimizer.step(scale * self._scale, is_usable=is_usable)

    def states(self) -> dict[str, Tensor]:
        """Return the live weights and optimizer states by name, for a checkpoint."""
        weights = prefixed("weights", self.state_dict())
        return weights | prefixed("optimizer", self.optimizer.states())

    def allocate(self, saved: Mapping[str, TensorStorageMetadata]) -> None:
        """Allocate the states that were saved (`Optimizer.allocate`)."""
        self.optimizer.allocate(below("optimizer", saved))

    def _at(self, decoder: PolicyModel, batch: PackedBatch, places: np.ndarray[Any, Any]) -> Tensor:
        trunk = decoder if self.trunk is None else self.trunk
        places_T = torch.tensor(places, device=batch.token_ids_N.device)
        return self.of(trunk, trunk(batch, places_T), len(places))
