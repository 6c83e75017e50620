"""Episodes that several roles play: who speaks, what is recorded, and what is trained on."""

from __future__ import annotations

import asyncio
import json
from types import MappingProxyType

import pytest

from areal_gym.agents.chat import ChatAgent
from areal_gym.config import Layout
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.mix import MixedEnv
from areal_gym.envs.nim import NimEnv, best_move
from areal_gym.episode_roles import groups_by_role, part_of, rewards_by_role, roles_of
from areal_gym.errors import EpisodeError
from areal_gym.rollout.episode import play_episode
from areal_gym.rollout.eval_report import make_report
from areal_gym.rollout.filters import ZeroVarianceFilter, rejection
from areal_gym.rollout.group_json import dump_row, pack_group, unpack_group
from areal_gym.rollout.stats import batch_metrics
from areal_gym.runs.role_policies import GoldPolicy
from areal_gym.trainer.batch.rank_batches import divide
from areal_gym.trainer.batch.sequences import sequences_of
from areal_gym.types import Group, StopReason, Task, Trajectory
from tests._support.sums_env import RecordingEngine

RENDERER = byte_renderer()


def pile(stones):
    return Task(id=f"pile/{stones}", data={"stones": stones})


def play(moves, stones=7, env=None, **options):
    """Play a game whose moves, of both roles in turn, are scripted."""
    env = env or NimEnv()
    texts = [move if isinstance(move, str) else env.move(move) for move in moves]
    remaining = iter(texts)
    engine = ScriptedEngine(lambda *_: next(remaining))
    options.setdefault("options", {"task": pile(stones)})
    return asyncio.run(play_episode(env, ChatAgent(), engine, RENDERER, **options))


def group_of(*trajectories):
    return Group(id="g", task=trajectories[0].task, trajectories=trajectories)


def test_each_role_has_a_dialogue_of_its_own():
    trajectory = play([3, 1, 2, 1], stones=7)  # first, second, first, second
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert [turn.role for turn in trajectory.turns] == ["first", "second", "first", "second"]
    assert [turn.state_key for turn in trajectory.turns] == ["7", "4", "3", "1"]
    assert rewards_by_role(trajectory) == {"first": 0.0, "second": 1.0}
    assert trajectory.num_forks == 0
    texts = {
        trajectory.turns[spans[0].turn].role: RENDERER.decode(
            [id for span in spans for id in span.token_ids]
        )
        for spans in trajectory.branches
    }
    assert "7 stones are left" in texts["first"]
    assert "3 stones are left" in texts["first"]
    assert "4 stones are left" not in texts["first"]
    assert "4 stones are left" in texts["second"]


def test_what_the_engine_saw_is_recorded_per_role():
    class Chatter(TextEnv):
        roles = ("a", "b", "c")
        max_turns = 9

        def sample_task(self, rng, options):
            return Task(id="t", data={})

        def first_messages(self, task):
            return [{"role": "user", "content": "you are a"}]

        async def respond(self, message):
            role = self.roles[self.num_turns % 3]
            said = {"role": "user", "content": f"{role}, turn {self.num_turns}"}
            return Response(messages=[said], role=role)

    engine = RecordingEngine(publishes=True)  # each call is sampled by two versions
    trajectory = asyncio.run(play_episode(Chatter(), ChatAgent(), engine, RENDERER, seed=5))
    assert [turn.role for turn in trajectory.turns] == [*"abc"] * 3
    assert len(engine.log) == len(trajectory.branches) == 3
    seen = {tuple((*calls[-1][0], *calls[-1][1].token_ids)) for calls in engine.log.values()}
    rows = {row.role: row for row in sequences_of([group_of(trajectory)])}
    assert {tuple(row.token_ids) for row in rows.values()} == seen
    assert rows.keys() == {*"abc"}
    for role, row in rows.items():
        part = part_of(trajectory, role)
        assert [*row.token_ids] == [*part.token_ids]
        assert set(row.turn_ids) == {0, 1, 2}
        assert [*row.trained("versions")] == [
            version
            for span in part.spans
            if span.origin == "policy"
            for version in [span.policy_version] * len(span)
        ]


