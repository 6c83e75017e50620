"""Finds the config of a run's model, and which code runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from transformers import PretrainedConfig

from areal_gym.config import RunConfig
from areal_gym.models.backend import SMALL_BYTES, tiny_knows
from areal_gym.models.hf.hf_loading import read_config
from areal_gym.models.hub import is_hub_name, model_from_hub
from areal_gym.models.tiny.checkpoint_files import read_config as read_config_json
from areal_gym.models.tiny.decoder import Decoder
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.models.tiny.hf_config import config_from_hf

PlannedModel: TypeAlias = "PretrainedConfig | DecoderConfig"
"""A model that transformers runs, or the tiny decoder."""


def model_to_plan(
    config: RunConfig, say: Callable[[str], None] = lambda line: None
) -> PlannedModel:
    """Return the config of `engine.model`; one on the hub is downloaded, after a line to `say`.

    The files of weights need not be there: a model is small if they would be.

    Raises:
        ConfigError: there is none, or it cannot be trained.
    """
    directory = Path(config.engine.model)
    if is_hub_name(config.engine.model):
        directory = model_from_hub(config.engine.model, say, wanted=("config.json",))
    facts = read_config_json(directory)
    backend = config.model.backend
    if backend == "tiny" or (backend == "auto" and tiny_knows(facts)):
        decoder = config_from_hf(facts)
        if backend == "tiny" or _file_bytes(directory, decoder) <= SMALL_BYTES:
            return decoder
    return read_config(directory, trusts_code=config.model.trust_remote_code)


def heads_of(model: PlannedModel) -> tuple[int, int]:
    """Return the heads of attention, and those whose keys and values are kept for each token."""
    text = model if isinstance(model, DecoderConfig) else model.get_text_config()
    num_heads = int(text.num_attention_heads)
    if getattr(text, "kv_lora_rank", None):  # multi-head latent attention keeps one latent
        return num_heads, 1
    return num_heads, int(getattr(text, "num_key_value_heads", None) or num_heads)


def vocab_size_of(model: PlannedModel) -> int:
    """Return the number of tokens that the model knows."""
    text = model if isinstance(model, DecoderConfig) else model.get_text_config()
    return int(text.vocab_size)


def _file_bytes(directory: Path, decoder: DecoderConfig) -> int:
    """Return the size of the files of weights; where there are none, as if in bfloat16."""
    files = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    if files:
        return files
    return 2 * sum(p.numel() for p in Decoder(decoder, device="meta").parameters())
