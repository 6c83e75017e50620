"""The recorded row is exactly what the engine saw and sampled."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from small import RecordingEngine, Sums

from areal_gym.agents.chat import ChatAgent
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ByteTokenizer, ScriptedEngine, byte_renderer
from areal_gym.envs.base import Response, TextEnv
from areal_gym.rollout.episode import play_episode
from areal_gym.types import FinishReason, StopReason, Task, Trajectory

RENDERER = byte_renderer()
ANY_TEXT = st.text(st.characters(), max_size=30)  # surrogates and control tokens' text included
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["tool", "user"]), "content": ANY_TEXT | st.just("<|im_end|>")}
    ),
    max_size=3,
)


class Prepared(TextEnv):
    """Answers with prepared messages, whatever the policy writes."""

    def __init__(self, first, replies, tools=()):
        super().__init__()
        self.first, self.replies, self.tools = first, replies, tools
        self.max_turns = len(replies)

    def sample_task(self, rng, options):
        return Task(id="t", data={})

    def first_messages(self, task):
        return [{"role": "user", "content": self.first}]

    async def respond(self, message):
        return Response(messages=self.replies[self.num_turns - 1], reward=1.0)


def play(env, engine, **options):
    return asyncio.run(play_episode(env, ChatAgent(), engine, RENDERER, **options))


def check_row(trajectory: Trajectory, engine: RecordingEngine):
    (calls,) = engine.log.values() or [[]]
    row = trajectory.token_ids
    assert len(calls) == len(trajectory.turns)
    for turn, (prompt, generation) in enumerate(calls):
        end = len(prompt) + len(generation.token_ids)
        assert row[: len(prompt)] == prompt  # every prompt extends what was seen and sampled before
        assert row[len(prompt) : end] == generation.token_ids
        sampled = [s for s in trajectory.spans if s.origin == "policy" and s.turn == turn]
        assert sum((s.logprobs for s in sampled), ()) == generation.logprobs
        versions = [v for s in sampled for v in [s.policy_version] * len(s)]
        assert versions == list(generation.versions)  # trap 11
        assert trajectory.turns[turn].finish_reason is generation.finish_reason
    # Nothing comes after the last sampled token, and the mask covers sampled tokens only: trap 34.
    assert len(row) == (end if calls else 0)
    is_sampled = [s.origin == "policy" for s in trajectory.spans for _ in s.token_ids]
    assert sum(is_sampled) == sum(len(g.token_ids) for _, g in calls)


@settings(max_examples=150, deadline=None)
@given(
    first=ANY_TEXT,
    replies=st.lists(MESSAGES, min_size=1, max_size=6),
    seed=st.integers(0, 2**48 - 1),
    max_context=st.integers(40, 500),
    max_new_tokens=st.integers(1, 30),
    publishes=st.booleans(),
    has_tools=st.booleans(),
)
def test_spans_are_what_the_engine_saw_and_sampled(
    first, replies, seed, max_context, max_new_tokens, publishes, has_tools
):
    engine = RecordingEngine(max_context=max_context, publishes=publishes)
    env = Prepared(first, replies, Sums.tools if has_tools else ())
    trajectory = play(env, engine, seed=seed, params=SamplingParams(max_new_tokens=max_new_tokens))
    check_row(trajectory, engine)
    assert not trajectory.stop_reason.is_failure, trajectory.error
    if any(t.finish_reason is FinishReason.LENGTH for t in trajectory.turns):
        assert trajectory.stop_reason is StopReason.MAX_TOKENS
        assert trajectory.turns[-1].finish_reason is FinishReason.LENGTH
    assert trajectory.reward == len(trajectory.turns)
    assert Trajectory.from_dict(trajectory.to_dict()).token_ids == trajectory.token_ids


def test_sampled_ids_that_decoding_would_change_are_kept():  # trap 24
    tokenizer = ByteTokenizer()
    # Sampled as bytes that are no UTF-8, and as the letters of a control token.
    odd = (0xC3, 0x28, *b"<|im_start|>", 0xFF, tokenizer.eos_token_id)
    assert tuple(tokenizer.encode(tokenizer.decode(odd))) != odd
    env = Prepared("x", [[{"role": "user", "content": "go on"}], []])
    trajectory = play(env, ScriptedEngine([odd, odd]))
    sampled = [span.token_ids for span in trajectory.spans if span.origin == "policy"]
    assert sampled == [odd, odd]
    assert "<|im_start|>" in trajectory.messages[1]["content"]
