"""Each role of an episode has a `base_url` of its own: its calls, its dialogue, its trajectory."""

from __future__ import annotations

import asyncio
import re
import sys

import openai
import pytest

from areal_gym.agents.black_box import AnthropicFunctionAgent, OpenAIFunctionAgent
from areal_gym.agents.program import ProgramAgent
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.nim import NimEnv
from areal_gym.episode_roles import rewards_by_role
from areal_gym.rollout.episode import play_episode
from areal_gym.runs.role_policies import GoldPolicy
from areal_gym.trainer.batch.sequences import sequences_of
from areal_gym.types import Group, StopReason

TASK = {"id": "pile/7", "data": {"stones": 7}}


def best(question):
    """Take what wins, or one stone."""
    stones = int(re.findall(r"(\d+) stones are left", question.text)[-1])
    return f"{stones % 4 or 1} stones"


def play(agent, env=None):
    engine = ScriptedEngine(best)
    opened = play_episode(
        *(env or NimEnv(), agent, engine, byte_renderer()), options={"task": TASK}, timeout_s=30
    )
    return asyncio.run(opened)


async def plays_both_roles(client, task):
    histories = {role: [] for role in task.roles}
    messages = task.messages
    while not task.is_over:
        role = task.role
        histories[role] += messages
        one = client.with_options(base_url=task.roles[role])
        reply = await one.chat.completions.create(model="any", messages=histories[role])
        histories[role].append(reply.choices[0].message.model_dump(exclude_none=True))
        messages = await task.reply(reply.choices[0].message.content)


def test_a_black_box_plays_two_roles_at_two_urls():
    trajectory = play(OpenAIFunctionAgent(plays_both_roles))
    assert trajectory.error is None
    assert [turn.role for turn in trajectory.turns] == ["first", "second", "first"]
    assert rewards_by_role(trajectory) == {"first": 1.0, "second": 0.0}
    assert trajectory.num_forks == 0
    group = Group(id="g", task=trajectory.task, trajectories=(trajectory,))
    rows = {row.role: row for row in sequences_of([group])}
    assert {role: len(set(row.turn_ids)) for role, row in rows.items()} == {"first": 2, "second": 1}
    decode = byte_renderer().decode
    assert "4 stones are left" not in decode(rows["first"].token_ids)
    assert "4 stones are left" in decode(rows["second"].token_ids)


def test_roles_with_the_same_history_are_kept_apart():
    async def asks_both(client, task):
        same = [{"role": "user", "content": "7 stones are left."}]
        for url in task.roles.values():
            one = client.with_options(base_url=url)
            await one.chat.completions.create(model="any", messages=same)
        for _ in range(2):
            await task.reply("3 stones")

    trajectory = play(OpenAIFunctionAgent(asks_both))
    assert [turn.role for turn in trajectory.turns] == ["first", "second"]
    assert len(trajectory.branches) == 2
    assert trajectory.num_forks == 0


async def asks_without_a_role(client, task):
    await client.chat.completions.create(model="any", messages=task.messages)


async def answers_for_the_other(client, task):
    one = client.with_options(base_url=task.roles["second"])
    await one.chat.completions.create(model="any", messages=task.messages)
    await task.reply("1 stone")


async def answers_at_the_wrong_url(client, task):
    one = client.with_options(base_url=task.roles["second"])
    await one.post("/rl/answer", cast_to=object, body={"content": "1 stone"})


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (asks_without_a_role, ["first, second", "the call names none", "/role/first/v1"]),
        (answers_for_the_other, ["has asked the policy as the role 'first'"]),
        (answers_at_the_wrong_url, ["not the turn of 'second', but of 'first'"]),
    ],
)
def test_calls_without_the_right_role_say_so(function, words):
    trajectory = play(OpenAIFunctionAgent(function))
    assert trajectory.stop_reason is StopReason.AGENT_ERROR
    assert all(word in trajectory.error for word in words), trajectory.error


def test_an_unknown_role_is_not_found():
    async def asks(client, task):
        url = task.roles["first"].replace("first", "third")
        one = client.with_options(base_url=url)
        with pytest.raises(openai.NotFoundError, match="'third' is none of them"):
            await one.chat.completions.create(model="any", messages=task.messages)
        await plays_both_roles(client, task)

    assert play(OpenAIFunctionAgent(asks)).error is None


def test_anthropic_clients_have_urls_of_roles():
    async def one_move(client, task):
        one = client.with_options(base_url=task.roles["first"])
        await one.messages.create(model="any", max_tokens=20, messages=task.messages)
        await task.reply("9 stones")

    trajectory = play(AnthropicFunctionAgent(one_move))
    assert [turn.role for turn in trajectory.turns] == ["first"]


def test_fixed_roles_play_by_themselves_beside_a_program():
    env = NimEnv()
    env.fixed_roles = {"second": GoldPolicy()}
    script = (
        "import json, os, openai\n"
        "(role, url), = json.loads(os.environ['AREAL_GYM_ROLES']).items()\n"
        "client = openai.OpenAI(base_url=url)\n"
        "task = client.get('/rl/task', cast_to=object)\n"
        "assert task['role'] == role == 'first'\n"
        "messages = task['messages']\n"
        "while not task['is_over']:\n"
        "    reply = client.chat.completions.create(model='any', messages=messages)\n"
        "    text = reply.choices[0].message.content\n"
        "    messages.append({'role': 'assistant', 'content': text})\n"
        "    task = client.post('/rl/answer', cast_to=object, body={'content': text})\n"
        "    messages += task['messages']\n"
    )
    trajectory = play(ProgramAgent([sys.executable, "-c", script]), env)
    assert trajectory.error is None
    assert [turn.role for turn in trajectory.turns] == ["first", "second", "first"]
    assert [turn.is_fixed for turn in trajectory.turns] == [False, True, False]
    assert trajectory.reward == 1.0
