"""A decoder that scores dialogues instead of generating text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from areal_gym.models.policy_model import DialogueScorer
from areal_gym.models.stored_types import read_stored_types
from areal_gym.models.tiny.checkpoint_files import (
    is_reward_model,
    read_config,
    read_weights,
    weight_files,
)
from areal_gym.models.tiny.decoder import Decoder
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.models.tiny.hf_config import config_from_hf


class RewardModel(Decoder, DialogueScorer):
    """Scores a dialogue with a linear head on the hidden state of its last token.

    Names and files are those of Hugging Face's sequence classification with one label; the
    constructor leaves the weights undefined.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(config, device=device, dtype=dtype)
        self.lm_head = None  # it predicts no tokens
        self.score = nn.Linear(config.hidden_size, 1, bias=False, device=device, dtype=dtype)

    def rewards(self, hidden_BC: Tensor) -> Tensor:
        """Map hidden states of last tokens, [B, C], to rewards, [B], float32."""
        rewards_B1: Tensor = self.score(hidden_BC)
        return rewards_B1.squeeze(1).float()

    def hf_config(self) -> dict[str, Any]:
        """Return the content of the checkpoint's `config.json`."""
        config = super().hf_config()
        (causal,) = config["architectures"]
        config["architectures"] = [causal.replace("ForCausalLM", "ForSequenceClassification")]
        return config | {"id2label": {"0": "reward"}, "label2id": {"reward": 0}}


def load_reward_model(
    path: Path | str, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> RewardModel:
    """Read a reward model, or make one from a policy, with a head of zeros.

    Raises:
        ConfigError: see `load_checkpoint`; or the checkpoint has other than one label.
    """
    path = Path(path)
    facts = read_config(path)
    model = RewardModel(config_from_hf(facts), device=device, dtype=dtype)
    without = () if is_reward_model(facts) else ("score.weight", "lm_head.weight")
    weights = read_weights(path, model, without=without)
    with torch.no_grad():
        model.score.weight.zero_()
        for name, tensor in weights.items():
            model.get_parameter(name).copy_(tensor)
    model.stored_types = read_stored_types(weight_files(path))
    return model
