"""Reward models as checkpoints and as graders; transformers reads the same numbers."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from areal_gym.errors import ConfigError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint, save_checkpoint
from areal_gym.models.tiny.scored_decoder import load_reward_model
from areal_gym.trainer.objectives import reward_model

DIALOGUES = [
    [{"role": "user", "content": "Make 17."}, {"role": "assistant", "content": "3*4+5"}],
    [{"role": "user", "content": "Make 9 from 4 and 5."}, {"role": "assistant", "content": "4"}],
]


@pytest.fixture
def saved(tiny_policy, tmp_path):
    model = load_reward_model(tiny_policy)
    assert not model.score.weight.any()
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    return save_checkpoint(model, tmp_path / "model", tokenizer_dir=tiny_policy)


def test_transformers_computes_the_same_rewards(saved):
    rewards = reward_model.load(saved).grade(DIALOGUES)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(saved)
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    assert theirs.config.num_labels == 1
    for dialogue, reward in zip(DIALOGUES, rewards, strict=True):
        text = tokenizer.apply_chat_template(dialogue, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            assert float(theirs(input_ids=ids).logits) == pytest.approx(reward, abs=1e-4)
    assert abs(rewards[0] - rewards[1]) > 1e-3


def test_scores_one_dialogue_or_many(saved):
    grade = reward_model.load(saved)
    assert [grade(dialogue) for dialogue in DIALOGUES] == pytest.approx(
        grade.grade(DIALOGUES), abs=1e-5
    )


def test_reward_model_is_refused_as_policy(saved):
    with pytest.raises(ConfigError, match="reward model"):
        load_checkpoint(saved)


def test_classifier_with_several_labels_is_refused(saved):
    weights = transformers.AutoModelForSequenceClassification.from_pretrained(
        saved, num_labels=3, ignore_mismatched_sizes=True
    )
    weights.save_pretrained(saved)
    assert json.loads((saved / "config.json").read_text())["id2label"]
    with pytest.raises(ConfigError, match="shape"):
        load_reward_model(saved)
