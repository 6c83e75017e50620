"""Two tiny policies of one shape, and what transformers computes with their weights."""

from __future__ import annotations

import inspect
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_gym.chat.vision import banned_ids_of
from areal_gym.engines.checkpoint_config import eos_token_ids, vocab_size_of
from areal_gym.images import image_store
from areal_gym.message_types import ImageRef

if TYPE_CHECKING:
    from torch import Tensor

    from areal_gym.models.tiny.decoder import Decoder

_BOUNDARY = 1e-4
"""Rounding may put a token inside or outside of a nucleus whose edge is this close."""
_BANNED = -1e4
"""The logit of ids that no engine may sample; finite, so that an entropy of zero is no NaN."""
_NUM_GREEDY = 3
"""The place in the greedy answer to `FIRST_PROMPT` at which the tiny policy writes its eos."""
FIRST_PROMPT = tuple(range(20, 60))
"""A prompt of a greedy answer that contains the end-of-text token of `tiny_policies`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePolicies:
    """Two checkpoints of one architecture and shape, with different weights."""

    first: Path
    """What the engine is started with."""
    second: Path
    """What is published to it."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        size = vocab_size_of(self.first)
        if size is None:
            raise ValueError(f"{self.first}/config.json has no vocab_size")
        return size

    @property
    def eos_ids(self) -> Sequence[int]:
        """The token ids with which the model itself ends a text."""
        return eos_token_ids(self.first)

    @property
    def banned_ids(self) -> Sequence[int]:
        """The token ids that no engine may sample: placeholders of pictures."""
        return banned_ids_of(self.first)


def tiny_policies(directory: Path, *, max_context: int = 512) -> EnginePolicies:
    """Write two Qwen3 checkpoints of 0.2 million parameters, with a tokenizer, in float32.

    Their weights are large enough that tokens differ in probability and greedy answers do not
    repeat one; the answer to the first prompt contains the model's end of text.
    """
    import torch

    from areal_gym.models.tiny import DecoderConfig, build_decoder, save_checkpoint
    from areal_gym.warm_start.starter_tokenizer import build_tokenizer, save_tokenizer

    tokenizer = build_tokenizer(["Make 17 from 3, 4 and 5."], vocab_size=320)
    tokenizer_dir = directory / "tokenizer"
    tokenizer_dir.mkdir(parents=True)
    save_tokenizer(tokenizer, tokenizer_dir, max_context=max_context)
    eos_id = tokenizer.token_to_id("<|im_end|>")
    config = DecoderConfig(
        architecture="qwen3",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the least that vLLM's kernels for CPUs have
        max_position_embeddings=max_context,
        initializer_range=0.3,
        tie_word_embeddings=True,
        eos_token_id=eos_id,
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )
    decoders = [build_decoder(config, seed=seed) for seed in (0, 1)]
    with torch.no_grad():  # embeddings are tied: with a larger row, eos is the likelier one
        token_id = _greedy_tokens(decoders[0], _NUM_GREEDY)[-1]
        embedding = decoders[0].lm_head_weight
        embedding[eos_id] = 1.1 * embedding[token_id]
    first, second = (
        save_checkpoint(decoder, directory / f"policy-{i}", tokenizer_dir=tokenizer_dir)
        for i, decoder in enumerate(decoders)
    )
    return EnginePolicies(first=first, second=second)


def _greedy_tokens(decoder: Decoder, num_tokens: int) -> list[int]:
    import torch

    from areal_gym.models.flat_batch import causal_attend

    ids = list(FIRST_PROMPT)
    for _ in range(num_tokens):
        places = torch.arange(len(ids))
        hidden = decoder.hidden_states(torch.tensor(ids), places, causal_attend([len(ids)]))
        ids.append(int(decoder.logits(hidden)[-1].argmax()))
    return ids[len(FIRST_PROMPT) :]


class ReferencePolicy:
    """A checkpoint as transformers computes it, whole sequences at once, in float32.

    Placeholders of pictures have no probability.
    """

    def __init__(self, policy: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        self._policy = policy
        self._banned_ids = list(banned_ids_of(policy))
        make: Any = AutoModelForImageTextToText if self._banned_ids else AutoModelForCausalLM
        self._network = make.from_pretrained(
            policy, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def add_to_weights(self, changes: Mapping[str, Tensor]) -> None:
        """Add each tensor to the weight of its name."""
        import torch

        parameters = dict(self._network.named_parameters())
        with torch.no_grad():
            for name, change in changes.items():
                parameters[name].add_(change)

    def logits(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], images: Sequence[ImageRef] = ()
    ) -> Tensor:
        """Return the logits from which each of `token_ids` is sampled, [T, V].

        `images` are the pictures of the prompt, whose bytes the process's image store has.
        """
        import torch

        ids = torch.tensor([[*prompt_ids, *token_ids]])
        given = self._pixels(ids, images) if images else {}
        with torch.no_grad():
            output = self._network(input_ids=ids, use_cache=False, **given)
        logits: Tensor = output.logits[0].double()
        logits[:, self._banned_ids] = _BANNED
        return logits[len(prompt_ids) - 1 : -1]

    def _pixels(self, ids: Tensor, images: Sequence[ImageRef]) -> dict[str, Any]:
        """Return the arguments by which the network gets pictures."""
        import torch
        from PIL import Image
        from transformers import AutoImageProcessor

        process = AutoImageProcessor.from_pretrained(self._policy, backend="pil")
        store = image_store()
        pictures = [Image.open(io.BytesIO(store.read(image.sha256))) for image in images]
        is_picture = torch.zeros_like(ids)
        for image in images:
            is_picture[0, image.start : image.start + image.length] = 1
        known = inspect.signature(self._network.forward).parameters
        kinds = {name: is_picture for name in ("mm_token_type_ids", "token_type_ids")}
        pixels = dict(process(images=pictures, return_tensors="pt"))
        return {name: value for name, value in (pixels | kinds).items() if name in known}


@lru_cache(maxsize=4)
def reference_policy(policy: Path) -> ReferencePolicy:
    """Return the checkpoint's reference, which is read once."""
    return ReferencePolicy(policy)


def log_distributions(
    logits_TV: Tensor, temperature: float = 1.0, *, top_p: float = 1.0, top_k: int = 0
) -> Tensor:
    """Return the log-probabilities of all tokens in the distribution that is sampled, [T, V].

    Temperature 0 is greedy, and its log-probabilities are those of temperature 1.
    """
    scaled_TV = logits_TV / (temperature or 1.0)
    if top_k:
        least_T1 = scaled_TV.topk(top_k).values[:, -1:]
        scaled_TV = scaled_TV.masked_fill(scaled_TV < least_T1, float("-inf"))
    if top_p < 1:
        probs_TV, order_TV = scaled_TV.softmax(-1).sort(descending=True)
        is_out_TV = probs_TV.cumsum(-1) - probs_TV >= top_p
        is_out_TV[:, 0] = False
        is_out_TV = is_out_TV.new_zeros(is_out_TV.shape).scatter(-1, order_TV, is_out_TV)
        scaled_TV = scaled_TV.masked_fill(is_out_TV, float("-inf"))
    return scaled_TV.log_softmax(-1)


def truncated_distributions(logits_TV: Tensor, temperature: float, top_p: float) -> list[Tensor]:
    """Return the distributions of a nucleus, with its edge a little further in and out."""
    return [
        log_distributions(logits_TV, temperature, top_p=top_p + shift)
        for shift in (-_BOUNDARY, _BOUNDARY)
    ]
