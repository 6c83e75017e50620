"""Objectives on fixed data: formulas by hand, and gradients that know nothing of packing."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError, TrainError
from areal_gym.models.tiny.checkpoint_files import save_checkpoint
from areal_gym.models.tiny.scored_decoder import RewardModel, load_reward_model
from areal_gym.trainer.batch.examples import TokenRow, batch_of_step
from areal_gym.trainer.objectives.dpo import Dpo, is_preferred, preference_loss
from areal_gym.trainer.objectives.reward_model import BradleyTerry
from areal_gym.trainer.objectives.supervised import Sft, Supervised
from tests._support.picture_rows import seeing_policy, two_groups
from tests._support.plain_attention import causal_attend
from tests._support.tiny_training import CONFIG, random_ids, tiny_decoder


def row(rng, prompt=()):
    """A prompt, then turns of what is said and what is read."""
    ids, mask = list(prompt), [False] * len(prompt)
    for _ in range(rng.randint(1, 3)):
        said, read = random_ids(rng, 1, 8), random_ids(rng, 0, 4)
        ids += (*said, *read)
        mask += [True] * len(said) + [False] * len(read)
    return TokenRow(token_ids=tuple(ids), mask=tuple(mask), num_shared=len(prompt))


def single_rows(num=7, seed=0):
    rng = random.Random(seed)
    return [(row(rng, random_ids(rng, 2, 9)),) for _ in range(num)]


def pairs(num=6, seed=0):
    rng = random.Random(seed)
    prompts = [random_ids(rng, 2, 9) for _ in range(num)]
    return [(row(rng, prompt), row(rng, prompt)) for prompt in prompts]


def reward_model(tmp_path):
    save_checkpoint(tiny_decoder(), tmp_path / "policy")
    model = load_reward_model(tmp_path / "policy")
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    return model


SETTINGS = {"optimizer": "adamw", "lr": 1e-2, "max_grad_norm": 1e9}


@pytest.fixture(params=["sft", "dpo", "ipo", "rm"])
def case(request, tmp_path):
    """(decoder, objective, examples)"""
    if request.param == "sft":
        return tiny_decoder(), Sft(), single_rows()
    if request.param == "rm":
        return reward_model(tmp_path), BradleyTerry(), pairs()
    kind = "ipo" if request.param == "ipo" else "sigmoid"
    return tiny_decoder(1), Dpo(tiny_decoder(2), kind=kind, beta=0.3), pairs()


def logprobs_of(decoder, one):
    """Log-probabilities of the marked tokens of a row, without packing."""
    ids = torch.tensor(one.token_ids)
    hidden = decoder.hidden_states(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
    scores = (hidden @ decoder.lm_head_weight.T).log_softmax(-1)
    places = [t for t, is_marked in enumerate(one.mask) if is_marked]
    return torch.stack([scores[t - 1, ids[t]] for t in places])


def reward_of(model, one):
    ids = torch.tensor(one.token_ids)
    hidden = model.hidden_states(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
    return (hidden[-1] @ model.score.weight[0]).float()


def plain_loss(decoder, objective, examples):
    """The loss as the papers write it, one row at a time."""
    if isinstance(objective, Sft):
        return -torch.cat([logprobs_of(decoder, one) for (one,) in examples]).mean()
    losses = []
    for chosen, rejected in examples:
        if isinstance(objective, BradleyTerry):
            difference = reward_of(decoder, chosen) - reward_of(decoder, rejected)
            losses.append(-torch.log(torch.sigmoid(difference)))
            continue
        reference, is_ipo = objective._reference, objective._kind == "ipo"
        gains = [
            logprobs_of(decoder, row) - logprobs_of(reference, row) for row in (chosen, rejected)
        ]
        # The authors of IPO take means over a row's tokens.
        gained, lost = (gain.mean() if is_ipo else gain.sum() for gain in gains)
        h = gained - lost
        if is_ipo:
            losses.append((h - 1 / (2 * 0.3)) ** 2)
        else:
            losses.append(-torch.log(torch.sigmoid(0.3 * h)))
    return torch.stack(losses).mean()


def gradients(decoder, objective, examples, budget):
    """Loss and gradients of one packed, micro-batched step that changes nothing."""
    config = TrainerConfig(**SETTINGS, tokens_per_microbatch=budget)
    learner = Supervised(decoder, config, objective=objective)
    found = learner._measure_examples(examples, learns=True)
    grads = {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
    decoder.zero_grad()
    return found, grads


def relative_error(found, expected):
    """Of all gradients as one vector."""
    assert found.keys() == expected.keys()
    apart, whole = (
        torch.cat([grad.flatten().double() for grad in grads]).norm()
        for grads in ([found[name] - expected[name] for name in expected], expected.values())
    )
    return float(apart / whole)


@pytest.mark.parametrize("budget", [64, 4096])
def test_packed_loss_equals_padded_loss(case, budget):
    decoder, objective, examples = case
    found, packed = gradients(decoder, objective, examples, budget)
    loss = plain_loss(decoder, objective, examples)
    loss.backward()
    assert found["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    plain = {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}
    assert relative_error(packed, plain) < 1e-5


def test_micro_batches_do_not_change_the_gradient(case):
    decoder, objective, examples = case
    whole, one = gradients(decoder, objective, examples, 4096)
    parts, many = gradients(decoder, objective, examples, 64)
    assert whole == pytest.approx(parts, rel=1e-5, abs=1e-6)
    assert relative_error(one, many) < 1e-5


def test_row_order_does_not_change_the_gradient(case):
    decoder, objective, examples = case
    one, _ = gradients(decoder, objective, examples, 4096)
    other, _ = gradients(decoder, objective, examples[::-1], 4096)
    assert one == pytest.approx(other, rel=1e-5, abs=1e-6)


def test_unmarked_tokens_have_no_gradient():
    """Tokens that nothing marked comes after may be any: loss and gradients are the same."""
    rng = random.Random(3)
    prompt, said = random_ids(rng, 4, 4), random_ids(rng, 5, 5)
    rows = [
        TokenRow(token_ids=(*prompt, *said, *tail), mask=(False,) * 4 + (True,) * 5 + (False,) * 3)
        for tail in ((1, 2, 3), (44, 7, 19))
    ]
    decoder = tiny_decoder()
    (a, grads_a), (b, grads_b) = (gradients(decoder, Sft(), [(one,)], 4096) for one in rows)
    assert a == b
    for name, grad in grads_a.items():
        torch.testing.assert_close(grad, grads_b[name], rtol=0, atol=1e-7)
    # And a token is not asked for where the mask says nothing: the head's rows of tokens.
    ids = torch.tensor(rows[0].token_ids)
    hidden = decoder.hidden_states(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
    logits = (hidden @ decoder.lm_head_weight.T).detach().requires_grad_()
    chosen = logits.log_softmax(-1)[torch.arange(3, 8), ids[4:9]]
    (-chosen.mean()).backward()
    assert not logits.grad[8:].any()
    assert not logits.grad[:3].any()


def test_preference_losses_by_hand():
    h = torch.tensor([0.0, 2.0, -1.0], dtype=torch.float64)
    sigmoid = preference_loss(h, beta=0.5)
    assert sigmoid.tolist() == pytest.approx(
        [math.log(2), math.log(1 + math.exp(-1)), math.log(1 + math.exp(0.5))]
    )
    # 1 / (2 * 0.5) = 1
    assert preference_loss(h, kind="ipo", beta=0.5).tolist() == pytest.approx([1, 1, 4])
    assert is_preferred(h).tolist() == [0.5, 1, 0]


def test_preference_losses_are_finite_for_large_margins():
    h = torch.tensor([-1e4, 1e4], requires_grad=True)
    preference_loss(h, beta=1.0).sum().backward()
    assert h.grad.tolist() == [-1, 0]


def test_dpo_loss_starts_at_log_two():
    found, _ = gradients(tiny_decoder(), Dpo(tiny_decoder()), pairs(), 4096)
    assert found["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert found["margin"] == pytest.approx(0, abs=1e-5)


def test_reference_is_never_updated():
    reference = tiny_decoder(2)
    weights = {name: p.clone() for name, p in reference.named_parameters()}
    learner = Supervised(tiny_decoder(1), TrainerConfig(**SETTINGS), objective=Dpo(reference))
    learner.step(pairs())
    assert all(torch.equal(p, weights[name]) for name, p in reference.named_parameters())
    assert not any(p.requires_grad for p in reference.parameters())


def test_zero_beta_is_refused():
    with pytest.raises(ConfigError, match="beta = 0"):
        Dpo(tiny_decoder(), beta=0)


def test_supervised_loss_decreases(case):
    decoder, objective, examples = case
    learner = Supervised(decoder, TrainerConfig(**SETTINGS), objective=objective)
    before = learner.evaluate(examples)
    for _ in range(25):
        metrics = learner.step(examples)
    after = learner.evaluate(examples)
    assert after["loss"] < 0.5 * before["loss"]
    assert after["accuracy"] > before["accuracy"]
    assert metrics["train/grad_norm"] > 0
    assert metrics["train/tokens"] == sum(len(one.token_ids) for rows in examples for one in rows)


def test_sft_accuracy_by_hand():
    decoder = tiny_decoder()
    examples = single_rows()
    found = Supervised(decoder, TrainerConfig(), objective=Sft()).evaluate(examples)
    right = []
    for (one,) in examples:
        ids = torch.tensor(one.token_ids)
        hidden = decoder.hidden_states(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
        likeliest = (hidden @ decoder.lm_head_weight.T).argmax(-1)
        places = [t for t, is_marked in enumerate(one.mask) if is_marked]
        right.append([bool(likeliest[t - 1] == ids[t]) for t in places])
    flat = [value for values in right for value in values]
    assert found["accuracy"] == pytest.approx(sum(flat) / len(flat))
    assert found["exact"] == pytest.approx(sum(map(all, right)) / len(right))


def test_evaluation_does_not_change_training(case):
    decoder, objective, examples = case
    weights = {name: p.clone() for name, p in decoder.named_parameters()}
    Supervised(decoder, TrainerConfig(**SETTINGS), objective=objective).evaluate(examples)
    assert all(p.grad is None for p in decoder.parameters())
    assert all(torch.equal(p, weights[name]) for name, p in decoder.named_parameters())


def test_nonfinite_gradients_are_skipped_then_stop_the_run():
    decoder = tiny_decoder()
    learner = Supervised(decoder, TrainerConfig(**SETTINGS), objective=Sft())
    with torch.no_grad():
        decoder.model.norm.weight[0] = float("nan")
    before = decoder.model.embed_tokens.weight.clone()
    assert learner.step(single_rows())["train/skipped_updates"] == 1
    assert torch.equal(before, decoder.model.embed_tokens.weight)
    learner.step(single_rows())
    with pytest.raises(TrainError, match="3 times in a row"):
        learner.step(single_rows())


def test_restored_states_continue_training(case, tmp_path):
    decoder, objective, examples = case
    learner = Supervised(decoder, TrainerConfig(**SETTINGS, warmup_steps=5), objective=objective)
    learner.step(examples)
    weights = {name: tensor.clone() for name, tensor in learner.weights()}
    written = learner.save(tmp_path / "states")
    expected = learner.step(examples)
    decoder.load_state_dict(weights)
    again = Supervised(decoder, TrainerConfig(**SETTINGS, warmup_steps=5), objective=objective)
    written.result()
    again.load(tmp_path / "states")
    found = again.step(examples)
    assert found["train/lr"] == expected["train/lr"] == pytest.approx(1e-2 * 2 / 5)
    assert found["train/loss"] == expected["train/loss"]
    assert found["train/grad_norm"] == expected["train/grad_norm"]


def test_adapter_is_trained_and_base_weights_stay(case):
    decoder, objective, examples = case
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    learner = Supervised(decoder, TrainerConfig(**SETTINGS, lora={"rank": 2}), objective=objective)
    first, *_, last = (learner.step(examples)["train/loss"] for _ in range(8))
    assert last < first
    merged = dict(learner.weights())
    assert merged.keys() == before.keys()
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, before[name])}
    # Matrices of the layers, and the head that begins from nothing.
    assert {name.split(".")[0] for name in changed} <= {"model", "score"}
    assert ("score.weight" in changed) == ("score.weight" in before)
    assert "model.embed_tokens.weight" not in changed
    # What is trained is what a checkpoint needs besides.
    trained = sum(p.numel() for p in decoder.parameters() if p.requires_grad)
    assert trained < 0.5 * sum(p.numel() for p in before.values())
    kept = sum(t.numel() for n, t in learner.states().items() if n.startswith("adapter."))
    assert kept == trained


def test_bfloat16_master_weights_are_refused():
    with pytest.raises(ConfigError, match="float32"):
        Supervised(tiny_decoder().bfloat16(), TrainerConfig(), objective=Sft())


def test_each_epoch_visits_every_example():
    examples = single_rows(5)
    drawn = [batch_of_step(examples, step, 3, seed=7) for step in range(1, 11)]
    flat = [example for batch in drawn for example in batch]
    for epoch in range(6):
        assert set(flat[5 * epoch : 5 * epoch + 5]) == set(examples)
    assert flat[:5] != flat[5:10]
    assert batch_of_step(examples, 4, 3, seed=7) == drawn[3]
    assert batch_of_step(examples, 4, 3, seed=8) != drawn[3]


def test_reward_model_scores_the_last_token_and_needs_its_head(tmp_path):
    model = reward_model(tmp_path)
    (pair, *_) = pairs()
    found = Supervised(model, TrainerConfig(), objective=BradleyTerry()).evaluate([pair])
    chosen, rejected = (reward_of(model, one).item() for one in pair)
    assert found["chosen"] == pytest.approx(chosen, rel=1e-4)
    margin = torch.tensor(chosen - rejected)
    assert found["loss"] == pytest.approx(-float(F.logsigmoid(margin)), rel=1e-5)
    with pytest.raises(TypeError, match="reward model"):
        Supervised(tiny_decoder(), TrainerConfig(), objective=BradleyTerry()).evaluate([pair])
    assert isinstance(model, RewardModel)
    assert model.config == CONFIG


def test_supervised_passes_keep_within_the_patches_of_a_microbatch(tmp_path):
    def measured(most, directory):
        with seeing_policy("qwen3_vl", directory) as policy:
            examples = [
                (TokenRow(token_ids=row.token_ids, mask=marked(row), images=row.images),)
                for row in two_groups(policy)
            ]
            settings = {"lr": 1e-3, "vision": "full", "patches_per_microbatch": most}
            trainer = Supervised(policy, TrainerConfig.model_validate(settings), objective=Sft())
            numbers = []
            policy.vision.tower.register_forward_pre_hook(
                lambda module, args, kwargs: numbers.append(len((*args, *kwargs.values())[0])),
                with_kwargs=True,
            )
            metrics = trainer.step(examples)
            return numbers, metrics["train/loss"], metrics["train/grad_norm"]

    def marked(row):
        return [i >= row.num_shared + 1 for i in range(len(row.token_ids))]

    (whole, *more), loss, norm = measured(65536, tmp_path / "whole")
    parts, loss_of_parts, norm_of_parts = measured(128, tmp_path / "parts")
    assert (more, whole > 128) == ([], True)
    assert len(parts) > 1
    assert max(parts) <= 128
    assert loss_of_parts == pytest.approx(loss, rel=1e-5)
    assert norm_of_parts == pytest.approx(norm, rel=1e-4)
