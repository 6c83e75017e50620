import asyncio
import json
import math

import numpy as np
import pytest

from areal_gym.agents.chat import ChatAgent
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.envs.base import Response, TextEnv
from areal_gym.envs.tools import tool
from areal_gym.errors import EngineError, SandboxError, UsageError
from areal_gym.recording import InFlight, derive_seed
from areal_gym.rollout.episode import play_episode
from areal_gym.types import FinishReason, StopReason, Task, Trajectory, freeze
from tests._support.sums_env import CALL, Sums, add

RENDERER = byte_renderer()
TEST = {"split": "test"}


def play(env, engine, agent=None, **options):
    if not isinstance(engine, ScriptedEngine):
        engine = ScriptedEngine(engine)
    options.setdefault("params", SamplingParams(max_new_tokens=200))
    options.setdefault("options", TEST)
    return asyncio.run(play_episode(env, agent or ChatAgent(), engine, RENDERER, **options))


class Once(TextEnv):
    """Answers every message with the result of `answer`."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def sample_task(self, rng, options):
        return Task(id="t", data={})

    def first_messages(self, task):
        return [{"role": "user", "content": "?"}]

    async def respond(self, message):
        return self.answer(message)


class FunctionAgent:
    """An agent made from a coroutine function."""

    def __init__(self, play):
        self.play = play


def test_tool_episode_is_recorded_turn_by_turn():
    trajectory = play(Sums(), [CALL, "It is 10."], seed=5, trajectory_id="a", group_id="g")
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert [span.origin for span in trajectory.spans] == ["prompt", "policy", "env", "policy"]
    assert [span.turn for span in trajectory.spans] == [0, 0, 1, 1]
    assert [turn.reward for turn in trajectory.turns] == [0.25, 1.0]
    assert trajectory.turns[1].reward_parts == {"answer": 1.0}
    assert trajectory.metrics == {"calls": 1.0}
    assert [m["role"] for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 3, "b": 4}
    assert (trajectory.id, trajectory.group_id, trajectory.seed) == ("a", "g", 5)
    assert trajectory.env_id == "Sums"
    assert all(turn.engine_s >= 0 and turn.env_s >= 0 for turn in trajectory.turns)


def test_episode_ending_in_a_tool_result_keeps_its_reward():  # trap 1
    env = Sums()
    env.max_turns = 1
    trajectory = play(env, [CALL])
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert trajectory.messages[-1]["role"] == "tool"  # for people
    assert trajectory.spans[-1].origin == "policy"  # the policy never read it
    assert trajectory.turns[-1].reward == 0.25


@pytest.mark.parametrize("reward", [1, True, np.float32(1), np.int64(1)])
def test_every_number_type_is_a_reward(reward):  # trap 4
    trajectory = play(Once(lambda m: Response(reward=reward, is_terminated=True)), ["x"])
    assert trajectory.reward == 1.0


@pytest.mark.parametrize("reward", [None, "1", math.nan, math.inf])
def test_nonfinite_rewards_are_reward_errors(reward):
    trajectory = play(Once(lambda m: Response(reward=reward, is_terminated=True)), ["x"])
    assert trajectory.stop_reason is StopReason.REWARD_ERROR
    assert trajectory.reward == 0.0


@pytest.mark.parametrize("given", [{"metrics": {"n": "abc"}}, {"reward_parts": {"n": math.nan}}])
def test_wrong_parts_and_metrics_are_reward_errors_of_the_environment(given):
    trajectory = play(Once(lambda m: Response(reward=1.0, is_terminated=True, **given)), ["x"])
    assert trajectory.stop_reason is StopReason.REWARD_ERROR
    assert "Once.respond gave the" in trajectory.error
    assert trajectory.reward == 0.0


@pytest.mark.parametrize("key", ["", "0", None])
def test_state_keys_survive_the_record(key):
    answer = Response(reward=1.0, is_terminated=True, state_key=key)
    trajectory = play(Once(lambda m: answer), ["x"])
    read = Trajectory.from_dict(json.loads(json.dumps(trajectory.to_dict())))
    assert read == trajectory
    assert [turn.state_key for turn in read.turns] == [key]


def test_truncated_turn_is_graded_and_ends_the_episode():
    seen = []

    def answer(message):
        seen.append(message["content"])
        return Response(reward=0.5, messages=[{"role": "user", "content": "go on"}])

    trajectory = play(Once(answer), ["x" * 50], params=SamplingParams(max_new_tokens=10))
    assert seen == ["x" * 10]
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.turns[0].finish_reason is FinishReason.LENGTH
    assert trajectory.reward == 0.5
    assert trajectory.num_policy_tokens == 10
    ended = Once(lambda m: Response(is_terminated=True))
    trajectory = play(ended, ["x" * 50], params=SamplingParams(max_new_tokens=10))
    assert trajectory.stop_reason is StopReason.MAX_TOKENS  # although the environment terminated


def test_full_context_truncates_between_turns():  # trap 16
    engine = ScriptedEngine([CALL] * 9, max_context=500)
    trajectory = play(Sums(), engine)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.spans[-1].origin == "policy"
    assert len(trajectory.turns) == engine.num_calls >= 1
    assert trajectory.reward == 0.25 * engine.num_calls


class GradedAtAnyEnd(Once):
    """Grades what is there, whatever ends the episode; text `good` is worth 1."""

    max_turns = 99

    def __init__(self):
        super().__init__(lambda message: Response(messages=[{"role": "user", "content": "more"}]))

    async def conclude(self):
        is_good = any("good" in m["content"] for m in self.messages if m["role"] == "assistant")
        return Response(reward=float(is_good), is_terminated=True, reward_parts={"late": 1.0})


def test_limits_outside_of_the_environment_let_it_grade_what_is_there():
    cut = play(GradedAtAnyEnd(), ["good" * 20], params=SamplingParams(max_new_tokens=10))
    assert (cut.stop_reason, cut.reward) == (StopReason.MAX_TOKENS, 1.0)
    full = play(GradedAtAnyEnd(), ScriptedEngine(["good"] * 99, max_context=300))
    assert (full.stop_reason, full.reward) == (StopReason.MAX_TOKENS, 1.0)
    assert full.turns[-1].reward == 1.0

    async def stop_early(episode):
        await episode.act(await episode.ask(episode.first_messages))
        await episode.finish()

    ended = play(GradedAtAnyEnd(), ["good"], FunctionAgent(stop_early))
    assert (ended.stop_reason, ended.reward) == (StopReason.COMPLETED, 1.0)
    assert ended.reward_parts == {"late": 1.0}

    async def reward_itself(episode):
        await episode.ask(episode.first_messages)
        await episode.finish(reward=0.5)

    assert play(GradedAtAnyEnd(), ["good"], FunctionAgent(reward_itself)).reward == 0.5


def test_an_error_while_grading_what_is_there_is_a_failure():
    class Failing(GradedAtAnyEnd):
        async def conclude(self):
            raise SandboxError("the place is gone")

    full = play(Failing(), ScriptedEngine(["good"] * 99, max_context=300))
    assert full.stop_reason is StopReason.SANDBOX_ERROR
    assert full.reward == 0.0


def test_first_prompt_beyond_the_context_is_a_truncation_without_tokens():
    trajectory = play(Sums(), ScriptedEngine(["x"], max_context=20))
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.spans == () == trajectory.turns


def raising(error):
    def answer(*_):
        raise error

    return answer


@pytest.mark.parametrize(
    ("env", "replies", "reason"),
    [
        (Once(raising(KeyError("bug"))), ["x"], StopReason.ENV_ERROR),
        (Once(raising(TimeoutError("slow"))), ["x"], StopReason.ENV_ERROR),
        (Once(raising(SandboxError("no sandbox"))), ["x"], StopReason.SANDBOX_ERROR),
        (Sums(), [CALL], StopReason.ENGINE_ERROR),  # the script is too short
        (Sums(), raising(EngineError("gone")), StopReason.ENGINE_ERROR),
        (Sums(), raising(OSError("gone")), StopReason.ENGINE_ERROR),
        (Sums(), [[]], StopReason.ENGINE_ERROR),  # sampled nothing
    ],
)
def test_failures_are_attributed_to_env_sandbox_or_engine(env, replies, reason):
    trajectory = play(env, replies)
    assert trajectory.stop_reason is reason
    assert trajectory.error
    assert trajectory.stop_reason.is_failure


class Leaving(BaseException):
    """A BaseException: `except Exception` does not catch it."""


class Interrupted(KeyboardInterrupt):
    """A KeyboardInterrupt raised by the environment's own code."""


