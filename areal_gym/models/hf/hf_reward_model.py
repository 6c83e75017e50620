"""A model of transformers that scores dialogues instead of generating text.

transformers has sequence classifiers of many architectures, and all of them are made alike: the
body under the name that it has in the causal language model, and a head called `score`. So is the
class here, for any architecture: whoever has one of that name reads what we write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from areal_gym.models.hf.hf_policy import HFPolicy
from areal_gym.models.lora_weights import NetworkTensor
from areal_gym.models.policy_model import DialogueScorer

HEAD = "score.weight"
LABELS: dict[str, Any] = {"id2label": {0: "reward"}, "label2id": {"reward": 0}}
"""The only label, as `config.json` names it."""


class HFRewardModel(HFPolicy, DialogueScorer):
    """Scores a dialogue with a linear head on the hidden state of its last token.

    The head is float32 and whole on every rank, whatever the body is: it is trained beside an
    adapter, too, when the body is frozen in bfloat16.

    Args:
        network: of a class that `classifier_of` returns; its own head is taken out of it.
        weight_1C: the head's weight.
        read_trunk: as in `HFPolicy`.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        weight_1C: Tensor,
        read_trunk: Callable[..., HFPolicy] | None = None,
    ) -> None:
        network.score = nn.Identity()
        super().__init__(network, read_trunk)
        self.score = nn.Linear(weight_1C.shape[1], 1, bias=False, device=weight_1C.device)
        self.score.weight = nn.Parameter(weight_1C.detach().float())

    def rewards(self, hidden_BC: Tensor) -> Tensor:
        """Map hidden states of last tokens, [B, C], to rewards, [B], float32."""
        rewards_B1: Tensor = self.score(hidden_BC)
        return rewards_B1.squeeze(1).float()

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """Return [N, V] for the check of packing: it predicts no tokens, any fixed map will do."""
        generator = torch.Generator().manual_seed(0)
        width = self.shape.hidden_size
        head_CV = torch.randn(width, self.shape.vocab_size, generator=generator) / width**0.5
        logits: Tensor = hidden_NC.float() @ head_CV.to(hidden_NC.device)
        return logits

    def network_tensors(self) -> Iterator[NetworkTensor]:
        """Yield the tensors of the body, and the head's."""
        yield from super().network_tensors()
        yield NetworkTensor(name=HEAD, sources=(HEAD,))

    def checkpoint_tensors(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return what `save_pretrained` of a classifier would write of it."""
        return {HEAD: tensor} if name == HEAD else super().checkpoint_tensors(name, tensor)


class _Classifier(GenericForSequenceClassification):  # type: ignore[misc]
    """transformers' recipe, called as `HFPolicy` calls causal language models."""

    def forward(
        self, input_ids: Tensor, *, logits_to_keep: Tensor, **kwargs: Any
    ) -> SequenceClassifierOutput:
        """Run the body; no token gets logits."""
        body = getattr(self, self.base_model_prefix)
        hidden_1NC: Tensor = body(input_ids=input_ids, **kwargs).last_hidden_state
        return SequenceClassifierOutput(logits=hidden_1NC[:, logits_to_keep])


def classifier_of(
    causal_class: type[PreTrainedModel], config: PretrainedConfig
) -> type[PreTrainedModel]:
    """Return the sequence classifier of an architecture; `config` is prepared for one label."""
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        part.num_labels = 1
    for name, value in LABELS.items():
        setattr(config, name, value)
    causal_name = causal_class.__name__
    known = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    name = known or f"{causal_name.partition('For')[0]}ForSequenceClassification"
    prefix = causal_class.base_model_prefix
    if prefix == "language_model":
        prefix = "model"  # llama4's prefix names no part of its causal model
    # Some names of weights are converted for one class only.
    if conversion := get_checkpoint_conversion_mapping(causal_name):
        register_checkpoint_conversion_mapping(name, conversion, overwrite=True)
    base = next(c for c in causal_class.__mro__[1:] if issubclass(c, PreTrainedModel))
    members = {"base_model_prefix": prefix, "__module__": causal_class.__module__}
    return type(name, (_Classifier, base), members)
