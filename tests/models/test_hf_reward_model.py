"""Reward models of any architecture that transformers runs: made of policies, trained, read."""

import random

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError
from areal_gym.models.backend import ModelLoader
from areal_gym.models.hf.hf_loading import build_policy, load_reward_model
from areal_gym.models.tiny.checkpoint_files import (
    fresh_directory,
    save_checkpoint,
    write_checkpoint,
)
from areal_gym.trainer.batch.bins import Row
from areal_gym.trainer.batch.examples import TokenRow
from areal_gym.trainer.batch.packing import pack
from areal_gym.trainer.objectives import reward_model
from areal_gym.trainer.objectives.reward_model import BradleyTerry
from areal_gym.trainer.objectives.supervised import Supervised
from areal_gym.trainer.parallel.fsdp import load_for_training
from areal_gym.trainer.parallel.worker import ProcessTrainer
from tests._support.tiny_architectures import tiny_config

LOADER = ModelLoader(backend="transformers", is_reward_model=True)
DENSE, TIED, EXPERTS = "olmo2", "gemma2", "qwen3_moe"
# All others were tried by hand; these differ in where the body is, and in how files name it.
NAMES = ["llama", "gemma3_text", "granite", "qwen3_moe", "deepseek_v3", "llama4_text"]
NAMES += ["qwen2_5_vl", "nemotron_h"]
SETTINGS = {"optimizer": "adamw", "lr": 1e-2}


def policy_in(path, name):
    config = tiny_config(name, tie_word_embeddings=name == TIED)
    build_policy(config, seed=0).network.save_pretrained(path)
    return path


def draw_head(model):
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    return model


def save(model, path, **more):
    with fresh_directory(path) as fresh:
        write_checkpoint(model, model.published(), fresh, **more)
    return path


def pairs(num=6):
    rng = random.Random(0)
    draw = lambda count: [rng.randrange(3, 100) for _ in range(count)]  # noqa: E731
    examples = []
    for _ in range(num):
        prompt = draw(5)
        rows = ([*prompt, *draw(rng.randrange(2, 9))] for _ in range(2))
        examples.append(
            tuple(TokenRow(token_ids=tuple(ids), mask=(False,) * len(ids)) for ids in rows)
        )
    return examples


def reward_of(model, ids):
    batch = pack([Row(token_ids=tuple(ids))])
    return model.rewards(model(batch, torch.tensor([len(ids) - 1])))


@pytest.mark.parametrize("name", NAMES)
def test_classifier_of_each_architecture_is_written_and_read(name, tmp_path):
    policy = build_policy(tiny_config(name), seed=0)
    policy.network.save_pretrained(tmp_path / "policy")
    model = load_reward_model(tmp_path / "policy")
    assert not model.score.weight.any()
    published = dict(draw_head(model).published())
    body = {n: t for n, t in policy.published() if n != "lm_head.weight"}
    assert published.keys() == {*body, "score.weight"}
    assert all(torch.equal(body[n], published[n]) for n in body)
    saved = save(model, tmp_path / "model")
    ids = list(range(3, 20))
    with torch.no_grad():
        reward = float(reward_of(model, ids))
        again = LOADER.load(saved)
        assert float(reward_of(again, ids)) == pytest.approx(reward, abs=1e-4)
        if name not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
            return
        theirs, report = transformers.AutoModelForSequenceClassification.from_pretrained(
            saved, output_loading_info=True
        )
        assert not report["missing_keys"] | report["unexpected_keys"]
        assert float(theirs(input_ids=torch.tensor([ids])).logits) == pytest.approx(
            reward, abs=1e-4
        )
        assert theirs.config.id2label == {0: "reward"}
        assert type(theirs).__name__ in model.hf_config()["architectures"]


