"""The interface between the trainer and models of all families."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from areal_gym.models.context_parallel import WHOLE, ContextGroup
from areal_gym.models.stored_types import StoredTypes

if TYPE_CHECKING:  # they are made of parts of models
    from areal_gym.models.flat_batch import PackedBatch
    from areal_gym.models.lora_weights import NetworkTensor
    from areal_gym.models.tiny.decoder_config import DecoderConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a model that memory plans, packers and metrics need."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    windows: tuple[int | None, ...]
    """Per layer, how many tokens a token sees, itself included; None: all before it."""
    attention_width: int
    """Query heads times their dimension."""
    num_parameters: int
    num_active_parameters: int
    """The number of parameters that compute one token of a text; fewer than all in a mixture of
    experts, and in a model with a vision tower."""
    cache_bytes_per_token: int
    """Bytes of one token's keys and values in all layers, in bfloat16."""


Shape: TypeAlias = "ModelShape | DecoderConfig"
"""The sizes of a policy."""

Pack = Callable[[Sequence[Sequence[int]], int], "PackedBatch"]
"""Lays sequences on a flat axis: (token ids, how many leading tokens of each may be shared)."""


class PolicyModel(nn.Module, ABC):
    """A network that gives every token of a flat batch a hidden state, and logits for some."""

    network: nn.Module
    """The module whose parameters have the architecture's own names; it gets adapters."""
    can_share_prompts: bool = True
    """Whether a group's prompt may be forwarded once; recurrent layers cannot do that."""
    recomputes_layers: bool = False
    """Whether the backward pass computes a layer's inner values again instead of keeping them: a
    third more work for a fraction of the memory."""

    replays_experts: bool = False
    """Whether tokens pass the experts that a batch records for them, with the weights that the
    routers give these, instead of those that the routers would choose (routing replay)."""

    counts_experts: bool = True
    """Whether passes count which experts their tokens choose; not those that only keep pace."""

    trusts_code: bool = False
    """Whether code that its checkpoint brought along runs."""
    stored_types: StoredTypes = StoredTypes()
    """The types in which the checkpoint that it was read from stores its weights."""
    is_sharded: bool = False
    """Whether the weights were divided among the ranks when they were read."""
    context: ContextGroup = WHOLE
    """The ranks with which this one shares the tokens of a forward pass."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """The sizes of the model."""

    @property
    @abstractmethod
    def layers(self) -> nn.ModuleList:
        """The decoder layers, which are compiled and sharded one by one."""

    @property
    def has_routers(self) -> bool:
        """Whether it is a mixture of experts whose routers can be watched."""
        return False

    @abstractmethod
    def forward(self, batch: PackedBatch, wanted_M: Tensor | None = None) -> Tensor:
        """Return the hidden states after the last norm, [N, C], or [M, C] at `wanted_M`.

        With a `context` of several ranks, of these this rank's part: `context.own` of `wanted_M`,
        or of all places.
        """

    @abstractmethod
    def logits(self, hidden_NC: Tensor) -> Tensor:
        """Return [N, V]: the scores of the next token; callers hand in chunks."""

    @abstractmethod
    def network_tensors(self) -> Iterator[NetworkTensor]:
        """Yield what is published and saved: each tensor once, adapters merged.

        `sources` are names in this module's `state_dict`.
        """

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return the checkpoint's own names and tensors of one of `network_tensors`.

        It reads no weights: a network that is training may be asked in another thread.
        """
        return {name: tensor}

    def published(
        self, whole: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's own names and tensors, one at a time, adapters merged.

        `whole` gathers a tensor from the ranks that share it; every rank must use up the iterator.
        """
        state = self.state_dict()
        for part in self.network_tensors():
            merged = part.merged([whole(state[name].detach()) for name in part.sources])
            yield from self.checkpoint_tensors(part.name, merged).items()

    def share_tokens(self, context: ContextGroup) -> None:
        """Share the tokens of every pass with the ranks of `context` from now on.

        Raises:
            ConfigError: the architecture cannot be computed so.
        """
        self.context = context

    def take_expert_counts(self) -> Tensor | None:
        """Return the tokens that each layer's experts were given in training, [L, E].

        They are counted since the last call; None without a mixture of experts.
        """
        return None

    def take_router_agreement(self) -> tuple[int, int]:
        """Return how many experts that engines recorded the routers chose as well, and all.

        Of tokens trained on since the last call.
        """
        return 0, 0

    def check_packing(self, pack: Pack, dtype: torch.dtype) -> None:
        """Refuse to train where packed sequences would see each other, which costs two passes.

        `pack` lays out sequences, and `dtype` is what is computed in. Our own decoder is exact.

        Raises:
            ConfigError: they would.
        """

    @abstractmethod
    def duplicate_trunk(self) -> PolicyModel:
        """Return another model with the weights that this one was read with, to train: in float32.

        It gives hidden states, and has no output projection unless its embeddings are tied to it.
        This one may be frozen beside an adapter, in bfloat16.
        """

    @abstractmethod
    def hf_config(self) -> dict[str, Any]:
        """Return the content of the checkpoint's `config.json`."""


class DialogueScorer(PolicyModel):
    """A network with a head that scores dialogues; it does not predict tokens."""

    @abstractmethod
    def rewards(self, hidden_BC: Tensor) -> Tensor:
        """Map hidden states of last tokens, [B, C], to rewards, [B], float32."""
