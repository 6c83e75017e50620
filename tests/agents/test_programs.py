"""Function agents, OpenAI Agents SDK agents and programs play whole episodes."""

import asyncio
import io
import pickle
import sys
import time
from pathlib import Path

import openai
import pytest

from areal_gym.agents.base import Agent
from areal_gym.agents.black_box import AnthropicFunctionAgent, OpenAIFunctionAgent
from areal_gym.agents.chat import HumanAgent
from areal_gym.agents.openai_agents import OpenAIAgentsAgent
from areal_gym.agents.plugin import register_agents
from areal_gym.agents.program import ProgramAgent
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.tools import tool
from areal_gym.errors import AgentError, EngineError
from areal_gym.rollout.episode import play_episode
from areal_gym.types import StopReason
from tests._support.processes import is_running
from tests._support.sums_env import CALL, Sums

RENDERER = byte_renderer()
OPTIONS = {"split": "train", "index": 3}


def play(agent, replies, *, env=None, timeout_s=20.0, max_new_tokens=500, engine=None):
    engine = engine or ScriptedEngine(replies)
    return asyncio.run(
        play_episode(
            env or Sums(),
            agent,
            engine,
            RENDERER,
            options=OPTIONS,
            timeout_s=timeout_s,
            params=SamplingParams(max_new_tokens=max_new_tokens),
        )
    )


async def solve(client, task):
    reply = await client.chat.completions.create(model="gpt-4o", messages=task.messages)
    return reply.choices[0].message.content


