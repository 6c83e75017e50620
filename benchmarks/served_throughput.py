"""Throughput of a served policy: an engine against a raw aiohttp client, on the same real server.

    python benchmarks/served_throughput.py --engine vllm \
        --command ".vllm-venv/bin/python tests/vllm/serve_cpu.py"
    python benchmarks/served_throughput.py --engine sglang \
        --command ".sglang-venv/bin/python tests/sglang/serve_cpu.py --device cpu"

A small random decoder is served. Both clients send the same requests, `--in-flight` at a time: the
raw one is an aiohttp session that posts bodies and parses the answers, the other `engine.generate`,
with sessions, versions and log-probabilities. They take turns, in an order that changes from round
to round. The ratio of requests per second is the median over rounds; the CPU of a call is that of
the client's process, the median again; the server has processes of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from importlib import resources
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from areal_gym.engines.base import SamplingParams
from areal_gym.engines.servers.replies import TurnRequest
from areal_gym.engines.servers.server_engine import ServerEngine
from areal_gym.engines.sglang import SGLangEngine
from areal_gym.engines.sglang.sglang_replies import sampling_params
from areal_gym.engines.vllm import VLLMEngine
from areal_gym.engines.vllm.vllm_replies import GENERATE, generate_body
from areal_gym.models.tiny.checkpoint_files import save_checkpoint
from areal_gym.models.tiny.decoder import build_decoder
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.utils.garbage import relax_garbage_collection
from areal_gym.warm_start.starter_policy import build_tokenizer, save_tokenizer

CONTEXT = 512
PROMPT_TOKENS = 64
ENGINES: dict[str, type[ServerEngine]] = {"sglang": SGLangEngine, "vllm": VLLMEngine}
LIMITS = {
    "sglang": "--context-length 512 --max-total-tokens 65536 --max-running-requests 128 "
    "--dtype float32",
    "vllm": "--max-model-len 512 --max-num-seqs 128",
}

Call = Callable[[int], Awaitable[int]]


def small_policy(home: Path) -> Path:
    template = resources.files("areal_gym.warm_start").joinpath("chat_template.jinja").read_text()
    tokenizer = build_tokenizer([template, "Make 17 from 3, 4 and 5."], vocab_size=320)
    (home / "tokenizer").mkdir()
    save_tokenizer(tokenizer, home / "tokenizer", max_context=CONTEXT)
    config = DecoderConfig(
        architecture="qwen3",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|endoftext|>"),
    )
    return save_checkpoint(
        build_decoder(config, seed=0), home / "policy", tokenizer_dir=home / "tokenizer"
    )


def prompt_of(number: int) -> list[int]:
    return [20 + (number * 31 + i * i) % 200 for i in range(PROMPT_TOKENS)]


def raw_call(session: aiohttp.ClientSession, url: str, kind: str, num_tokens: int) -> Call:
    """Return a call that posts what the engine would, and counts the tokens of the answer."""
    params = SamplingParams(max_new_tokens=num_tokens)

    async def call(number: int) -> int:
        prompt = prompt_of(number)
        if kind == "vllm":
            request = TurnRequest(
                id=f"raw-{number}",
                prompt_ids=prompt,
                params=params,
                max_new_tokens=num_tokens,
                adapter=None,
                version=0,
                num_layers=None,
            )
            route, body = GENERATE, generate_body(request)
        else:
            sampling = sampling_params(params, num_tokens, has_seeds=False)
            route = "/generate"
            body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        async with session.post(url + route, data=json.dumps(body).encode()) as response:
            answer: Any = orjson.loads(await response.read())
        ids = answer["choices"][0]["token_ids"] if kind == "vllm" else answer["output_ids"]
        return len(ids)

    return call


def engine_call(engine: ServerEngine, num_tokens: int) -> Call:
    params = SamplingParams(max_new_tokens=num_tokens)

    async def call(number: int) -> int:
        session = f"episode-{number}"
        try:
            turn = await engine.generate(prompt_of(number), params, session=session)
        finally:
            engine.release(session)
        return len(turn.token_ids)

    return call


async def measure(call: Call, first: int, num_calls: int, in_flight: int) -> dict[str, float]:
    numbers = iter(range(first, first + num_calls))
    num_tokens = 0

    async def work() -> None:
        nonlocal num_tokens
        for number in numbers:
            num_tokens += await call(number)

    cpu_s, wall_s = time.process_time(), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(in_flight)))
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    return {
        "calls_per_s": num_calls / wall_s,
        "tokens_per_s": num_tokens / wall_s,
        "cpu_ms": cpu_s / num_calls * 1e3,
    }


async def compare(
    engine: ServerEngine, kind: str, in_flight: int, options: argparse.Namespace
) -> dict[str, float]:
    (url,) = engine.server_urls
    num_calls = max(4 * in_flight, 256) if in_flight < 512 else 2 * in_flight
    rounds: list[dict[str, dict[str, float]]] = []
    # The server drops idle connections after 5 s.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        calls = {
            "raw": raw_call(session, url, kind, options.tokens),
            "engine": engine_call(engine, options.tokens),
        }
        for number in range(options.rounds + 1):
            order = list(calls) if number % 2 else list(calls)[::-1]
            rounds.append({})
            for place, name in enumerate(order):
                first = (2 * number + place) * num_calls
                rounds[-1][name] = await measure(calls[name], first, num_calls, in_flight)
    measured = rounds[1:]  # the first one warms up

    def median(of: Callable[[dict[str, dict[str, float]]], float]) -> float:
        return statistics.median(of(row) for row in measured)

    return {
        "in_flight": in_flight,
        "raw_calls_per_s": median(lambda row: row["raw"]["calls_per_s"]),
        "engine_calls_per_s": median(lambda row: row["engine"]["calls_per_s"]),
        "ratio": median(lambda row: row["engine"]["calls_per_s"] / row["raw"]["calls_per_s"]),
        "tokens_per_s": median(lambda row: row["engine"]["tokens_per_s"]),
        "raw_cpu_ms": median(lambda row: row["raw"]["cpu_ms"]),
        "added_cpu_ms": median(lambda row: row["engine"]["cpu_ms"] - row["raw"]["cpu_ms"]),
    }


async def run(options: argparse.Namespace) -> list[dict[str, float]]:
    relax_garbage_collection()  # as a run does
    with tempfile.TemporaryDirectory() as home:
        engine = ENGINES[options.engine](
            small_policy(Path(home)),
            max_context=CONTEXT,
            command=options.command,
            server_args=f"{LIMITS[options.engine]} {options.server_args}",
        )
        try:
            await engine.start()
            return [
                await compare(engine, options.engine, in_flight, options)
                for in_flight in options.in_flight
            ]
        finally:
            await engine.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=sorted(ENGINES), required=True)
    parser.add_argument("--command", required=True, help="starts the server")
    parser.add_argument("--server-args", default="", help="further arguments of the server")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--tokens", type=int, default=16, help="new tokens per call")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    rows = asyncio.run(run(options))
    if options.json:
        print(
            json.dumps({"benchmark": "served_throughput", "engine": options.engine, "rows": rows})
        )
        return
    print(f"{options.engine}, {PROMPT_TOKENS} tokens of prompt, {options.tokens} new ones")
    print(
        f"{'in flight':>10}{'raw/s':>8}{'engine/s':>10}{'ratio':>7}{'raw CPU ms':>12}{'added':>8}"
    )
    for row in rows:
        print(
            f"{row['in_flight']:>10}{row['raw_calls_per_s']:>8.1f}"
            f"{row['engine_calls_per_s']:>10.1f}{row['ratio']:>7.2f}{row['raw_cpu_ms']:>12.2f}"
            f"{row['added_cpu_ms']:>8.2f}"
        )


if __name__ == "__main__":
    main()
