"""Choose the code that runs a checkpoint: the tiny decoder, or transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from areal_gym.errors import ConfigError
from areal_gym.models.policy_model import PolicyModel
from areal_gym.models.tiny.checkpoint_files import is_reward_model, load_checkpoint, read_config
from areal_gym.models.tiny.hf_config import config_from_hf
from areal_gym.models.tiny.scored_decoder import load_reward_model

OLDEST_TRANSFORMERS = (5, 22)
"""The major and minor version from which on models are run; pyproject.toml says the same."""
Backend = Literal["auto", "tiny", "transformers"]

SMALL_BYTES = 2**28
"""Files of weights up to 256 MB are a model for the tiny decoder: the starter has 8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLoader:
    """Reads checkpoints with the code that runs them; picklable, for other processes."""

    backend: Backend = "auto"
    """"auto" is the tiny decoder for small models that it knows (`SMALL_BYTES`)."""
    trusts_code: bool = False
    """Whether code that a checkpoint brings along may run."""
    is_reward_model: bool = False
    """Whether the model scores dialogues; a policy gets a head of zeros."""

    def load(self, path: Path | str, *, device: torch.device | str = "cpu") -> PolicyModel:
        """Read a checkpoint for training, whole, in float32.

        Raises:
            ConfigError: there is no checkpoint, or it cannot be trained.
        """
        if self.uses_transformers(path):
            from areal_gym.models.hf import hf_loading

            read = hf_loading.load_reward_model if self.is_reward_model else hf_loading.load_policy
            return read(path, device=device, trusts_code=self.trusts_code)
        return (load_reward_model if self.is_reward_model else load_checkpoint)(path, device=device)

    def without_weights(self, path: Path | str) -> PolicyModel:
        """Return the model on the meta device, for its names, shapes and config.

        Raises:
            ConfigError: there is no checkpoint, or it cannot be trained.
        """
        if not self.uses_transformers(path):
            return self.load(path).to("meta")  # small
        from areal_gym.models.hf.hf_loading import policy_without_weights

        return policy_without_weights(
            path, trusts_code=self.trusts_code, is_reward_model=self.is_reward_model
        )

    def uses_transformers(self, path: Path | str) -> bool:
        """Return whether transformers runs this checkpoint.

        Raises:
            ConfigError: there is no checkpoint, or transformers is needed and not installed.
        """
        facts = read_config(Path(path))
        model_type = facts.get("model_type")
        is_refused = is_reward_model(facts) and not self.is_reward_model
        if not isinstance(model_type, str) or is_refused:
            return False  # `load_checkpoint` says why it cannot be read
        is_tiny = self.backend == "auto" and _is_small(path) and tiny_knows(facts)
        if self.backend == "tiny" or is_tiny:
            return False
        if find_spec("transformers") is None:
            raise ConfigError(
                f"{path} is a {model_type} model, which transformers runs; it is not installed",
                hints=["pip install 'areal-gym[train]'"],
            )
        require_supported(version("transformers"))
        return True


def require_supported(installed: str) -> None:
    """Refuse a version of transformers with which models would be read or sharded otherwise.

    Raises:
        ConfigError: it is older than `OLDEST_TRANSFORMERS`, or of another major version.
    """
    parts = [int(part) for part in re.findall(r"\d+", installed)[:2]]
    if parts < [*OLDEST_TRANSFORMERS] or parts[0] > OLDEST_TRANSFORMERS[0]:
        major, minor = OLDEST_TRANSFORMERS
        wanted = f"transformers>={major}.{minor},<{major + 1}"
        raise ConfigError(
            f"transformers {installed} is installed; models are run with {wanted}",
            hints=[f"pip install '{wanted}'"],
        )


def tiny_knows(facts: Mapping[str, Any]) -> bool:
    """Return whether the tiny decoder runs models with this content of `config.json`."""
    try:
        config_from_hf(facts)
    except ConfigError:
        return False
    return True


def _is_small(path: Path | str) -> bool:
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) <= SMALL_BYTES


AUTO = ModelLoader()
"""Reads policies as `model.backend=auto` says."""
