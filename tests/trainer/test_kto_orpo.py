"""KTO and ORPO: by hand, the same however a batch is cut, and from files of labelled answers."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError, DataError
from areal_gym.trainer.batch.dialogue_files import Labelled, read_file
from areal_gym.trainer.batch.examples import TokenRow
from areal_gym.trainer.objectives.kto import Kto, kto_loss
from areal_gym.trainer.objectives.orpo import Orpo, log_odds
from areal_gym.trainer.objectives.supervised import Supervised
from tests._support.plain_attention import causal_attend
from tests._support.tiny_training import random_ids, tiny_decoder


def row(rng: random.Random, prompt: tuple[int, ...], *, is_desirable: bool = True) -> TokenRow:
    answer = random_ids(rng, 2, 7)
    mask = (False,) * len(prompt) + (True,) * len(answer)
    return TokenRow(
        token_ids=prompt + answer, mask=mask, num_shared=len(prompt), is_desirable=is_desirable
    )


def examples(seed: int = 0, num: int = 6):
    rng = random.Random(seed)
    made = []
    for i in range(num):
        prompt = random_ids(rng, 2, 5)
        made.append((row(rng, prompt, is_desirable=i % 3 > 0), row(rng, prompt)))
    return made


def logprobs_of(decoder, one):
    ids = torch.tensor(one.token_ids)
    hidden = decoder.hidden_states(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
    scores = (hidden @ decoder.lm_head_weight.T).log_softmax(-1)
    places = [t for t, is_marked in enumerate(one.mask) if is_marked]
    return torch.stack([scores[t - 1, ids[t]] for t in places])


def by_formula(decoder, objective, made):
    if isinstance(objective, Orpo):
        losses = []
        for pair in made:
            means = [logprobs_of(decoder, one).mean() for one in pair]
            odds = [(m.exp() / (1 - m.exp())).log() for m in means]
            losses.append(-means[0] - 0.5 * torch.log(torch.sigmoid(odds[0] - odds[1])))
        return torch.stack(losses).mean()
    reference = objective._reference

    def gained(one):
        return logprobs_of(decoder, one).sum() - logprobs_of(reference, one).sum()

    drift = torch.stack([gained(other).detach() for _, other in made]).mean()
    baseline = max(0.0, float(drift))
    losses = []
    for one, _ in made:
        sign, weight = (1, 1.0) if one.is_desirable else (-1, 1.5)
        losses.append(weight * (1 - torch.sigmoid(sign * 0.4 * (gained(one) - baseline))))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("name", ["kto", "orpo"])
@pytest.mark.parametrize("budget", [64, 4096])
def test_losses_and_gradients_are_the_papers_however_a_batch_is_cut(name, budget):
    made = examples(num=12)
    objective = Orpo(weight=0.5)
    if name == "kto":
        objective = Kto(tiny_decoder(2), beta=0.4, undesirable_weight=1.5)
    decoder = tiny_decoder(1)
    config = TrainerConfig(tokens_per_microbatch=budget, optimizer="adamw", max_grad_norm=1e9)
    trainer = Supervised(decoder, config, objective=objective)
    metrics = trainer._measure_examples(made, learns=True)
    gradient = torch.cat([p.grad.flatten() for p in decoder.parameters()])
    plain = tiny_decoder(1)
    loss = by_formula(plain, objective, made)
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-6)


def test_kto_loss_by_hand():
    gained, good = torch.tensor([1.0, 1.0]), torch.tensor([True, False])
    losses = kto_loss(gained, 0.5, good, beta=2.0, desirable_weight=3.0).tolist()
    assert losses == pytest.approx([3 / (1 + math.e), 1 / (1 + math.exp(-1))])


def test_log_odds_by_hand():
    odds = log_odds(torch.tensor([0.25, 1.0]).log()).tolist()
    assert odds[0] == pytest.approx(math.log(1 / 3))
    assert math.isfinite(odds[1])


@pytest.mark.parametrize("name", ["kto", "orpo"])
def test_good_answers_become_likelier_and_bad_ones_less(name):
    made = examples(num=6)
    decoder = tiny_decoder(1)
    objective = Kto(tiny_decoder(1), beta=0.3) if name == "kto" else Orpo(weight=1.0)
    trainer = Supervised(decoder, TrainerConfig(optimizer="adamw", lr=3e-3), objective=objective)
    before = trainer.evaluate(made)
    for _ in range(15):
        metrics = trainer.step(made)
        assert metrics["train/skipped_updates"] == 0
    after = trainer.evaluate(made)
    assert after["loss"] < before["loss"] - 0.05
    assert after["accuracy"] == 1.0


def test_settings_without_effect_are_refused():
    for make in (lambda: Kto(tiny_decoder(), beta=0.0), lambda: Orpo(weight=0.0)):
        with pytest.raises(ConfigError, match="must be above 0"):
            make()


def test_files_of_labelled_answers(tmp_path):
    file = tmp_path / "answers.jsonl"
    rows = [
        {"prompt": "2+2?", "completion": "4", "label": True},
        {"messages": [{"role": "user", "content": "2+3?"}], "completion": "6", "label": False},
        {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
    ]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    items = read_file(file, is_preference=False, is_labelled=True)
    assert [isinstance(item, Labelled) for item in items] == [True] * 4
    assert [item.is_desirable for item in items] == [True, False, True, False]
    assert [item.completion[0]["content"] for item in items] == ["4", "6", "2", "3"]
    assert items[0].completion[0]["role"] == "assistant"
    file.write_text('{"prompt": "a", "completion": "b", "label": 1}\n')
    with pytest.raises(DataError, match="true or false is needed"):
        read_file(file, is_preference=False, is_labelled=True)
