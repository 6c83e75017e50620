"""Makes networks of transformers without values, laid out over ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_tie_weights

from areal_gym.models.hf.hf_loading import (
    Sharding,
    classifier_class,
    distributed_config,
    network_class,
    require_expert_plan,
)
from areal_gym.models.hf.token_mixing import NAME


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
    no memory. A trunk has no output projection. Experts are sharded like other weights: how many
    tokens would travel between ranks is not known without values.

    Raises:
        ConfigError: it has no plan for expert parallelism.
    """
    require_expert_plan(config, sharding)
    own_class: Any = network_class(config)._model_mapping[type(config)]
    if is_trunk:
        own_class = classifier_class(config)
    if sharding is not None:
        sharding = replace(sharding, layout=replace(sharding.layout, expert=1))
    layout, _, mesh = own_class.prepare_distribute_model(distributed_config(sharding))
    with mode:
        with no_tie_weights():  # as `from_pretrained`: weights are tied when they are laid out
            network = own_class._from_config(config, attn_implementation=NAME, dtype=dtype)
        if is_trunk:
            network.score = nn.Identity()
        placed: PreTrainedModel = own_class.maybe_distribute_model(network, layout, mesh)
        placed.tie_weights()
    return placed