@pytest.mark.parametrize("name", [DENSE, TIED, EXPERTS])
def test_packed_loss_is_that_of_separate_dialogues(name, tmp_path):
    model = draw_head(load_reward_model(policy_in(tmp_path, name)))
    examples = pairs()
    losses = []
    for chosen, rejected in examples:
        difference = reward_of(model, chosen.token_ids) - reward_of(model, rejected.token_ids)
        losses.append(-torch.nn.functional.logsigmoid(difference))
    expected = torch.stack(losses).mean()
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    learner = Supervised(model, TrainerConfig(**SETTINGS), objective=BradleyTerry())
    found = learner._measure_examples(examples, learns=True)
    assert found["loss"] == pytest.approx(float(expected.detach()), abs=1e-5)
    assert "score.weight" in gradients
    for n, p in model.named_parameters():
        if n in gradients:
            close = 1e-4 * float(gradients[n].abs().max()) + 1e-7
            torch.testing.assert_close(p.grad, gradients[n], rtol=0, atol=close)


@pytest.mark.parametrize(
    "name", [*(pytest.param(each, marks=pytest.mark.long) for each in (DENSE, TIED)), EXPERTS]
)
def test_two_ranks_learn_what_one_learns(name, tmp_path):
    policy, examples = policy_in(tmp_path, name), pairs()
    settings = TrainerConfig(**SETTINGS)
    alone = Supervised(LOADER.load(policy), settings, objective=BradleyTerry())
    expected = [alone.step(examples) for _ in range(3)]
    both = ProcessTrainer(
        Supervised,
        policy,
        settings.model_copy(update={"num_ranks": 2}),
        device="cpu",
        objective=BradleyTerry(),
        loader=LOADER,
    )
    try:
        found = [both.step(examples, 0) for _ in range(3)]
        weights = dict(both.weights())
        config = both.decoder.hf_config()
    finally:
        both.close()
    assert config["architectures"] == alone.decoder.hf_config()["architectures"]
    for key in ("train/loss", "train/grad_norm", "train/margin", "train/accuracy"):
        assert [m[key] for m in found] == pytest.approx([m[key] for m in expected], rel=1e-3)
    assert found[-1]["train/loss"] < found[0]["train/loss"]
    for n, tensor in alone.weights():
        torch.testing.assert_close(weights[n], tensor.detach(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_is_trained_beside_an_adapter(dtype, tmp_path):
    pytest.importorskip("peft", reason="pip install 'areal-gym[lora]'")
    settings = TrainerConfig(**SETTINGS, dtype=dtype, lora={"rank": 2})
    model = load_for_training(policy_in(tmp_path, EXPERTS), settings, loader=LOADER)
    assert model.score.weight.dtype == torch.float32
    learner = Supervised(model, settings, objective=BradleyTerry())
    before = {n: t.clone() for n, t in learner.weights()}
    losses = [learner.step(pairs())["train/loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    changed = {n for n, t in learner.weights() if not torch.equal(t, before[n])}
    assert "score.weight" in changed
    assert any("experts" in n for n in changed)
    assert "model.embed_tokens.weight" not in changed


def test_grader_reads_a_checkpoint_of_transformers(tiny_policy, tmp_path):
    starter = ModelLoader().load(tiny_policy)
    save_checkpoint(starter, tmp_path / "policy", tokenizer_dir=tiny_policy)
    model = draw_head(LOADER.load(tmp_path / "policy"))
    saved = save(model, tmp_path / "model", tokenizer_dir=tiny_policy)
    dialogues = [
        [{"role": "user", "content": "Make 17."}, {"role": "assistant", "content": answer}]
        for answer in ("3*4+5", "no")
    ]
    tiny, whole = (
        reward_model.load(saved, backend=backend).grade(dialogues)
        for backend in ("tiny", "transformers")
    )
    assert whole == pytest.approx(tiny, abs=1e-4)
    assert abs(whole[0] - whole[1]) > 1e-3


def test_reward_model_is_no_policy_and_has_one_label(tmp_path):
    saved = save(draw_head(load_reward_model(policy_in(tmp_path / "a", DENSE))), tmp_path / "model")
    with pytest.raises(ConfigError, match="holds a reward model"):
        ModelLoader(backend="transformers").load(saved)
    transformers.AutoModelForSequenceClassification.from_pretrained(
        saved, num_labels=3, ignore_mismatched_sizes=True
    ).save_pretrained(tmp_path / "three")
    with pytest.raises(ConfigError, match="3 labels"):
        LOADER.load(tmp_path / "three")
