"""Calls of programs over HTTP are recorded exactly, each sampled token once."""

import asyncio
import math
from itertools import pairwise

import openai
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_gym.config import TrainerConfig
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.errors import EngineError
from areal_gym.recording import Conversations, Recorder
from areal_gym.trainer.algorithms.token_advantages import gae
from areal_gym.trainer.batch.experience import advantage_inputs
from areal_gym.trainer.batch.sequences import make_sequences, sequences_of
from areal_gym.types import Group, StopReason, Task, Trajectory
from tests._support.scripted_gateway import (
    CALL,
    TokenwiseEngine,
    open_recorded_session,
    post,
    running_gateway,
)
from tests._support.sums_env import RecordingEngine

HI = {"role": "user", "content": "Hi."}
MORE = {"role": "user", "content": "More."}


def trajectory_of(recorder):
    return Trajectory(
        id="t", group_id="g", task=Task(id="t", data={}), env_id="e", **recorder.outcome()
    )


def check_branches(trajectory, engine):
    """Check that branches equal the engine's prompts and samples, with each sample in one."""
    calls = [call for session in engine.log.values() for call in session]
    wholes = {tuple(prompt) + tuple(g.token_ids): g for prompt, g in calls}
    trained = 0
    for branch in trajectory.branches:
        ids = tuple(token_id for span in branch for token_id in span.token_ids)
        assert ids in wholes
        end = 0
        for span in branch:
            end += len(span)
            if span.origin == "policy" and ids[:end] in wholes:
                trained += 1
    assert trained == len(calls) == len(trajectory.turns)
    sampled = sum(len(g.token_ids) for _, g in calls)
    assert trajectory.num_policy_tokens == sampled
    rows = make_sequences(trajectory)
    assert sum(row.num_trainable for row in rows) == sampled
    # Turns are numbered along the branches, so that rows and turns go in the same order.
    turns = [turn for row in rows for turn in row.turn_ids]
    assert turns == sorted(turns)


def test_growing_history_is_one_branch():
    async def run():
        async with running_gateway() as (gateway, _):
            engine = RecordingEngine(stop_share=1.0)
            session = open_recorded_session(gateway, engine, max_new_tokens=20)
            messages = [HI]
            for _ in range(4):
                status, body, _ = await post(session, "/chat/completions", {"messages": messages})
                assert status == 200, body
                messages = [*messages, body["choices"][0]["message"], MORE]
            return trajectory_of(session.recorder), engine

    trajectory, engine = asyncio.run(run())
    assert len(trajectory.branches) == 1
    assert trajectory.num_forks == 0
    check_branches(trajectory, engine)


def test_rewritten_history_forks_and_trains_each_token_once():
    async def run():
        async with running_gateway() as (gateway, _):
            engine = RecordingEngine(stop_share=1.0)
            session = open_recorded_session(gateway, engine, max_new_tokens=20)

            async def ask(*messages):
                status, body, _ = await post(session, "/chat/completions", {"messages": messages})
                assert status == 200, body
                return body["choices"][0]["message"]

            first = await ask(HI)
            second = await ask(HI, first, MORE)
            await ask(HI, first, {"role": "user", "content": "Other."})  # from an earlier point
            await ask(HI, first, MORE, second, MORE)  # the first dialogue goes on
            await ask({"role": "user", "content": "Summary."})  # another one
            await ask(HI, {"role": "assistant", "content": "Made up."}, MORE)
            return trajectory_of(session.recorder), engine

    trajectory, engine = asyncio.run(run())
    assert len(trajectory.branches) == 4
    # Branches are in the order in which they ended.
    assert [len({s.turn for s in branch}) for branch in trajectory.branches] == [1, 3, 1, 1]
    forked, plain = trajectory.branches[:2]
    assert forked[0].origin == "prompt"  # begins with ids that are trained on elsewhere
    sampled_first = plain[1].token_ids
    start = len(plain[0])
    assert forked[0].token_ids[start : start + len(sampled_first)] == sampled_first
    check_branches(trajectory, engine)


