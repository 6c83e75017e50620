"""Advantages of episodes that several roles play, by hand and by SPIRAL's algorithm."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from areal_gym.config import TrainerConfig
from areal_gym.errors import ConfigError
from areal_gym.plugins import registry
from areal_gym.trainer.batch.sequences import sequences_of
from areal_gym.trainer.trainer import Trainer
from areal_gym.types import Group, TokenSpan, Trajectory
from tests._support.tiny_training import random_ids, tiny_decoder, trajectory

PROMPT = (1, 2, 3)


def game(rng: random.Random, rewards: dict[str, float], fixed: str = "") -> Trajectory:
    """An episode in which each role has a branch of one turn; a fixed role's has no tokens."""
    shape = trajectory(rng, PROMPT)
    spans, turns = [], []
    for turn, (role, reward) in enumerate(rewards.items()):
        is_fixed = role == fixed
        turns.append(replace(shape.turns[0], role=role, reward=reward, is_fixed=is_fixed))
        if not is_fixed:
            ids = random_ids(rng, 2, 6)
            facts = {"turn": turn, "branch": turn}
            spans.append(TokenSpan(origin="prompt", token_ids=PROMPT, **facts))
            logprobs = tuple(-4 + rng.random() for _ in ids)
            spans.append(
                TokenSpan(
                    origin="policy", token_ids=ids, logprobs=logprobs, policy_version=0, **facts
                )
            )
    return replace(shape, spans=tuple(spans), turns=tuple(turns))


def group_of(*members: Trajectory) -> Group:
    return Group(id=members[0].id, task=members[0].task, trajectories=members)


def trainer_of(algorithm: str, **settings: Any) -> Trainer:
    config = TrainerConfig(algorithm=algorithm, lr=1e-3, **settings)
    plugins = registry()
    return Trainer(
        tiny_decoder(),
        config,
        advantage=plugins.load("advantages", config.advantage),
        loss=plugins.load("losses", config.loss),
    )


def step(trainer: Trainer, groups: list[Group]) -> list[tuple[int, str, float]]:
    """Make a step; return (episode, role, advantage) of each row that was trained on."""
    trainer.step(groups, version=0)
    rows = [row for row in sequences_of(groups) if row.num_trainable]
    trained = trainer.trained_tokens()
    assert [row["trajectory"] for row in trained] == [row.episode_id for row in rows]
    for row in trained:
        assert set(row["advantages"]) == {row["advantages"][0]}
    return [
        (row.episode_id, row.role, known["advantage"])
        for row, known in zip(rows, trained, strict=True)
    ]


def test_siblings_are_compared_within_a_role():
    rng = random.Random(0)
    games = [
        game(rng, {"buyer": 3.0, "seller": 10.0}),
        game(rng, {"buyer": 1.0, "seller": 30.0}),
        game(rng, {"buyer": 2.0, "seller": 20.0}),
    ]
    assert step(trainer_of("dr_grpo"), [group_of(*games)]) == [
        (0, "buyer", 1.0),
        (1, "buyer", -1.0),
        (2, "buyer", 0.0),
        (0, "seller", -10.0),
        (1, "seller", 10.0),
        (2, "seller", 0.0),
    ]


def test_rae_takes_the_mean_of_the_role_that_wrote():
    rng = random.Random(1)
    games = [
        game(rng, {"first": 1.0, "second": 0.0}),
        game(rng, {"first": 1.0, "second": -1.0}),
    ]
    trainer = trainer_of("rae")
    weight = 1 - 0.95**2  # of the newest two rewards, in each role
    expected = [1 - weight, 1 - weight, 0.5 * weight, -1 + 0.5 * weight]
    shown = step(trainer, [group_of(*games)])
    assert [role for _, role, _ in shown] == ["first", "first", "second", "second"]
    assert [advantage for *_, advantage in shown] == pytest.approx(expected, abs=1e-5)