async def with_tools(client, task):
    messages = task.messages
    while True:
        reply = await client.chat.completions.create(
            model="gpt-4o", messages=messages, tools=task.tools
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        messages = [*messages, message]
        for call in message.tool_calls:
            content = await task.call_tool(call.id)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def blocking(client, task):
    reply = client.chat.completions.create(model="gpt-4o", messages=task.messages)
    task.wait(task.reply(reply.choices[0].message.content))


async def anthropic_solve(client, task):
    reply = await client.messages.create(model="claude", max_tokens=99, messages=task.messages)
    return reply.content[0].text


def test_every_agent_is_registered():
    ids = {spec.id for spec in register_agents()}
    expected = {"anthropic", "chat", "human", "online", "openai", "openai_agents", "program"}
    assert ids == expected
    for agent in (OpenAIFunctionAgent(solve), OpenAIAgentsAgent(), ProgramAgent("true")):
        assert isinstance(agent, Agent)


@pytest.mark.parametrize(
    "agent",
    [
        OpenAIFunctionAgent(solve),
        OpenAIFunctionAgent(blocking),
        AnthropicFunctionAgent(anthropic_solve),
        OpenAIAgentsAgent(),
        OpenAIAgentsAgent(api="responses"),
    ],
    ids=["openai", "openai-blocking", "anthropic", "sdk-chat", "sdk-responses"],
)
def test_answer_is_graded_by_the_environment(agent):
    trajectory = play(agent, ["It is 10."])
    assert trajectory.stop_reason is StopReason.COMPLETED, trajectory.error
    assert trajectory.reward == 1.0
    assert trajectory.reward_parts == {"answer": 1.0}
    assert trajectory.messages[-1]["content"] == "It is 10."
    assert bytes(trajectory.spans[-1].token_ids[:-1]) == b"It is 10."


@pytest.mark.parametrize(
    "agent",
    [OpenAIFunctionAgent(with_tools), OpenAIAgentsAgent(), OpenAIAgentsAgent(api="responses")],
)
def test_parallel_tool_calls_run_as_one_environment_message(agent):
    trajectory = play(agent, [f"Let me see. {CALL}{CALL}", "It is 10."])
    assert trajectory.stop_reason is StopReason.COMPLETED, trajectory.error
    assert trajectory.metrics == {"calls": 2}  # both, and as one message
    assert [turn.reward for turn in trajectory.turns] == [0.25, 1.0]
    assert len(trajectory.branches) == 1
    assert "7" in bytes(i for i in trajectory.spans[2].token_ids if i < 256).decode()


def one_turn_env():
    env = Sums()
    env.max_turns = 1
    return env


async def careful(client, task):
    """Stops when a tool call ends the episode, before the policy has answered."""
    reply = await client.chat.completions.create(
        model="x", messages=task.messages, tools=task.tools
    )
    assert not task.is_over
    await task.call_tool(reply.choices[0].message.tool_calls[0].id)
    assert task.is_over


async def persistent(client, task):
    """Asks again after the end, gets the error, and returns a text that is ignored."""
    await careful(client, task)
    with pytest.raises(openai.BadRequestError, match="has ended this episode") as caught:
        await client.chat.completions.create(model="x", messages=task.messages)
    assert caught.value.code == "episode_over"
    return "ignored"


@pytest.mark.parametrize(
    "agent",
    [
        OpenAIFunctionAgent(careful),
        OpenAIFunctionAgent(persistent),
        OpenAIFunctionAgent(with_tools),  # does not catch the error
        OpenAIAgentsAgent(),
        OpenAIAgentsAgent(api="responses"),
    ],
    ids=["careful", "persistent", "raises", "sdk-chat", "sdk-responses"],
)
def test_policy_is_not_called_after_the_episode_ends(agent):
    engine = ScriptedEngine([f"Let me see. {CALL}", "It is 10."])
    trajectory = play(agent, [], env=one_turn_env(), engine=engine)
    assert trajectory.stop_reason is StopReason.MAX_TURNS, trajectory.error
    assert trajectory.error is None
    assert [turn.reward for turn in trajectory.turns] == [0.25]
    assert engine.num_calls == 1


def test_function_agent_returns_text_reward_or_none():
    async def number(client, task):
        await solve(client, task)
        return 0.5

    async def nothing(client, task):
        answer = await solve(client, task)
        assert await task.reply(answer) == ()

    async def nonsense(client, task):
        await solve(client, task)
        return {"reward": 1}

    async def not_a_number(client, task):
        await solve(client, task)
        return float("nan")

    async def silent(client, task):
        return "10"

    assert play(OpenAIFunctionAgent(number), ["Hm."]).reward == 0.5
    assert play(OpenAIFunctionAgent(nothing), ["10"]).reward == 1.0
    for function in (nonsense, not_a_number, silent):
        trajectory = play(OpenAIFunctionAgent(function), ["10"])
        is_reward = function is not_a_number
        reason = StopReason.REWARD_ERROR if is_reward else StopReason.AGENT_ERROR
        assert trajectory.stop_reason is reason


def test_exception_in_agent_is_an_agent_error():
    async def broken(client, task):
        await solve(client, task)
        raise RuntimeError("oh")

    trajectory = play(OpenAIFunctionAgent(broken), ["10"])
    assert trajectory.stop_reason is StopReason.AGENT_ERROR
    assert "oh" in trajectory.error
    assert len(trajectory.turns) == 1


def test_engine_failure_behind_the_gateway_is_an_engine_error():
    class Broken(ScriptedEngine):
        async def generate(self, prompt_ids, params, *, session=None):
            raise EngineError("no server is left")

    trajectory = play(OpenAIFunctionAgent(solve, max_retries=0), [], engine=Broken([]))
    assert trajectory.stop_reason is StopReason.ENGINE_ERROR
    assert "no server is left" in trajectory.error


def test_environment_failure_in_a_tool_is_an_env_error():
    @tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        raise OSError("the disk is full")

    class Broken(Sums):
        tools = (add,)

    async def stubborn(client, task):
        """Swallows every tool error."""
        try:
            return await with_tools(client, task)
        except Exception:
            return "10"

    for agent in (
        OpenAIAgentsAgent(),
        OpenAIFunctionAgent(with_tools),
        OpenAIFunctionAgent(stubborn),
    ):
        trajectory = play(agent, [CALL, "It is 10."], env=Broken())
        assert trajectory.stop_reason is StopReason.ENV_ERROR
        assert "the disk is full" in trajectory.error


def test_unknown_tool_calls_never_reach_the_environment():
    async def confused(client, task):
        reply = await client.chat.completions.create(
            model="x", messages=task.messages, tools=[{**task.tools[0], "function": {"name": "f"}}]
        )
        call = reply.choices[0].message.tool_calls[0]
        for call_id in (call.id, "call99999"):
            with pytest.raises(AgentError):
                await task.call_tool(call_id)
        return "10"

    other = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    trajectory = play(OpenAIFunctionAgent(confused), [other])
    assert trajectory.stop_reason is StopReason.COMPLETED, trajectory.error
    assert trajectory.metrics == {}


def test_full_context_is_a_truncation_and_trajectory_is_kept():  # trap 16
    async def chatter(client, task):
        messages = task.messages
        while True:
            reply = await client.chat.completions.create(model="x", messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "And then?"}]

    engine = ScriptedEngine(lambda question: "word " * 10, max_context=400)
    trajectory = play(OpenAIFunctionAgent(chatter), [], engine=engine)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.error is None
    assert len(trajectory.turns) >= 2
    assert len(trajectory.token_ids) <= 400