@settings(max_examples=60)
@given(
    moves=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 3)), min_size=1, max_size=14),
    seed=st.integers(0, 2**32),
    is_parallel=st.booleans(),
)
def test_random_call_trees_are_recorded_exactly(moves, seed, is_parallel):
    """Moves continue any earlier point with 0 to 3 new messages, in turn or in parallel."""

    async def run():
        engine = RecordingEngine(max_context=4000, stop_share=1.0, publishes=not is_parallel)
        params = SamplingParams(max_new_tokens=12)
        recorder = Recorder(engine, byte_renderer(), params, seed=seed)
        conversations = Conversations(recorder)
        histories = [[]]

        async def ask(place, num_new):
            base = histories[place % len(histories)]
            new = [{"role": "user", "content": f"{num_new} {i}"} for i in range(num_new)]
            messages = [*base, *(new or [{"role": "tool", "content": "7"}])]
            with conversations.continued(messages, (), "plain") as (dialogue, prompt):
                await asyncio.sleep(0)
                message, _ = await recorder.sample(dialogue, prompt)
            # As a client would send it back.
            return [*messages, {"role": "assistant", "content": message["content"]}]

        if is_parallel:
            for some in (moves[::2], moves[1::2]):
                histories += await asyncio.gather(*(ask(*move) for move in some))
        else:
            for move in moves:
                histories.append(await ask(*move))
        return trajectory_of(recorder), engine

    check_branches(*asyncio.run(run()))


def test_n_choices_are_branches():
    async def run():
        async with running_gateway() as (gateway, _):
            engine = RecordingEngine(stop_share=1.0)
            session = open_recorded_session(gateway, engine, max_new_tokens=20)
            body = {"messages": [HI], "n": 3}
            _, answer, _ = await post(session, "/chat/completions", body)
            picked = answer["choices"][1]["message"]
            await post(session, "/chat/completions", {"messages": [HI, picked, MORE]})
            return trajectory_of(session.recorder), engine, answer

    trajectory, engine, answer = asyncio.run(run())
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
    assert len(trajectory.branches) == 3
    assert sorted(len({s.turn for s in b}) for b in trajectory.branches) == [1, 1, 2]
    check_branches(trajectory, engine)


def test_client_retry_is_answered_from_the_first_call():  # trap 18
    async def run():
        async with running_gateway() as (gateway, _):
            engine = ScriptedEngine(lambda question: f"Answer {question.turn} {CALL}")
            session = open_recorded_session(gateway, engine)
            body = {"messages": [HI]}
            again = {"x-stainless-retry-count": "1"}
            _, first, _ = await post(session, "/chat/completions", body)
            _, second, _ = await post(session, "/chat/completions", body, headers=again)
            assert first["choices"] == second["choices"]
            stream = {"messages": [HI], "stream": True}
            _, streamed, _ = await post(session, "/chat/completions", stream)
            _, retried, _ = await post(session, "/chat/completions", stream, headers=again)
            assert retried.count("Answer") == 1
            assert streamed.count("data:") > 2
            assert len(session.recorder.turns) == 2
            # Rewards reach the turn by the id of the second answer, too.
            session.give_reward(0.5, second["id"])
            assert session.recorder.turns[0].reward == 0.5
            # The same request without the retry header gets a second answer.
            await post(session, "/chat/completions", body)
            assert len(session.recorder.turns) == 3
            return trajectory_of(session.recorder)

    assert len(asyncio.run(run()).branches) == 3


def test_official_client_retries_leave_one_turn():
    """The official client asks again after a 503; the engine fails the first time."""

    class Failing(ScriptedEngine):
        async def generate(self, prompt_ids, params, *, session=None):
            if self.num_calls == 0:
                self.num_calls = 1
                raise EngineError("the server is restarting")
            return await super().generate(prompt_ids, params, session=session)

    async def run():
        async with running_gateway() as (gateway, _):
            session = open_recorded_session(gateway, Failing(lambda question: "Fine."))
            async with openai.AsyncOpenAI(
                api_key=session.api_key, base_url=session.base_url, max_retries=2
            ) as client:
                answer = await client.chat.completions.create(model="x", messages=[HI])
            assert answer.choices[0].message.content == "Fine."
            assert session.error is None
            return trajectory_of(session.recorder)

    trajectory = asyncio.run(run())
    assert len(trajectory.turns) == len(trajectory.branches) == 1


