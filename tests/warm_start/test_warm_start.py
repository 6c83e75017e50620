from __future__ import annotations

import json

import pytest
import torch
import transformers

import areal_gym
from areal_gym.chat import Renderer
from areal_gym.errors import TrainError
from areal_gym.models.tiny.checkpoint_files import load_checkpoint
from areal_gym.warm_start.starter_policy import Recipe, prepare_starter

SMALL = Recipe(
    hidden_size=32,
    ffn_size=64,
    head_dim=16,
    num_heads=2,
    num_kv_heads=1,
    num_tokenizer_texts=300,
    batch_size=4,
    warmup_steps=2,
    min_hold_steps=2,
    max_hold_steps=4,
    decay_steps=4,
    num_probes=4,
    probe_every=2,
    vocab_size=420,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AREAL_GYM_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)


def prepare(seed=0, env_id="tir", **kwargs):
    env = areal_gym.make(env_id)
    return prepare_starter(env, env_key=env_id, seed=seed, recipe=SMALL, **kwargs)


def test_starter_policy_is_cached():
    seen = []
    first = prepare(on_progress=lambda *facts: seen.append(facts))
    again = prepare(on_progress=lambda *facts: pytest.fail("made again"))
    assert not first.is_cached
    assert again.is_cached
    assert again.directory == first.directory
    assert again.facts == first.facts
    assert seen
    assert prepare(seed=1).directory != first.directory
    assert prepare(env_id="countdown").directory != first.directory
    assert not list(first.directory.parent.glob(".*"))  # no drafts are left


def test_same_seed_gives_the_same_starter_policy(tmp_path, monkeypatch):
    first = load_checkpoint(prepare().directory).state_dict()
    monkeypatch.setenv("AREAL_GYM_CACHE", str(tmp_path / "other"))
    second = load_checkpoint(prepare().directory).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_starter_policy_is_a_hugging_face_checkpoint():
    directory = prepare().directory
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    tools = [tool.schema() for tool in areal_gym.make("tir").tools]
    theirs = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=False
    )
    renderer = Renderer.from_checkpoint(directory)
    assert list(renderer.first_ids(messages, tools)) == theirs
    assert model.config.vocab_size == len(tokenizer)
    text = "<tool_call>\n{...}\n</tool_call> 37*48 é"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_each_digit_is_one_token():
    directory = prepare().directory
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert tokenizer.tokenize("37*48+12") == list("37*48+12")


def test_facts_name_the_demonstrator():
    starter = prepare()
    facts = json.loads((starter.directory / "warm_start.json").read_text())
    assert set(facts["demonstrators"]) <= {"careful", "hasty", "clumsy"}
    assert facts["num_steps"] == SMALL.max_hold_steps + SMALL.decay_steps
    assert starter.best_demonstrator == max(d["accuracy"] for d in facts["demonstrators"].values())


def test_unwritable_cache_hints_at_another_directory(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AREAL_GYM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(TrainError, match="cannot write the cache") as caught:
        prepare()
    assert "AREAL_GYM_CACHE=DIR" in caught.value.hints[0]