def test_rae_is_spirals_algorithm_when_a_step_has_one_game():
    # Algorithm 1 of Liu et al. 2025 (2506.24119): for each role, b <- 0.95 b + 0.05 R from b = 0,
    # then A = R - b.
    rng = random.Random(2)
    trainer, means = trainer_of("rae"), {"first": 0.0, "second": 0.0}
    for _ in range(6):
        won = float(rng.random() < 0.7)
        rewards = {"first": won, "second": 1 - won}
        expected = []
        for role, reward in rewards.items():
            means[role] = 0.95 * means[role] + 0.05 * reward
            expected.append((0, role, reward - means[role]))
        shown = step(trainer, [group_of(game(rng, rewards))])  # a group of one
        assert [row[:2] for row in shown] == [row[:2] for row in expected]
        assert [row[2] for row in shown] == pytest.approx([row[2] for row in expected], abs=1e-5)


@pytest.mark.parametrize("algorithm", ["dr_grpo", "rae"])
def test_a_fixed_role_changes_neither_weights_nor_advantages(algorithm):
    def games(winnings):
        rng = random.Random(3)
        return [
            group_of(
                game(rng, {"policy": 1.0, "other": winnings}, fixed="other"),
                game(rng, {"policy": 0.0, "other": -winnings}, fixed="other"),
            )
        ]

    steps = []
    for winnings in (0.0, 50.0):
        trainer = trainer_of(algorithm)
        shown = step(trainer, games(winnings))
        assert [role for _, role, _ in shown] == ["policy", "policy"]
        steps.append((shown, [tensor.clone() for _, tensor in trainer.weights()]))
    assert steps[0][0] == steps[1][0]
    assert all(one.equal(other) for one, other in zip(steps[0][1], steps[1][1], strict=True))


def graded(rng: random.Random, parts: dict[str, dict[str, float] | float]) -> Trajectory:
    """An episode whose roles are paid by reward parts, or by a number alone."""
    sums = {r: sum(p.values()) if isinstance(p, dict) else p for r, p in parts.items()}
    played = game(rng, sums)
    given = [p if isinstance(p, dict) else {} for p in parts.values()]
    turns = [replace(t, reward_parts=p) for t, p in zip(played.turns, given, strict=True)]
    return replace(played, turns=tuple(turns))


@pytest.mark.parametrize("weights", [None, {"right": 1.0, "tidy": 1.0}])
def test_gdpo_teaches_roles_without_parts_by_their_rewards(weights):
    """A role that has no parts beside one that has some: its rewards are its only part."""
    rng = random.Random(5)
    members = [
        graded(rng, {"a": paid, "b": {"right": right, "tidy": 0.5}})
        for paid, right in ((5.0, 1.0), (3.0, 0.0), (7.0, 1.0))
    ]
    settings = {} if weights is None else {"advantage_kwargs": {"weights": weights}}
    shown = step(trainer_of("gdpo", **settings), [group_of(*members)])
    low, middle, high = sorted(advantage for _, role, advantage in shown if role == "a")
    assert middle - low == pytest.approx(high - middle, rel=1e-3)  # of 3, 5 and 7
    assert middle - low > 0.5
    assert len({round(advantage, 6) for _, role, advantage in shown if role == "b"}) == 2


def test_gdpo_counts_a_part_that_a_later_batch_lacks_as_nothing():
    rng = random.Random(6)
    trainer = trainer_of("gdpo", advantage_kwargs={"weights": {"right": 1.0}})
    step(trainer, [group_of(*(graded(rng, {"a": {"right": r, "tidy": 1.0}}) for r in (0.0, 1.0)))])
    without = [group_of(*(graded(rng, {"a": {"tidy": r}}) for r in (0.0, 1.0)))]
    assert [advantage for *_, advantage in step(trainer, without)] == [0.0, 0.0]
    with pytest.raises(ConfigError, match="no part 'right'"):
        trainer_of("gdpo", advantage_kwargs={"weights": {"right": 1.0}}).step(without, version=0)