def test_client_disconnect_aborts_generation_and_records_nothing():
    async def run():
        engine = TokenwiseEngine(lambda question: "x" * 500, 0.01)
        async with running_gateway() as (gateway, _):
            session = open_recorded_session(gateway, engine, max_new_tokens=1000)
            async with openai.AsyncOpenAI(
                api_key=session.api_key, base_url=session.base_url
            ) as client:
                stream = await client.chat.completions.create(model="x", messages=[HI], stream=True)
                async for chunk in stream:
                    if chunk.choices[0].delta.content:
                        break
                await stream.close()
                while not engine.num_aborted:
                    await asyncio.sleep(0.01)
                assert session.recorder.turns == []
                # The session goes on without the abandoned answer.
                engine.pause_s = 0.0
                answer = await client.chat.completions.create(model="x", messages=[HI])
            assert len(answer.choices[0].message.content) == 500
            while gateway.num_calls:
                await asyncio.sleep(0.01)
            return trajectory_of(session.recorder)

    trajectory = asyncio.run(run())
    assert len(trajectory.turns) == 1
    assert trajectory.num_policy_tokens == 501


def test_parallel_agents_have_their_own_branches():
    async def run():
        async with running_gateway() as (gateway, _):
            engine = RecordingEngine(stop_share=1.0)
            session = open_recorded_session(gateway, engine, max_new_tokens=16)

            async def agent(name):
                messages = [{"role": "system", "content": f"You are {name}."}, HI]
                for _ in range(3):
                    body = {"messages": messages}
                    _, answer, _ = await post(session, "/chat/completions", body)
                    messages = [*messages, answer["choices"][0]["message"], MORE]

            await asyncio.gather(*(agent(name) for name in "abcd"))
            return trajectory_of(session.recorder), engine

    trajectory, engine = asyncio.run(run())
    assert [len({s.turn for s in branch}) for branch in trajectory.branches] == [3, 3, 3, 3]
    for before, after in pairwise(trajectory.branches):
        assert max(s.turn for s in before) < min(s.turn for s in after)
    check_branches(trajectory, engine)


def test_reward_reaches_every_agent_of_the_episode():  # trap 8
    """A boss asks two helpers at once and gets the reward, also where turns are discounted."""

    async def run():
        async with running_gateway() as (gateway, _):
            engine = ScriptedEngine(lambda question: "word")
            session = open_recorded_session(gateway, engine)

            async def ask(*messages):
                _, answer, _ = await post(session, "/chat/completions", {"messages": messages})
                return answer["choices"][0]["message"]

            plan = await ask(HI)
            helpers = [{"role": "system", "content": f"Helper {i}."} for i in range(2)]
            await asyncio.gather(*(ask(helper, HI) for helper in helpers))
            await ask(HI, plan, MORE)
            session.give_reward(1.0)
            return trajectory_of(session.recorder)

    trajectory = asyncio.run(run())
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 0.0, 1.0]
    rows = make_sequences(trajectory)
    assert [len(set(row.turn_ids)) for row in rows] == [1, 1, 2]  # helpers, then the boss
    inputs = advantage_inputs(rows, TrainerConfig(), 10)
    returns_T = gae(
        inputs.rewards_G,
        inputs.group_ids_G,
        rewards_T=inputs.rewards_T,
        trajectory_ids_T=inputs.trajectory_ids_T,
        turn_ids_T=inputs.turn_ids_T,
        values_T=torch.zeros_like(inputs.rewards_T),
        discount=0.5,
        unit="turn",
    ).advantages_T
    by_turn = [float(returns_T[inputs.turn_ids_T == turn][0]) for turn in range(4)]
    assert by_turn == [0.125, 0.25, 0.5, 1.0]
    # Estimators per trajectory give all tokens of all branches one advantage.
    group = Group(id="g", task=trajectory.task, trajectories=(trajectory, trajectory))
    assert {row.trajectory_id for row in sequences_of([group])} == {0, 1}