@pytest.mark.parametrize(
    "error", [Leaving("gone"), Interrupted(), SystemExit(3), asyncio.CancelledError()]
)
def test_base_exception_in_environment_fails_only_its_episode(error):
    trajectory = play(Once(raising(error)), ["x"])
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert type(error).__name__ in trajectory.error
    in_reset = Sums()
    in_reset.first_messages = raising(error)
    assert play(in_reset, ["x"]).stop_reason is StopReason.ENV_ERROR


def test_keyboard_interrupt_is_not_an_environment_failure():
    with pytest.raises(KeyboardInterrupt):
        play(Once(raising(KeyboardInterrupt())), ["x"])


def test_exception_in_reset_is_an_env_error():
    class Broken(Sums):
        def first_messages(self, task):
            raise KeyError("row without a question")

    trajectory = play(Broken(), ["x"])
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert "row without a question" in trajectory.error


def test_usage_error_is_raised_not_recorded():
    class Picky(Sums):
        def sample_task(self, rng, options):
            raise UsageError("no split 'tset'")

    with pytest.raises(UsageError, match="tset"):
        play(Picky(), ["x"])


async def gives_up(episode):
    await episode.ask(episode.first_messages)


async def acts_unasked(episode):
    await episode.act({"role": "assistant", "content": "x"})


