from __future__ import annotations

import asyncio
import json
import math
from collections import Counter

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

import areal_gym
from areal_gym.chat.tool_call_formats import write_call
from areal_gym.envs.search.corpus import Hit, MemoryIndex, Passage, read_corpus, terms, words
from areal_gym.envs.search.generated_world import world
from areal_gym.envs.search.retrievers import HttpRetriever
from areal_gym.errors import ConfigError, DataError, EnvError, UsageError
from areal_gym.plugins import PluginManager, Registry, RetrieverSpec, hookimpl, set_registry
from tests._support.paths import SHARED
from tests._support.web_app import served

DATA = SHARED / "data"
texts_of = st.text(alphabet="abcd ", max_size=30)


@given(st.lists(texts_of, min_size=1, max_size=12), texts_of, st.integers(1, 5))
def test_bm25_scores_equal_the_formula(texts, query, k):
    documents = [words(text) for text in texts]
    mean_length = sum(map(len, documents)) / len(documents)

    def score(document):
        total = 0.0
        for term in set(terms(query)):
            num = sum(term in other for other in documents)
            times = Counter(document)[term]
            if times:
                norm = times + 1.2 * (1 - 0.75 + 0.75 * len(document) / mean_length)
                total += math.log(1 + (len(texts) - num + 0.5) / (num + 0.5)) * times * 2.2 / norm
        return total

    index = MemoryIndex(Passage(str(n), "", text) for n, text in enumerate(texts))
    hits = index.search(query, k)
    expected = sorted((s for s in map(score, documents) if s > 0), reverse=True)[:k]
    assert [hit.score for hit in hits] == pytest.approx(expected)
    for hit in hits:
        assert hit.score == pytest.approx(score(documents[int(hit.passage.id)]))


# ---- an index on disk ------------------------------------------------------------------------


def corpus_file(path, passages):
    rows = (json.dumps(passage._asdict()) for passage in passages)
    path.write_text("\n".join(rows))
    return path


@pytest.fixture
def open_index(monkeypatch, tmp_path):
    pytest.importorskip("tantivy", reason="the extra `search` is not installed")
    from areal_gym.envs.search.tantivy_index import open_index

    monkeypatch.setenv("AREAL_GYM_CACHE", str(tmp_path / "cache"))
    open_index.cache_clear()
    return open_index


def test_disk_index_is_built_once_and_agrees_with_memory_index(open_index, tmp_path):
    corpus = corpus_file(tmp_path / "c.jsonl", world().passages)
    index, memory = open_index(corpus), MemoryIndex(world().passages)
    (place,) = (tmp_path / "cache" / "search").iterdir()
    before = (place / "areal_gym.json").stat().st_mtime_ns
    assert index._searcher.num_docs == len(world().passages)
    for question in list(world().questions())[:200]:
        (best,) = index.search(question["queries"][0], 1)
        assert best.passage == memory.search(question["queries"][0], 1)[0].passage
    assert index.get("p7") == memory.get("p7")
    assert index.get("p") is None
    open_index.cache_clear()
    assert open_index(corpus).search("Ada", 1)
    assert (place / "areal_gym.json").stat().st_mtime_ns == before


def test_changed_corpus_gets_a_new_index(open_index, tmp_path):
    corpus = corpus_file(tmp_path / "c.jsonl", world().passages[:5])
    assert open_index(corpus)._searcher.num_docs == 5
    open_index.cache_clear()
    corpus_file(corpus, world().passages[:6])
    assert open_index(corpus)._searcher.num_docs == 6


def test_index_of_another_corpus_is_refused(open_index, tmp_path):
    first = corpus_file(tmp_path / "first.jsonl", world().passages[:5])
    second = corpus_file(tmp_path / "second.jsonl", world().passages[5:9])
    open_index(first, tmp_path / "index")
    with pytest.raises(DataError, match=r"is of another corpus .* than .*second\.jsonl") as caught:
        open_index(second, tmp_path / "index")
    assert f"rm -r {tmp_path / 'index'}" in caught.value.hints[0]
    assert open_index(first, tmp_path / "index")._searcher.num_docs == 5


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"id": "a", "text": "b"}\n{"id": "a", "text": "c"}', "line 2: a second passage"),
        ('{"id": "a", "text": "b"}\n{"id": "a"}', "line 2: no field 'text'"),
        ('{"id": "a", "text": "b", "title": 3}', "field 'title' is 3"),
        ("{", "line 1: not JSON"),
        ("", "has no passages"),
    ],
)
def test_broken_corpus_is_named_and_leaves_no_index(open_index, tmp_path, text, problem):
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(text)
    with pytest.raises(DataError, match=problem):
        open_index(corpus)
    assert list((tmp_path / "cache" / "search").glob("*")) == []


def test_search_r1_contents_start_with_the_title(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"id": "0", "contents": "\\"Ada\\"\\nShe wrote."}')
    assert list(read_corpus(path)) == [Passage("0", "Ada", "She wrote.")]


