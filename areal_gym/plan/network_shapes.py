"""Makes networks of transformers without values, laid out over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights, no_tie_weights

from areal_gym.models.hf.hf_loading import (
    Sharding,
    classifier_class,
    distributed_config,
    network_class,
)
from areal_gym.models.hf.layout_plans import require_layout
from areal_gym.models.hf.token_mixing import NAME

_EVEN = "areal_gym_even"


def network_of_shapes(
    config: PretrainedConfig,
    sharding: Sharding | None,
    *,
    mode: AbstractContextManager[Any],
    dtype: torch.dtype = torch.float32,
    is_trunk: bool = False,
) -> PreTrainedModel:
    """Return a network without values, laid out over the ranks of the process group.

    `mode` is entered when the ranks' mesh is made: with torch's `FakeTensorMode` the network takes
    no memory. A trunk has no output projection. Where tokens travel to the ranks of their experts,
    every rank gets as many: which experts they choose is not known without values.

    Raises:
        ConfigError: it has no plan for expert parallelism.
    """
    if sharding is not None:
        require_layout(config, sharding.layout)
    own_class: Any = network_class(config)._model_mapping[type(config)]
    if is_trunk:
        own_class = classifier_class(config)
    wanted: Any = distributed_config(sharding)
    if sharding is not None and sharding.layout.expert > 1:
        _register_even_exchange()
        wanted.ep_implementation = _EVEN
    layout, _, mesh = own_class.prepare_distribute_model(wanted)
    with mode:
        # As `from_pretrained`: weights are tied when they are laid out. Without values, truncated
        # normal ones would be drawn for ever.
        with no_init_weights(), no_tie_weights():
            network = own_class._from_config(config, attn_implementation=NAME, dtype=dtype)
        if is_trunk:
            network.score = nn.Identity()
        placed: PreTrainedModel = own_class.maybe_distribute_model(network, layout, mesh)
        placed.tie_weights()
    return placed


def _register_even_exchange() -> None:
    from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface

    class EvenExchange(AllToAllEP):  # type: ignore[misc]
        """Sends as many tokens to every rank."""

        def _dispatch_tokens(self, hidden_states: Any, top_k_index: Any, *others: Any) -> Any:
            num_pairs = top_k_index.numel() // self.tp_mesh.size()
            with _even_sizes(num_pairs, self.ep_mesh.size()):
                return super()._dispatch_tokens(hidden_states, top_k_index, *others)

    EPImplementationInterface.register(_EVEN, EvenExchange)


@contextmanager
def _even_sizes(num_tokens: int, num_ranks: int) -> Iterator[None]:
    """Let the sizes of messages, [sent or received, ranks], be read as equal in this context."""
    sizes = [num_tokens // num_ranks] * num_ranks
    sizes[0] += num_tokens % num_ranks
    fake: Any = FakeTensor
    tolist = fake.tolist
    fake.tolist = lambda tensor: [sizes, sizes] if tensor.ndim == 2 else tolist(tensor)
    try:
        yield
    finally:
        fake.tolist = tolist