def test_tokens_after_a_stop_string_are_not_trained_on():  # trap 34
    async def run():
        async with running_gateway() as (gateway, _):
            session = open_recorded_session(gateway, ScriptedEngine(["One STOP two", "Three"]))
            body = {"messages": [HI], "stop": "STOP"}
            _, first, _ = await post(session, "/chat/completions", body)
            message = first["choices"][0]["message"]
            assert message["content"] == "One "
            body["messages"] = [HI, message, MORE]
            await post(session, "/chat/completions", body)
            return trajectory_of(session.recorder)

    trajectory = asyncio.run(run())
    (branch,) = trajectory.branches
    assert bytes(branch[1].token_ids) == b"One STOP"
    assert branch[2].token_ids[0] == 257  # the end of turn that was not sampled is not trained on


def test_run_sets_sampling_and_client_seed_is_kept():
    async def run():
        seen = []

        class Engine(ScriptedEngine):
            async def generate(self, prompt_ids, params, *, session=None):
                seen.append(params)
                return await super().generate(prompt_ids, params, session=session)

        async with running_gateway(Engine(lambda question: "Hello.")) as (gateway, free):
            session = open_recorded_session(
                gateway, free.recorder.engine, temperature=0.7, max_new_tokens=30
            )
            other = open_recorded_session(gateway, free.recorder.engine, temperature=0.7, seed=1)
            body = {"messages": [HI], "temperature": 0.1, "top_p": 0.5, "seed": -5}
            for sender in (session, session, other, free):
                await post(sender, "/chat/completions", body | {"max_tokens": 50})
        return seen

    first, same, other, free = asyncio.run(run())
    assert (first.temperature, first.top_p, first.max_new_tokens) == (0.7, 1.0, 30)
    assert (free.temperature, free.top_p, free.max_new_tokens) == (0.1, 0.5, 50)
    assert first.seed == same.seed  # the client's seed
    assert first.seed != other.seed  # but siblings differ


def test_reward_is_given_to_the_named_answer():
    async def run():
        async with running_gateway() as (gateway, _):
            session = open_recorded_session(gateway, ScriptedEngine(lambda question: "Hello."))
            ids = []
            for text in "abc":
                body = {"messages": [{"role": "user", "content": text}]}
                _, answer, _ = await post(session, "/chat/completions", body)
                ids.append(answer["id"])
            route = f"/rl/sessions/{session.id}/reward"
            key = gateway.control_key
            for answer_id, reward in ((ids[0], 0.25), (None, 1), (ids[0], 0.5)):
                body = {"reward": reward, "answer_id": answer_id}
                status, _, _ = await post(session, route, body, key=key)
                assert status == 200
            status, _, _ = await post(session, route, {"reward": 1, "answer_id": "no"}, key=key)
            assert status == 404
            for wrong in (b'{"reward": NaN}', b'{"reward": 1e999}', b'{"reward": "x"}', b"{}"):
                status, _, _ = await post(session, route, wrong, key=key)
                assert status == 400
            return trajectory_of(session.recorder)

    trajectory = asyncio.run(run())
    assert [turn.reward for turn in trajectory.turns] == [0.75, 0.0, 1.0]
    assert math.isclose(trajectory.reward, 1.75)


def test_session_limits_are_reported_truncations():
    async def run():
        async with running_gateway() as (gateway, _):
            engine = ScriptedEngine(lambda question: "Hello.", max_context=200)
            session = open_recorded_session(gateway, engine, max_calls=2)
            body = {"messages": [HI]}
            assert (await post(session, "/chat/completions", body))[0] == 200
            long = {"messages": [{"role": "user", "content": "x" * 200}]}
            status, answer, _ = await post(session, "/chat/completions", long)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert session.limit is StopReason.MAX_TOKENS
            status, answer, _ = await post(session, "/chat/completions", body)
            assert (status, answer["error"]["code"]) == (400, "episode_limit")
            assert session.limit is StopReason.MAX_TURNS

    asyncio.run(run())