def test_roles_survive_json_and_the_journal():
    group = group_of(play([3, 1, 2, 1]), play([3, 4]))
    assert unpack_group(json.loads(dump_row(pack_group(group)))) == group
    for trajectory in group:
        assert Trajectory.from_dict(json.loads(json.dumps(trajectory.to_dict()))) == trajectory


def test_siblings_are_compared_with_the_same_role():
    games = [play([3, 1, 2, 1]), play([3, 1, 3]), play([9])]  # second, first, nobody wins
    assert [rewards_by_role(game) for game in games] == [
        {"first": 0.0, "second": 1.0},
        {"first": 1.0, "second": 0.0},
        {"first": 0.0},
    ]
    rows = sequences_of([group_of(*games), group_of(*games)])
    shown = [(row.group_id, row.trajectory_id, row.episode_id, row.role) for row in rows]
    assert shown == [
        *[(0, 0, 0, "first"), (0, 1, 1, "first"), (0, 2, 2, "first")],
        *[(1, 3, 0, "second"), (1, 4, 1, "second")],
        *[(2, 5, 3, "first"), (2, 6, 4, "first"), (2, 7, 5, "first")],
        *[(3, 8, 3, "second"), (3, 9, 4, "second")],
    ]
    assert [row.reward for row in rows[:5]] == [0.0, 1.0, 0.0, 1.0, 0.0]


def test_a_role_without_siblings_is_not_compared():
    games = [play([3, 1, 2, 1]), play([9])]  # second writes in one of them only
    assert [row.role for row in sequences_of([group_of(*games)])] == ["first", "first"]
    assert [row.role for row in sequences_of([group_of(games[0])])] == ["first", "second"]


def test_zero_sums_are_not_taken_for_equal_rewards():
    filters = {"zero-variance": ZeroVarianceFilter()}
    games = [play([3, 1, 2, 1]), play([3, 1, 3])]
    assert [game.reward for game in games] == [1.0, 1.0]  # somebody always wins
    assert rejection(filters, group_of(*games)) is None
    assert rejection(filters, group_of(games[0], games[0])) == "zero-variance/all-equal"
    assert [len(part) for part in groups_by_role(group_of(*games))] == [2, 2]


def test_data_ranks_divide_the_rows_of_roles():
    groups = [group_of(play([3, 1, 2, 1]), play([3, 1, 3])) for _ in range(2)]
    whole = {tuple(row.token_ids) for row in sequences_of(groups)}
    bare, own = divide(groups, Layout(shard=2), 2)
    assert [row.role for row in sequences_of(bare)] == [row.role for row in sequences_of(groups)]
    assert {place for tokens in own for place in tokens} == {0, 1, 2, 3}
    assert len(whole) == 4


def test_metrics_and_reports_tell_roles_apart():
    games = [play([3, 1, 2, 1]), play([3, 1, 3]), play([3, 4])]
    metrics = batch_metrics([group_of(*games)], 0)
    assert metrics["reward/role/first"] == pytest.approx(2 / 3)
    assert metrics["reward/role/second"] == pytest.approx(1 / 3)
    report = make_report(
        games,
        num_samples=3,
        success_reward=1.0,
        env_id="nim",
        split="test",
        temperature=1.0,
        wall_s=1.0,
    )
    assert report.by_role["first"].reward == pytest.approx(2 / 3)
    assert report.by_role["second"].num_episodes == 3
    assert report.to_dict()["by_role"]["second"]["pass@1"] == pytest.approx(1 / 3)
    assert "pass@1 of first" in report.to_text()


class TestedRoles(TextEnv):
    """Gives prepared responses."""

    __test__ = False
    roles = ("seller", "buyer")

    def __init__(self, *responses):
        super().__init__()
        self.responses = responses

    def sample_task(self, rng, options):
        return Task(id="t", data={})

    def first_messages(self, task):
        return [{"role": "user", "content": "name a price"}]

    async def respond(self, message):
        return self.responses[self.num_turns - 1]


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (Response(role="buyr"), ["gave the turn to the role 'buyr'", "did you mean 'buyer'"]),
        (Response(role_rewards={"byer": 1.0}), ["rewarded the role 'byer'", "seller, buyer"]),
        (Response(role_rewards={"buyer": 1.0}), ["'buyer'", "written nothing", "seller"]),
        (Response(role="buyer"), ["'buyer'", "nothing to read"]),
        (Response(role_rewards={"seller": float("nan")}), ["nan", "finite"]),
    ],
)
def test_wrong_roles_are_failures_of_the_environment(response, words):
    trajectory = play(["10"], env=TestedRoles(response), options={})
    assert trajectory.stop_reason in (StopReason.ENV_ERROR, StopReason.REWARD_ERROR)
    env = TestedRoles(response)
    env.reset()
    with pytest.raises(EpisodeError) as caught:  # the same, with hints
        env.step("10")
    shown = " ".join([str(caught.value), *getattr(caught.value, "hints", ())])
    assert all(word in shown for word in words), shown


