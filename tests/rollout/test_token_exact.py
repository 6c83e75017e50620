"""The recorded row is exactly what the engine saw and sampled."""

import asyncio
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from areal_gym.agents.chat import ChatAgent
from areal_gym.chat import Renderer
from areal_gym.engines.base import SamplingParams
from areal_gym.engines.scripted import ByteTokenizer, ScriptedEngine, byte_renderer
from areal_gym.envs.base import Response, TextEnv
from areal_gym.rollout.episode import play_episode
from areal_gym.rollout.group_json import dump_row, pack_group, unpack_group
from areal_gym.trainer.batch.sequences import make_sequences
from areal_gym.types import FinishReason, Group, StopReason, Task, Trajectory
from tests._support.sums_env import RecordingEngine, Sums

RENDERER = byte_renderer()
ANY_TEXT = st.text(st.characters(), max_size=30)  # surrogates and control tokens' text included
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["tool", "user"]), "content": ANY_TEXT | st.just("<|im_end|>")}
    ),
    max_size=3,
)


class PreparedEnv(TextEnv):
    """Answers with prepared messages, independent of the policy."""

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
def test_spans_equal_the_engine_prompts_and_samples(
    first, replies, seed, max_context, max_new_tokens, publishes, has_tools
):
    engine = RecordingEngine(max_context=max_context, publishes=publishes)
    env = PreparedEnv(first, replies, Sums.tools if has_tools else ())
    trajectory = play(env, engine, seed=seed, params=SamplingParams(max_new_tokens=max_new_tokens))
    check_row(trajectory, engine)
    assert not trajectory.stop_reason.is_failure, trajectory.error
    if any(t.finish_reason is FinishReason.LENGTH for t in trajectory.turns):
        assert trajectory.stop_reason is StopReason.MAX_TOKENS
        assert trajectory.turns[-1].finish_reason is FinishReason.LENGTH
    assert trajectory.reward == len(trajectory.turns)
    assert Trajectory.from_dict(trajectory.to_dict()).token_ids == trajectory.token_ids


def test_sampled_ids_are_never_reencoded():  # trap 24
    tokenizer = ByteTokenizer()
    # Bytes that are not UTF-8, and the letters of a control token.
    odd = (0xC3, 0x28, *b"<|im_start|>", 0xFF, tokenizer.eos_token_id)
    assert tuple(tokenizer.encode(tokenizer.decode(odd))) != odd
    env = PreparedEnv("x", [[{"role": "user", "content": "go on"}], []])
    trajectory = play(env, ScriptedEngine([odd, odd]))
    sampled = [span.token_ids for span in trajectory.spans if span.origin == "policy"]
    assert sampled == [odd, odd]
    assert "<|im_start|>" in trajectory.messages[1]["content"]


# ---- forks -----------------------------------------------------------------------------------

NUMBERED = Renderer(
    ByteTokenizer(),
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.index }} of {{ messages | length }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
)
"""A template in which every new message changes the whole text."""


class SummarisingAgent:
    """Replaces the history by a summary where `rewrites` says so."""

    def __init__(self, rewrites):
        self.rewrites = iter(rewrites)

    async def play(self, episode):
        messages, replaces = episode.first_messages, False
        while True:
            result = await episode.act(await episode.ask(messages, replaces_history=replaces))
            if result.terminated or result.truncated:
                return
            messages, replaces = result.info["messages"], next(self.rewrites, False)
            if replaces:
                messages = [{"role": "user", "content": f"Summary {len(messages)}"}]


@settings(max_examples=60, deadline=None)
@given(
    replies=st.lists(MESSAGES, min_size=1, max_size=6),
    rewrites=st.lists(st.booleans(), max_size=6),
    seed=st.integers(0, 2**48 - 1),
    max_context=st.integers(60, 600),
    does_template_rewrite=st.booleans(),
)
def test_branches_equal_the_engine_prompts_and_samples(
    replies, rewrites, seed, max_context, does_template_rewrite
):
    engine = RecordingEngine(max_context=max_context, publishes=True, stop_share=1.0)
    trajectory = asyncio.run(
        play_episode(
            PreparedEnv("x", replies),
            SummarisingAgent(rewrites),
            engine,
            NUMBERED if does_template_rewrite else RENDERER,
            seed=seed,
            params=SamplingParams(max_new_tokens=30),
        )
    )
    assert not trajectory.stop_reason.is_failure, trajectory.error
    (calls,) = engine.log.values() or [[]]
    turns = [(turn, spans) for spans in trajectory.branches for turn in {s.turn for s in spans}]
    assert [turn for turn, _ in turns] == list(range(len(calls)))
    for (turn, spans), (prompt, generation) in zip(turns, calls, strict=True):
        before = [s for s in spans if s.turn < turn or (s.turn == turn and s.origin != "policy")]
        assert tuple(i for s in before for i in s.token_ids) == prompt
        sampled = [s for s in spans if s.turn == turn and s.origin == "policy"]
        assert sum((s.token_ids for s in sampled), ()) == generation.token_ids
    assert trajectory.num_policy_tokens == sum(len(g.token_ids) for _, g in calls)
    assert all(spans[0].origin == "prompt" for spans in trajectory.branches)
    assert len(trajectory.branches) == trajectory.num_forks + 1 or not calls
    num_asked = len(calls) - 1
    if does_template_rewrite:
        assert trajectory.num_forks == max(0, num_asked)
    else:
        assert trajectory.num_forks == sum(rewrites[: max(0, num_asked)])
    if trajectory.stop_reason is StopReason.MAX_TOKENS:  # a branch that does not fit is not sent
        assert all(len(prompt) < max_context for prompt, _ in calls)
    rows = make_sequences(trajectory)
    assert sum(row.num_trainable for row in rows) == trajectory.num_policy_tokens
    assert {row.reward for row in rows} == {trajectory.reward}
    group = Group(id="g", task=trajectory.task, trajectories=(trajectory,))
    assert unpack_group(json.loads(dump_row(pack_group(group)))) == group


def test_branch_beyond_the_context_truncates_and_keeps_samples():
    long = [{"role": "user", "content": "y" * 300}]
    engine = RecordingEngine(max_context=400, stop_share=1.0)
    trajectory = asyncio.run(
        play_episode(PreparedEnv("x", [long, long, long]), ChatAgent(), engine, NUMBERED)
    )
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert 1 <= len(trajectory.turns) < 3
    assert trajectory.num_policy_tokens > 0
    assert trajectory.reward == len(trajectory.turns)
