"""Chooses the code that runs a checkpoint: the tiny decoder, or transformers."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from areal_gym.errors import ConfigError
from areal_gym.models.policy_model import PolicyModel
from areal_gym.models.tiny.checkpoint_files import (
    is_reward_model,
    load_checkpoint,
    read_config,
)
from areal_gym.models.tiny.families import FAMILIES


def load_model(path: Path | str, *, device: torch.device | str = "cpu") -> PolicyModel:
    """Read a checkpoint for training, in float32, with the code that runs it.

    Raises:
        ConfigError: there is no checkpoint, or it cannot be trained.
    """
    if not is_for_transformers(Path(path)):
        return load_checkpoint(path, device=device)
    from areal_gym.models.hf.hf_loading import load_policy

    return load_policy(path, device=device)


def model_without_weights(
    path: Path | str, load: Callable[..., PolicyModel] = load_model
) -> PolicyModel:
    """Return the model of a checkpoint on the meta device, for its names, shapes and config.

    `load` reads models of the tiny decoder, which are small.

    Raises:
        ConfigError: there is no checkpoint, or it cannot be trained.
    """
    if not is_for_transformers(Path(path)):
        return load(path).to("meta")
    from areal_gym.models.hf.hf_loading import policy_without_weights

    return policy_without_weights(path)


def is_for_transformers(directory: Path) -> bool:
    """Return whether a checkpoint is of an architecture that the tiny decoder does not know.

    Raises:
        ConfigError: there is no checkpoint; or transformers, which it needs, is not installed.
    """
    facts = read_config(directory)
    model_type = facts.get("model_type")
    if not isinstance(model_type, str) or model_type in FAMILIES or is_reward_model(facts):
        return False
    if find_spec("transformers") is None:
        raise ConfigError(
            f"{directory} is a {model_type} model, which transformers runs; it is not installed",
            hints=["pip install 'areal-gym[train]'"],
        )
    return True
