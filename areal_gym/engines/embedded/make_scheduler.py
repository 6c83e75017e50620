"""Schedulers of the embedded engine, with the network that a checkpoint needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from areal_gym.engines.embedded.network import CachedDecoder
from areal_gym.engines.embedded.scheduler import Scheduler
from areal_gym.errors import ConfigError
from areal_gym.models.backend import is_for_transformers
from areal_gym.models.device import pick_device
from areal_gym.models.tiny.checkpoint_files import read_checkpoint
from areal_gym.models.tiny.decoder_config import DecoderConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def decoder_scheduler(
    config: DecoderConfig,
    weights: Mapping[str, Tensor],
    num_slots: int,
    max_context: int,
    dtype: str,
    device: str,
) -> Scheduler:
    """Make the scheduler of a tiny decoder with these weights.

    Raises:
        ConfigError: an unknown dtype.
    """
    network = CachedDecoder(
        config,
        num_rows=num_slots,
        max_context=min(max_context, config.max_positions),
        dtype=_dtype(dtype),
        device=pick_device(device),
    )
    scheduler = Scheduler(network, num_slots)
    scheduler.load(weights, version=0)
    return scheduler


def checkpoint_scheduler(
    directory: Path, num_slots: int, max_context: int, dtype: str, device: str
) -> Scheduler:
    """Make the scheduler of a checkpoint, with the tiny decoder or, else, with transformers.

    Raises:
        ConfigError: an unknown dtype, or a checkpoint that cannot be read.
    """
    if not is_for_transformers(directory):
        config, weights = read_checkpoint(directory)
        return decoder_scheduler(config, weights, num_slots, max_context, dtype, device)
    from areal_gym.engines.embedded.hf_network import CachedHFPolicy
    from areal_gym.models.hf.hf_loading import load_policy

    policy = load_policy(directory, device=pick_device(device), dtype=_dtype(dtype))
    longest = getattr(policy.network.config.get_text_config(), "max_position_embeddings", None)
    network = CachedHFPolicy(
        policy, num_rows=num_slots, max_context=min(max_context, longest or max_context)
    )
    return Scheduler(network, num_slots)


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ConfigError(f"unknown dtype {name!r}; available: {', '.join(_DTYPES)}")
    return _DTYPES[name]