def test_endless_agent_hits_turn_and_time_limits():
    async def endless(client, task):
        while True:
            await client.chat.completions.create(model="x", messages=task.messages)

    async def sleepy(client, task):
        await asyncio.sleep(1000)

    trajectory = play(OpenAIFunctionAgent(endless, max_calls=7), lambda question: "Hm.")
    assert trajectory.stop_reason is StopReason.MAX_TURNS  # turns
    assert len(trajectory.turns) == 7
    trajectory = play(OpenAIFunctionAgent(sleepy), [], timeout_s=0.3)
    assert trajectory.stop_reason is StopReason.TIMEOUT  # wall time
    trajectory = play(OpenAIAgentsAgent(max_turns=3), lambda question: CALL)
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert len(trajectory.turns) == 3


def test_slow_answer_is_not_cut_by_gateway_or_client_timeout():  # trap 17
    engine = ScriptedEngine(["10"], latency_s=1.0)
    agent = OpenAIFunctionAgent(solve)
    assert play(agent, [], engine=engine).reward == 1.0

    async def timeouts(client, task):
        assert client.timeout is None
        return await solve(client, task)

    assert play(OpenAIFunctionAgent(timeouts), ["10"]).reward == 1.0


def test_unknown_tool_call_is_a_policy_mistake():
    """Calling a tool that does not exist is the policy's mistake, not the agent's failure."""
    unknown = '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>'
    trajectory = play(OpenAIAgentsAgent(), [unknown])
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert trajectory.reward == 0.0


def test_handoffs_are_branches_of_one_trajectory():
    import agents  # not by every process that collects tests: it takes 4 s of CPU time

    def build(tools):
        solver = agents.Agent(name="Solver", instructions="Add with the tool.", tools=tools)
        return agents.Agent(name="Triage", instructions="Hand over.", handoffs=[solver])

    hand_over = '<tool_call>{"name": "transfer_to_solver", "arguments": {}}</tool_call>'

    def reply(question):
        if "Hand over." in question.text:
            return hand_over
        return CALL if "It is" not in question.text and '"a": 3' not in question.text else "10"

    trajectory = play(OpenAIAgentsAgent(build), reply)
    assert trajectory.stop_reason is StopReason.COMPLETED, trajectory.error
    assert len(trajectory.branches) == 2  # the solver has other instructions
    assert [len({s.turn for s in branch}) for branch in trajectory.branches] == [1, 2]
    assert trajectory.reward == 1.25
    assert trajectory.metrics == {"calls": 1}  # a handoff is not an environment tool


def test_agent_used_as_a_tool_of_another_agent():
    import agents

    def build(tools):
        helper = agents.Agent(name="Helper", instructions="You help.", tools=tools)
        ask = helper.as_tool(tool_name="ask_helper", tool_description="Ask.")
        return agents.Agent(name="Boss", instructions="You lead.", tools=[ask])

    asking = '<tool_call>{"name": "ask_helper", "arguments": {"input": "3+4?"}}</tool_call>'

    def reply(question):
        if "You help." in question.text:
            return "7"
        return "10" if "<|im_start|>tool" in question.text else asking + asking

    trajectory = play(OpenAIAgentsAgent(build), reply)
    assert trajectory.stop_reason is StopReason.COMPLETED, trajectory.error
    assert trajectory.reward == 1.0
    turns = sorted(len({s.turn for s in branch}) for branch in trajectory.branches)
    assert turns == [1, 1, 2]  # two helpers at once, and the boss before and after


