from __future__ import annotations

import asyncio
import json

import pytest

import areal_gym
from areal_gym.chat.tool_call_formats import write_call
from areal_gym.envs.search.generated_world import world
from areal_gym.errors import DataError, UnknownIdError, UsageError
from areal_gym.types import content_hash


def call(name, **arguments):
    return write_call(name, arguments)


def make_started(**kwargs):
    env = areal_gym.make("search", **kwargs)
    env.reset(options={"split": "train", "index": 0})
    return env


def play_gold(env, options):
    env.reset(options=options)
    steps = [env.step(env.gold_action())]
    while not (steps[-1].terminated or steps[-1].truncated):
        steps.append(env.step(env.gold_action()))
    return steps


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_built_in_questions_are_answerable_by_search(hops):
    env = areal_gym.make("search", hops=[hops])
    for index in range(env.num_tasks("test")):
        steps = play_gold(env, {"split": "test", "index": index})
        assert len(steps) == hops + 1
        assert steps[-1].reward == 1.0
        num_support = sum(step.info["metrics"].get("found", 0) for step in steps)
        assert num_support == len(set(env.task.data["support"]))
        # What the last search shows has the answer in it, and no earlier one is enough.
        assert env.task.data["answers"][0] in steps[-2].observation


def test_built_in_questions_are_distinct_with_1_to_3_hops():
    questions = list(world().questions())
    assert len({question["question"] for question in questions}) == len(questions) > 2_000
    assert {len(question["queries"]) for question in questions} == {1, 2, 3}


def test_the_built_in_world_is_the_same_in_every_version():
    assert content_hash([list(passage) for passage in world().passages]) == "74cdca0e8fdb3cbc"
    assert content_hash(list(world().questions())) == "9fcdaec185bc49d8"


def test_search_shows_ids_titles_and_limited_snippets():
    env = make_started(top_k=2, max_snippet=8)
    step = env.step(call("search", query=env.task.data["queries"][0]))
    first, second = step.observation.splitlines()
    passage = world().passages[int(env.task.data["support"][0][1:])]
    assert first.startswith(f"[{passage.id}] {passage.title}: {passage.text[:8]}... (")
    assert second.startswith("[p")


def test_opened_pages_are_limited():
    env = make_started(max_pages=2, max_page=10)
    steps = [env.step(call("open", id=id)) for id in ("p0", "[p1]", "p2", "nope")]
    assert steps[0].observation.startswith(world().passages[0].title[:10])
    assert steps[1].info["metrics"]["pages"] == 1
    assert "2 pages were opened" in steps[2].observation
    assert steps[3].info["metrics"] == {
        "tool_calls": 1, "tool_errors": 1, "searches": 0, "pages": 0, "found": 0
    }  # fmt: skip
    env.reset(options={"split": "train", "index": 0})
    assert "no passage 'nope'" in env.step(call("open", id="nope")).observation


def test_batch_search():
    env = make_started(tools=("batch_search",), top_k=1)
    queries = [passage.title for passage in world().passages[:2]]
    step = env.step(call("batch_search", queries=queries))
    assert [block.splitlines()[0] for block in step.observation.split("\n\n")] == [
        f"{query}:" for query in queries
    ]
    assert step.info["metrics"]["searches"] == 2
    for bad in ([], ["a"] * 11, [1], [""], ["x" * 2_000]):
        assert env.step(call("batch_search", queries=bad)).observation.startswith("error: ")


@pytest.mark.parametrize(
    "query", ["", "  ", "\ud800", "\0", "a:b AND (c", "?!", "x" * 5_000, "\u202e"]
)
def test_adversarial_queries_are_answered(query):
    text = json.dumps({"name": "search", "arguments": {"query": query}})
    step = make_started().step(f"<tool_call>{text}</tool_call>")
    assert isinstance(step.observation, str)
    assert not step.terminated


def test_citations_earn_part_of_the_reward():
    env = areal_gym.make("search", citations=0.4, hops=[2])
    env.reset(options={"split": "test", "index": 0})
    assert "Cite the passages" in env.messages[0]["content"]
    answer = f"\\boxed{{{env.task.data['answers'][0]}}}"
    support = env.task.data["support"]
    for cited, share in (("", 0.0), (f"[{support[0]}]", 2 / 3), (f"[{support[1]}] [x]", 0.5)):
        env.reset(options={"task": env.task})
        step = env.step(f"{answer} {cited}")
        assert step.reward == pytest.approx(0.6 + 0.4 * share)
        assert step.info["reward_parts"]["citation"] == pytest.approx(share)
    env.reset(options={"task": env.task})
    assert env.step(f"\\boxed{{nowhere}} [{support[0]}] [{support[1]}]").reward == 0.0
    assert play_gold(env, {"split": "test", "index": 1})[-1].reward == 1.0


def test_score_f1():
    task = {"id": "t", "data": {"question": "Who?", "answers": ["Ada Lovelace King"]}}
    env = areal_gym.make("search", score="f1")
    env.reset(options={"task": task})
    assert env.step(r"\boxed{Ada Lovelace}").reward == pytest.approx(0.8)


def test_wrong_search_settings_are_refused(tmp_path):
    with pytest.raises(UsageError, match="go together"):
        areal_gym.make("search", corpus=tmp_path / "c.jsonl")
    with pytest.raises(UsageError, match="score = 'rouge'"):
        areal_gym.make("search", score="rouge")
    with pytest.raises(UsageError, match="1, 2 or 3"):
        areal_gym.make("search", hops=[7])
    with pytest.raises(UsageError, match="a list of search"):
        areal_gym.make("search", tools=["browse"])
    with pytest.raises(UnknownIdError, match="no retriever 'bm26'"):
        areal_gym.make("search", retriever="bm26")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "?"}, "no field 'answer'"),
        ({"question": "?", "answers": []}, "a list of texts"),
        ({"question": "?", "answers": "a"}, "a list of texts"),
        ({"question": "?", "answers": ["a"], "support": [1]}, "a list of texts"),
        ({"question": "?", "answers": ["a"], "split": "dev"}, "split 'dev'"),
    ],
)
def test_broken_question_rows_are_named(tmp_path, row, problem):
    pytest.importorskip("tantivy")
    corpus, questions = tmp_path / "c.jsonl", tmp_path / "q.jsonl"
    corpus.write_text('{"id": "a", "text": "b"}')
    questions.write_text(json.dumps(row))
    with pytest.raises(DataError, match=problem) as caught:
        areal_gym.make("search", corpus=corpus, tasks=questions)
    assert f"{questions}, line 1" in str(caught.value)


def test_concurrent_episodes_share_one_index():
    async def run_episode(env):
        env.reset(seed=7)
        reward = 0.0
        while True:
            step = await env.astep(env.gold_action())
            reward += step.reward
            if step.terminated:
                return reward

    async def run_all(envs):
        return await asyncio.gather(*map(run_episode, envs))

    envs = [areal_gym.make("search") for _ in range(1_024)]
    assert len({id(env.retriever) for env in envs}) == 1
    assert set(asyncio.run(run_all(envs))) == {1.0}