async def crashes(episode):
    raise ValueError("bug")


async def goes_on(episode):
    await ChatAgent().play(episode)
    await episode.ask([])


async def acts_on(episode):
    await ChatAgent().play(episode)
    await episode.act({"role": "assistant", "content": "x"})


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        (gives_up, "stopped before"),
        (acts_unasked, "before it has asked"),
        (crashes, "bug"),
        (goes_on, "asks the policy after the end"),
        (acts_on, "acts after the end"),
    ],
)
def test_agent_protocol_mistakes_are_agent_errors(agent, words):
    trajectory = play(Sums(), ["10", "10"], FunctionAgent(agent))
    assert trajectory.stop_reason is StopReason.AGENT_ERROR
    assert words in trajectory.error


def test_agent_cannot_swallow_engine_errors():
    async def stubborn(episode):
        for _ in range(3):
            try:
                await episode.ask(episode.first_messages)
            except Exception:
                continue

    trajectory = play(Sums(), raising(OSError("gone")), FunctionAgent(stubborn))
    assert trajectory.stop_reason is StopReason.ENGINE_ERROR
    trajectory = play(Sums(), ScriptedEngine(["x"], max_context=20), FunctionAgent(stubborn))
    assert trajectory.stop_reason is StopReason.MAX_TOKENS


def test_agent_may_ask_twice_before_acting():
    async def thinks(episode):
        assert [t.name for t in episode.tools] == ["add"]
        await episode.ask([{"role": "system", "content": "Plan."}, *episode.first_messages])
        await episode.act(await episode.ask([{"role": "user", "content": "Now answer."}]))

    trajectory = play(Sums(), ["plan", "10"], FunctionAgent(thinks))
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0]
    assert [m["role"] for m in trajectory.messages].count("assistant") == 2