def test_an_environment_without_roles_passes_no_turn_on():
    class Plain(TestedRoles):
        roles = ()

    trajectory = play(["10"], env=Plain(Response(role="buyer")), options={})
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert "'buyer'" in trajectory.error


def test_rewards_go_to_the_newest_turn_of_each_role():
    said = [{"role": "user", "content": "your turn"}]
    env = TestedRoles(
        Response(messages=said, role="buyer", reward=0.5),
        Response(role_rewards={"seller": 2.0, "buyer": -2.0}, reward=0.25, is_terminated=True),
    )
    trajectory = play(["10", "deal"], env=env, options={})
    assert [turn.reward for turn in trajectory.turns] == [2.5, -1.75]


def test_a_fixed_role_is_recorded_and_not_trained():
    env = NimEnv()
    env.fixed_roles = MappingProxyType({"second": GoldPolicy()})
    trajectory = play([1, 1], stones=6, env=env)  # second leaves 4, and takes what is left
    assert [turn.role for turn in trajectory.turns] == ["first", "second", "first", "second"]
    assert [turn.is_fixed for turn in trajectory.turns] == [False, True] * 2
    assert trajectory.reward == 0.0  # the policy's
    assert rewards_by_role(trajectory) == {"first": 0.0, "second": 1.0}
    assert roles_of(trajectory) == ("first",)
    said = [m["content"] for m in trajectory.messages if m["role"] == "assistant"]
    assert said == ["1 stone", "1 stone", "1 stone", "3 stones"]
    (row,) = sequences_of([group_of(trajectory)])
    assert row.role == "first"
    assert len(trajectory.branches) == 1


def test_a_fixed_role_may_begin_and_end_the_episode():
    env = NimEnv()
    env.fixed_roles = MappingProxyType({"first": GoldPolicy()})
    lost = play([], stones=3, env=env)  # first takes all
    assert (lost.stop_reason, lost.reward) == (StopReason.COMPLETED, 0.0)
    assert [turn.role for turn in lost.turns] == ["first"]
    assert sequences_of([group_of(lost)]) == []
    won = play([3], stones=4, env=env)
    assert won.reward == 1.0
    assert sequences_of([group_of(won)])[0].role == "second"


def test_a_fixed_role_that_fails_is_no_loss():
    class Broken:
        async def answer(self, env, seed):
            raise RuntimeError("out of order")

    env = NimEnv()
    env.fixed_roles = {"second": Broken()}
    trajectory = play([1], stones=6, env=env)
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert "the role second" in trajectory.error


def test_mixes_pass_roles_on():
    env = MixedEnv(envs=[{"id": "nim"}, {"id": "math"}])
    assert env.roles == ("first", "second")
    task = Task(id="nim/pile/7", data={"env": "nim", "task": pile(7).to_dict()})
    trajectory = play(["3 stones", "4"], env=env, options={"task": task})
    assert [turn.role for turn in trajectory.turns] == ["first", "second"]
    assert rewards_by_role(trajectory) == {"first": 1.0, "second": 0.0}
    env.reset(options={"split": "train", "index": 1})
    assert (env.playing.role, env.role, env.roles) == (None, None, ())


@pytest.mark.parametrize("most_taken", [2, 3, 5])
def test_best_moves_are_those_of_backward_induction(most_taken):
    wins = [False]  # who is to move and has no stones has lost
    for stones in range(1, 40):
        winning = [k for k in range(1, min(stones, most_taken) + 1) if not wins[stones - k]]
        wins.append(bool(winning))
        assert winning == ([best_move(stones, most_taken)] if winning else [])
        assert bool(best_move(stones, most_taken)) == bool(winning)
