"""The advantage `igpo`: by hand, and the probabilities of answers that it takes."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from areal_gym.config import TrainerConfig
from areal_gym.engines.scripted import byte_renderer
from areal_gym.errors import ConfigError, NotFiniteError
from areal_gym.rollout.group_json import dump_row, pack_group, unpack_group
from areal_gym.runs.known_answers import known_answers
from areal_gym.testing import check_advantage_estimator
from areal_gym.trainer.algorithms.advantages import AdvantageInputs, estimate, grpo
from areal_gym.trainer.algorithms.answer_advantages import igpo
from areal_gym.trainer.algorithms.losses import ppo_clip
from areal_gym.trainer.answer_probs import KnownAnswer, with_answer_probs
from areal_gym.trainer.objectives.distillation import PolicyTeacher
from areal_gym.trainer.trainer import Trainer
from areal_gym.types import Group, Task, TokenSpan, Trajectory
from tests._support.plain_attention import causal_attend
from tests._support.tiny_training import batch, tiny_decoder, trajectory

# Two siblings: three turns and success, two turns and failure.
PROBS, LENGTHS, REWARDS = [[0.1, 0.4, 0.6], [0.1, 0.3]], [[2, 1, 2], [1, 3]], [1.0, 0.0]


def inputs_of(probs=PROBS, lengths=LENGTHS, rewards=REWARDS, group_ids=(0, 0)):
    per_token = [
        p
        for ps, ns in zip(probs, lengths, strict=True)
        for p, n in zip(ps, ns, strict=True)
        for _ in range(n)
    ]
    return AdvantageInputs.from_turns(
        [[0.0] * (len(ns) - 1) + [reward] for ns, reward in zip(lengths, rewards, strict=True)],
        lengths,
        list(group_ids),
        answer_probs_T=torch.tensor(per_token, dtype=torch.float64),
    )


def by_turn(inputs, lengths=LENGTHS, **settings):
    """The advantage of each turn; its tokens share it."""
    values = iter(estimate(igpo, inputs, **settings).advantages_T.tolist())
    turns = []
    for ns in lengths:
        rows = [[next(values) for _ in range(n)] for n in ns]
        assert all(len(set(row)) == 1 for row in rows)
        turns.append([row[0] for row in rows])
    return turns


def test_gains_and_outcomes_by_hand():
    # Gains 0.3, 0.2 and 0.2: mean 0.2333, deviation 0.057735. Outcomes: 0.70711 and -0.70711.
    gains, outcome = (1.154701, -0.577350, -0.577350), 0.707107
    last = [outcome, -outcome]
    middle = gains[1] + 0.5 * last[0]
    expected = [
        [gains[0] + 0.5 * middle, middle, last[0]],
        [gains[2] + 0.5 * last[1], last[1]],
    ]
    for turns, hand in zip(by_turn(inputs_of(), discount=0.5), expected, strict=True):
        assert turns == pytest.approx(hand, abs=1e-4)


def test_gains_and_outcomes_may_be_normalised_together():
    earned = [0.3, 0.2, 1.0, 0.2, 0.0]
    mean, deviation = statistics.fmean(earned), statistics.stdev(earned)
    a, b, c, d, e = ((value - mean) / deviation for value in earned)
    turns = by_turn(inputs_of(), normalises_jointly=True)
    assert turns[0] == pytest.approx([a + b + c, b + c, c], abs=1e-4)
    assert turns[1] == pytest.approx([d + e, e], abs=1e-4)


def test_without_gains_it_is_grpo():
    inputs = inputs_of()
    known = estimate(grpo, inputs).advantages_T
    assert estimate(igpo, inputs, gain_weight=0.0).advantages_T.equal(known)


def test_a_group_of_equal_rewards_still_teaches():
    inputs = inputs_of(rewards=[0.0, 0.0])
    assert not estimate(grpo, inputs).advantages_T.any()
    first, second = by_turn(inputs)
    assert first == pytest.approx([0.577350, -0.577350, 0.0], abs=1e-4)
    assert second == pytest.approx([-0.577350, 0.0], abs=1e-4)


def test_groups_do_not_mix():
    two = inputs_of(PROBS * 2, LENGTHS * 2, [1.0, 0.0, 5.0, 5.0], [3, 3, 8, 8])
    assert by_turn(two, LENGTHS * 2)[:2] == by_turn(inputs_of())


@pytest.mark.parametrize("mode", ["separate", "joint"])
def test_igpo_gives_the_numbers_of_its_authors(mode):
    # `verl/trainer/ppo/core_algos.py` of their IGPO (February 2026). It divides by the deviation
    # over n members, we by the unbiased one, over n - 1. Both groups have 4 outcomes and 8 gains.
    numbers = json.loads((Path(__file__).parent / "igpo_numbers.json").read_text())
    names = ("probs", "lengths", "rewards", "group_ids")
    inputs = inputs_of(*(numbers[name] for name in names))
    of_outcomes, of_gains, of_both = math.sqrt(4 / 3), math.sqrt(8 / 7), math.sqrt(12 / 11)
    settings, ratio = {
        "separate": ({"gain_weight": of_gains / of_outcomes}, of_outcomes),
        "joint": ({"normalises_jointly": True}, of_both),
    }[mode]
    turns = by_turn(inputs, numbers["lengths"], discount=numbers["discount"], **settings)
    ours = [ratio * advantage for turn in turns for advantage in turn]
    assert ours == pytest.approx(numbers[mode], abs=1e-5)


@pytest.mark.parametrize("settings", [{}, {"discount": 0.9}, {"normalises_jointly": True}])
def test_igpo_keeps_the_contract(settings):
    compares = "nothing" if settings else "siblings"
    check_advantage_estimator(igpo, compares=compares, **settings)


def test_wrong_inputs_are_refused():
    with pytest.raises(ConfigError, match="discount"):
        estimate(igpo, inputs_of(), discount=0.0)
    with pytest.raises(ConfigError, match="only one member"):
        estimate(igpo, inputs_of(group_ids=(0, 1)))
    with pytest.raises(ConfigError, match="batch has no probabilities of answers"):
        estimate(igpo, replace(inputs_of(), answer_probs_T=None))
    with pytest.raises(NotFiniteError, match="answer_probs_T"):
        estimate(igpo, inputs_of(probs=[[0.1, math.nan, 0.6], [0.1, 0.3]]))


# ---- where the probabilities come from ---------------------------------------------------------


def trainer() -> Trainer:
    config = TrainerConfig(algorithm="igpo", lr=1e-3)
    return Trainer(tiny_decoder(), config, advantage=igpo, loss=ppo_clip)


def prob_after(prompt, lead, answer):
    """exp of the mean log-probability, by one plain pass of the model."""
    decoder, ids = tiny_decoder(), torch.tensor([*prompt, *lead, *answer])
    with torch.no_grad():
        hidden = decoder.hidden_states(ids, torch.arange(len(ids)), causal_attend([len(ids)]))
        logprobs = (hidden @ decoder.lm_head_weight.T).log_softmax(-1)
    start = len(ids) - len(answer)
    return math.exp(
        statistics.fmean(float(logprobs[i - 1, ids[i]]) for i in range(start, len(ids)))
    )


def annotated(groups, answer_of):
    return asyncio.run(with_answer_probs(groups, PolicyTeacher(trainer()), answer_of))


def test_the_answer_is_scored_after_what_the_engine_saw():
    rng = random.Random(4)
    linear = trajectory(rng, (1, 2, 3), num_turns=3)
    # A history that was rewritten: the second turn has a prompt of its own.
    whole = trajectory(rng, (5, 6), num_turns=2)
    first, second = (span for span in whole.spans if span.origin == "policy")
    forked = replace(
        whole,
        spans=(
            whole.spans[0],
            first,
            TokenSpan(origin="prompt", token_ids=(8, 9, 10), turn=1, branch=1),
            replace(second, branch=1),
        ),
    )
    group = Group(id="g", task=linear.task, trajectories=(linear, forked))
    lead, answer = (11, 12), (7, 20, 30)
    (scored,) = annotated([group], lambda task: KnownAnswer(lead, answer))
    ids, prompts = [], []
    for span in linear.spans:
        if span.origin == "policy":
            prompts.append(ids.copy())
        ids += span.token_ids
    shown = [turn.answer_prob for turn in scored.trajectories[0].turns]
    assert shown == pytest.approx([prob_after(p, lead, answer) for p in prompts], rel=1e-4)
    shown = [turn.answer_prob for turn in scored.trajectories[1].turns]
    prompts = [(5, 6), (8, 9, 10)]
    assert shown == pytest.approx([prob_after(p, lead, answer) for p in prompts], rel=1e-4)


def test_probabilities_survive_json_and_reach_the_trainer():
    groups = annotated(batch(seed=3), lambda task: KnownAnswer((), (4, 5)))
    for group in groups:
        assert unpack_group(json.loads(dump_row(pack_group(group)))) == group
        for played in group:
            assert Trajectory.from_dict(json.loads(json.dumps(played.to_dict()))) == played
            assert all(0 < turn.answer_prob < 1 for turn in played.turns)
    learner = trainer()
    before = [tensor.clone() for _, tensor in learner.weights()]
    learner.step(groups, version=0)
    assert any(not a.equal(b) for a, (_, b) in zip(before, learner.weights(), strict=True))
    rows = iter(learner.trained_tokens())
    for group in groups:
        probs = [[turn.answer_prob for turn in t.turns] for t in group]
        lengths = [[len(s) for s in t.spans if s.origin == "policy"] for t in group]
        hand = by_turn(inputs_of(probs, lengths, group.rewards_G, [0] * len(group)), lengths)
        for turns, ns in zip(hand, lengths, strict=True):
            expected = [value for value, n in zip(turns, ns, strict=True) for _ in range(n)]
            assert list(next(rows)["advantages"]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("template", "lead", "answer"),
    [
        ("{answer}", "", "42"),
        ("The answer is {answer}", "The answer is ", "42"),
        (r"\boxed{{{answer}}}", r"\boxed{", "42"),
        ("{answer} from {unit}!", "", "42 from km"),
    ],
)
def test_only_the_tasks_own_words_count(template, lead, answer):
    renderer = byte_renderer()
    answer_of = known_answers(template, renderer)
    task = Task(id="t", data={"answer": 42, "unit": "km"})
    mixed = Task(id="m/t", data={"env": "m", "task": task.to_dict()})
    for one in (task, mixed):
        known = answer_of(one)
        assert renderer.decode(known.lead_ids) == lead
        assert renderer.decode(known.token_ids) == answer


def test_templates_without_fields_and_tasks_without_answers_are_refused():
    with pytest.raises(ConfigError, match="names no field"):
        known_answers("42", byte_renderer())
    answer_of = known_answers("{answer}", byte_renderer())
    with pytest.raises(
        ConfigError, match=r"advantage_kwargs\.answer = '\{answer\}' does not fit"
    ) as e:
        answer_of(Task(id="pile/3", data={"stones": 3}))
    assert "stones" in str(e.value.hints)
    group = Group(id="g", task=Task(id="t", data={}), trajectories=batch()[0].trajectories)
    with pytest.raises(ConfigError, match="has no tokens"):
        annotated([group], lambda task: KnownAnswer((1,), ()))