def test_agents_can_be_pickled(tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text("def solve(client, task):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    pickled = pickle.dumps((OpenAIFunctionAgent("theirs.py:solve"), OpenAIAgentsAgent(build)))
    monkeypatch.chdir("/")
    agent, _ = pickle.loads(pickled)
    assert agent._function.function(None, None) == 1


def build(tools):
    import agents

    return agents.Agent(name="One", tools=tools)


def test_idle_time_does_not_count_toward_the_timeout():
    class Thinking:
        async def play(self, episode):
            with episode.idle():
                await asyncio.sleep(0.6)
            await episode.act(await episode.ask(episode.first_messages))
            await asyncio.sleep(self.after_s)

    agent = Thinking()
    agent.after_s = 0.0
    assert play(agent, ["10"], timeout_s=0.4).stop_reason is StopReason.COMPLETED
    agent.after_s = 0.6
    assert play(agent, ["10"], timeout_s=0.4).stop_reason is StopReason.TIMEOUT


def test_human_agent_comments_and_accepts(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Add 7.\n\n"))
    trajectory = play(HumanAgent(), ["It is 9.", "It is 10."])
    assert trajectory.stop_reason is StopReason.COMPLETED, trajectory.error
    assert trajectory.reward == 1.0
    contents = [message["content"] for message in trajectory.messages]
    assert contents == ["What is 3 + 7?", "It is 9.", "Add 7.", "It is 10."]
    assert "[end] reward 1" in capsys.readouterr().err


# ---- programs ----------------------------------------------------------------------------------

ASK = """
import json, os, sys, urllib.request
def post(route, body):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + route,
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))
given = json.load(sys.stdin)
messages = given["messages"]
assert os.environ["AREAL_GYM_PROMPT"] == messages[-1]["content"]
assert given["tools"][0]["function"]["name"] == "add"
"""
PRINT = (
    ASK
    + """
reply = post("/chat/completions", {"messages": messages})
print(reply["choices"][0]["message"]["content"])
"""
)
POST = (
    ASK
    + """
reply = post("/chat/completions", {"messages": messages, "tools": given["tools"]})
message = reply["choices"][0]["message"]
result = post("/rl/tool", {"call_id": message["tool_calls"][0]["id"]})["content"]
assert result == "7"
tool = {"role": "tool", "content": result, "tool_call_id": message["tool_calls"][0]["id"]}
reply = post("/chat/completions", {"messages": [*messages, message, tool], "tools": given["tools"]})
end = post("/rl/answer", {"content": reply["choices"][0]["message"]["content"]})
assert end == {"messages": [], "is_over": True}
"""
)


@pytest.mark.parametrize(("code", "replies"), [(PRINT, ["10"]), (POST, [CALL, "10"])])
def test_program_agent_prints_or_posts_its_answer(code, replies):
    trajectory = play(ProgramAgent([sys.executable, "-c", code]), replies)
    assert trajectory.stop_reason is StopReason.COMPLETED, trajectory.error
    assert trajectory.turns[-1].reward == 1.0


def test_failing_program_reports_exit_code_and_output():
    agent = ProgramAgent([sys.executable, "-c", PRINT + "sys.exit('no luck')"])
    trajectory = play(agent, ["10"])
    assert trajectory.stop_reason is StopReason.AGENT_ERROR
    assert "ended with code 1: no luck" in trajectory.error
    trajectory = play(ProgramAgent("/nothing/there"), ["10"])
    assert trajectory.stop_reason is StopReason.AGENT_ERROR
    assert "does not start" in trajectory.error


def test_program_and_its_children_end_with_the_episode(tmp_path):
    file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        f"open({str(file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(1000)\n"
    )
    trajectory = play(ProgramAgent([sys.executable, "-c", code]), [], timeout_s=3.0)
    assert trajectory.stop_reason is StopReason.TIMEOUT
    child = int(Path(file).read_text())
    deadline = time.monotonic() + 5
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(child)
