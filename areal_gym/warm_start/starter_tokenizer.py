"""The tokenizer of starter policies: trained on their demonstrations, and its files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
"""Tokens that are never part of a shown text."""
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens with single ids that are text: the policy writes them and environments read them."""
SPECIAL_TOKENS = CONTROL_TOKENS + TAG_TOKENS


def build_tokenizer(
    texts: Iterable[str], *, vocab_size: int, more_control_tokens: Sequence[str] = ()
) -> Tokenizer:
    """Train a byte-level BPE on `texts`, whole rendered dialogues, and on nothing else.

    Digits and operators are tokens of their own, so that numbers are copied digit by digit; the
    boiler-plate of a tool call merges into a few tokens. `more_control_tokens` are added to
    `CONTROL_TOKENS`.
    """
    control_tokens = (*CONTROL_TOKENS, *more_control_tokens)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9+\-*/]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=20,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in control_tokens])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAG_TOKENS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, max_context: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template into `directory`."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_context,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(starter_template())


def starter_template() -> str:
    """Return the chat template of starter policies."""
    return resources.files("areal_gym.warm_start").joinpath("chat_template.jinja").read_text()