@pytest.mark.skipif(not DATA.exists(), reason="no ../shared/data")
@pytest.mark.parametrize(
    ("corpus", "questions", "num_test"),
    [
        ("search/wiki_passages.jsonl.gz", "search/wiki_qa.jsonl", None),
        ("search_factbook/passages.jsonl.gz", "search_factbook/qa.jsonl", 147),
    ],
)
def test_public_questions_can_be_searched_and_answered(open_index, corpus, questions, num_test):
    env = areal_gym.make("search", corpus=DATA / corpus, tasks=DATA / questions, top_k=10)
    assert num_test is None or env.num_tasks("test") == num_test
    num_found = 0
    for index in range(30):
        env.reset(options={"split": "train", "index": index})
        text = env.step(write_call("search", {"query": env.messages[-1]["content"]})).observation
        num_found += any(answer in text for answer in env.task.data["answers"])
        assert env.step(env.gold_action()).reward == 1.0
    assert num_found > 3


# ---- a server ----------------------------------------------------------------------------------


class Server:
    """A Search-R1 retrieval server whose first answers are the given failures."""

    def __init__(self):
        self.index = MemoryIndex(world().passages)
        self.failures = []
        self.bodies = []

    async def answer(self, request):
        body = await request.json()
        self.bodies.append(body)
        if self.failures:
            failure = self.failures.pop(0)
            if failure == "hang":
                await asyncio.sleep(30)
            return web.Response(status=500 if failure == "down" else 200, text=failure)
        result = [
            [
                {"document": {"id": p.id, "contents": f'"{p.title}"\n{p.text}'}, "score": score}
                for p, score in self.index.search(query, body["topk"])
            ]
            for query in body["queries"]
        ]
        return web.json_response({"result": result})


def with_server(use):
    """Run `use(server, url)` beside a server."""

    async def run():
        server = Server()
        app = web.Application()
        app.router.add_post("/retrieve", server.answer)
        async with served(app) as url:
            return await use(server, f"{url}/retrieve")

    return asyncio.run(run())


def test_http_retriever_speaks_search_r1():
    async def use(server, url):
        env = areal_gym.make("search", retriever="http", retriever_kwargs={"url": url})
        env.reset(options={"split": "train", "index": 0})
        reward = 0.0
        while True:
            step = await env.astep(env.gold_action())
            reward += step.reward
            if step.terminated:
                break
        id = env.task.data["support"][0]
        env.reset(options={"task": env.task})
        opened = await env.astep(write_call("open", {"id": id}))
        assert set(server.bodies[0]) == {"queries", "topk", "return_scores"}
        return reward, opened.observation, world().passages[int(id[1:])]

    reward, opened, passage = with_server(use)
    assert reward == 1.0
    assert opened == f"{passage.title}\n{passage.text}"


@pytest.mark.parametrize(
    "failures", [["down"], ["{"], ["hang", "down"], ["[]"], ['{"result": []}']]
)
def test_http_retriever_retries_and_counts(failures):
    async def use(server, url):
        retriever = HttpRetriever(None, url=url, timeout_s=0.3)
        server.failures = list(failures)
        (hits,) = await retriever.search(["Ada"], 2)
        return retriever.num_retries, hits

    num_retries, hits = with_server(use)
    assert num_retries == len(failures)
    assert all(isinstance(hit, Hit) for hit in hits)


def test_unreachable_retriever_is_an_env_error():
    kwargs = {"url": "http://127.0.0.1:9/retrieve", "max_retries": 1}
    env = areal_gym.make("search", retriever="http", retriever_kwargs=kwargs)
    env.reset(seed=0)
    with pytest.raises(EnvError, match="failed 2 times"):
        env.step(env.gold_action())
    with pytest.raises(ConfigError, match="is not an HTTP URL"):
        areal_gym.make("search", retriever="http", retriever_kwargs={"url": "host:80"})
    with pytest.raises(ConfigError, match="retriever_kwargs do not fit 'http'"):
        areal_gym.make("search", retriever="http", retriever_kwargs={"uri": "x"})


# ---- a plugin ------------------------------------------------------------------------------------


class Dense:
    """Returns the first passages for every query."""

    def __init__(self, corpus, *, num=1):
        self.passages = world().passages[:num]

    async def search(self, queries, k):
        return [[Hit(passage, 1.0) for passage in self.passages] for _ in queries]

    async def get(self, id):
        return None


@hookimpl
def register_retrievers():
    yield RetrieverSpec(id="dense", entry_point=f"{__name__}:Dense", summary="by vectors")


def test_retriever_plugin_is_used():
    set_registry(Registry(PluginManager.installed(modules=[__name__])))
    try:
        env = areal_gym.make("search", retriever="dense", retriever_kwargs={"num": 2})
        env.reset(seed=0)
        step = env.step(write_call("search", {"query": "anything"}))
    finally:
        set_registry(None)
    assert [line.split()[0] for line in step.observation.splitlines()] == ["[p0]", "[p1]"]


def test_questions_without_corpus_are_refused(tmp_path):
    with pytest.raises(UsageError, match="go together"):
        areal_gym.make("search", tasks=tmp_path / "q.jsonl")