def test_timeout_is_a_failure_not_a_reward():  # trap 5
    class Hangs(Sums):
        async def respond(self, message):
            await asyncio.sleep(60)

    trajectory = play(Hangs(), ["10"], timeout_s=0.05)
    assert trajectory.stop_reason is StopReason.TIMEOUT
    assert "0.05 s" in trajectory.error


def test_siblings_cannot_change_the_task_they_share():  # trap 6
    class Vandal(Sums):
        async def respond(self, message):
            self.task.data["row"].append(2)
            return Response(is_terminated=True)

    task = Task(id="t", data={"number": 1, "row": [1]})
    trajectory = play(Vandal(), ["x"], options={"task": task})
    assert trajectory.stop_reason is StopReason.ENV_ERROR
    assert task.data == freeze({"number": 1, "row": [1]})
    assert trajectory.task is task


def test_tool_error_is_sent_to_the_policy():
    trajectory = play(Sums(), ['<tool_call>{"name": "sub"}</tool_call>', "10"])
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert "no tool 'sub'" in trajectory.messages[2]["content"]


def test_cancelled_episode_releases_engine_and_environment():
    released, closed = [], []

    class Engine(ScriptedEngine):
        def release(self, session):
            released.append(session)

    class Closes(Sums):
        async def aclose(self):
            closed.append(True)

    async def cancel():
        in_flight = InFlight()
        engine = Engine(["10"], latency_s=60)
        task = asyncio.create_task(
            play_episode(Closes(), ChatAgent(), engine, RENDERER, options=TEST, in_flight=in_flight)
        )
        await asyncio.sleep(0.01)
        assert (in_flight.episodes, in_flight.engine, in_flight.env, in_flight.agent) == (
            1,
            1,
            0,
            0,
        )
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (in_flight.episodes, in_flight.engine, in_flight.agent) == (0, 0, 0)

    asyncio.run(cancel())
    assert len(released) == len(closed) == 1
    play(Closes(), Engine(["10"]))
    assert len(released) == len(closed) == 2


def test_exception_in_aclose_is_an_env_error():
    class Leaks(Sums):
        async def aclose(self):
            raise OSError("the interpreter does not end")

    class ForgetsAsync(Sums):
        def aclose(self):
            raise OSError("the interpreter does not end")

    for env in (Leaks(), ForgetsAsync()):
        trajectory = play(env, ["10"])
        assert trajectory.stop_reason is StopReason.ENV_ERROR
        assert "does not end" in trajectory.error


def test_equal_seeds_give_equal_episodes():
    seeds = []

    def reply(question):
        seeds.append(question.params.seed)
        return CALL if question.turn < 2 else "10"

    first, again = (play(Sums(), reply, seed=3) for _ in range(2))
    other = play(Sums(), reply, seed=4)
    assert first.token_ids == again.token_ids != other.token_ids
    assert seeds[:3] == seeds[3:6]
    assert len(set(seeds)) == 6
    assert derive_seed(1, 2) != derive_seed(2, 1)
    assert all(0 <= seed < 2**48 for seed in seeds)


def test_asynchronous_tools_are_awaited():
    @tool
    async def slow() -> str:
        """Wait."""
        await asyncio.sleep(0)
        return "done"

    env = Sums()
    env.tools = (add, slow)
    trajectory = play(env, ['<tool_call>{"name": "slow"}</tool_call>', "10"])
    assert trajectory.messages[2]["content"] == "done"


def test_tool_time_is_part_of_environment_time():
    @tool
    async def slow() -> str:
        """Wait."""
        await asyncio.sleep(0.02)
        return "done"

    env = Sums()
    env.tools = (slow,)
    called, answered = play(env, ['<tool_call>{"name": "slow"}</tool_call>', "10"]).turns
    assert 0.02 <= called.tool_s <= called.env_s
    assert answered.tool_s == 0 < answered.env_s
