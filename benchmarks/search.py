"""Searching 100,000 passages: `python benchmarks/search.py [--passages N] [--json]`.

Invented passages with words as rare as those of natural text (Zipf), queries of eight words:

    build      the index, once
    open       a process that finds it built
    query      one at a time, k = 10: median and 99th percentile
    episodes   1,024 at once of `search`: three searches, a page, an answer

CPU time is that of this process. Needs the extra `search` (tantivy).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from areal_gym.chat.tool_call_formats import write_call
from areal_gym.envs.search.search_env import SearchEnv
from areal_gym.envs.search.tantivy_index import open_index
from areal_gym.utils.statistics import rss_mb

NUM_WORDS, WORDS_EACH, NUM_QUERIES, NUM_EPISODES = 50_000, 60, 2_000, 1_024


def write_corpus(directory: Path, num_passages: int) -> tuple[Path, Path, list[str]]:
    """Files of passages and questions, and queries."""
    rng = random.Random(0)
    words = [f"w{n:x}" for n in range(NUM_WORDS)]
    weights = [1 / (n + 1) for n in range(NUM_WORDS)]
    corpus, questions = directory / "corpus.jsonl", directory / "questions.jsonl"
    queries: list[str] = []
    with corpus.open("w") as passages, questions.open("w") as asked:
        for number in range(num_passages):
            text = rng.choices(words, weights, k=WORDS_EACH)
            row = {"id": f"p{number}", "title": text[0], "text": " ".join(text)}
            passages.write(json.dumps(row) + "\n")
            if len(queries) < NUM_QUERIES:
                queries.append(" ".join(rng.sample(text, 8)))
                question = {"question": queries[-1], "answer": text[0], "support": [f"p{number}"]}
                asked.write(json.dumps(question) + "\n")
    return corpus, questions, queries


async def episodes(corpus: Path, questions: Path, queries: list[str]) -> None:
    envs = [SearchEnv(corpus=corpus, tasks=questions) for _ in range(NUM_EPISODES)]

    async def play(number: int, env: SearchEnv) -> None:
        env.reset(seed=number)
        for turn in range(3):
            await env.astep(write_call("search", {"query": queries[3 * number % 1_900 + turn]}))
        await env.astep(write_call("open", {"id": f"p{number}"}))
        assert (await env.astep(r"\boxed{w0}")).terminated

    await asyncio.gather(*(play(number, env) for number, env in enumerate(envs)))


def timed(work: Any) -> tuple[Any, float, float]:
    """What it gives, wall seconds, CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def measure(num_passages: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        os.environ["AREAL_GYM_CACHE"] = f"{name}/cache"
        corpus, questions, queries = write_corpus(Path(name), num_passages)
        before_mb = rss_mb() or 0.0
        _, build_s, build_cpu_s = timed(lambda: open_index(corpus))
        open_index.cache_clear()
        index, open_s, _ = timed(lambda: open_index(corpus))
        each = [timed(lambda q=query: index.search(q, 10)) for query in queries]
        walls = sorted(1e3 * wall for _, wall, _ in each)
        asyncio.run(episodes(corpus, questions, queries))
        _, wall_s, cpu_s = timed(lambda: asyncio.run(episodes(corpus, questions, queries)))
        return {
            "passages": num_passages,
            "build_s": build_s,
            "build_cpu_s": build_cpu_s,
            "open_s": open_s,
            "query_p50_ms": statistics.median(walls),
            "query_p99_ms": walls[int(0.99 * len(walls))],
            "query_cpu_ms": 1e3 * sum(cpu for *_, cpu in each) / len(each),
            "episodes_per_s": NUM_EPISODES / wall_s,
            "episode_cpu_ms": 1e3 * cpu_s / NUM_EPISODES,
            "memory_mb": (rss_mb() or 0.0) - before_mb,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--passages", type=int, default=100_000)
    arguments = parser.parse_args()
    row = measure(arguments.passages)
    if arguments.json:
        print(json.dumps({"benchmark": "search", **row, "aim": {"query_p50_ms": 5.0}}))
        return
    for name, value in row.items():
        print(f"{name:16}{value:12,.3f}" if isinstance(value, float) else f"{name:16}{value:12,}")
    print(f"aim: query_p50_ms below 5; {NUM_EPISODES:,} episodes at once")


if __name__ == "__main__":
    main()
