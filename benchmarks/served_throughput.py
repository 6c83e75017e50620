"""Throughput of a served policy: an engine against a raw aiohttp client, on the same real server.

    python benchmarks/served_throughput.py --engine vllm \
        --command ".vllm-venv/bin/python tests/vllm/serve_cpu.py"
    python benchmarks/served_throughput.py --engine sglang \
        --command ".sglang-venv/bin/python tests/sglang/serve_cpu.py --device cpu"

A small random decoder is served. Both clients send the same requests, `--in-flight` at a time: the
raw one is an aiohttp session that posts bodies and parses the answers, the other `engine.generate`,
with sessions, versions and log-probabilities. They take turns, in an order that changes from round
to round. `ratio` is that of requests per second, `by CPU` that of calls per CPU second of client
and server together, which other work on the machine disturbs far less. `client` and `server` are
CPU milliseconds per call; `added` is what the engine's client takes more. All are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
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
from areal_gym.engines.servers.launch import LaunchedServer
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
from areal_gym.warm_start.starter_tokenizer import build_tokenizer, save_tokenizer

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
        async with session.post(url + route, data=orjson.dumps(body)) as response:
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


def cpu_s_of(group: int) -> float:
    """Return the CPU seconds of a process group's processes."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def measure(
    call: Call, first: int, num_calls: int, in_flight: int, group: int
) -> dict[str, float]:
    numbers = iter(range(first, first + num_calls))
    num_tokens = 0

    async def work() -> None:
        nonlocal num_tokens
        for number in numbers:
            num_tokens += await call(number)

    server_s, cpu_s, wall_s = cpu_s_of(group), time.process_time(), time.perf_counter()
    await asyncio.gather(*(work() for _ in range(in_flight)))
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    server_s = cpu_s_of(group) - server_s
    return {
        "calls_per_s": num_calls / wall_s,
        "tokens_per_s": num_tokens / wall_s,
        "client_ms": cpu_s / num_calls * 1e3,
        "server_ms": server_s / num_calls * 1e3,
        "all_ms": (cpu_s + server_s) / num_calls * 1e3,
    }


async def compare(
    engine: ServerEngine, kind: str, in_flight: int, options: argparse.Namespace
) -> dict[str, float]:
    (url,) = engine.server_urls
    server = engine.servers[0].process
    assert isinstance(server, LaunchedServer)
    assert server.process_group is not None
    group = server.process_group
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
                rounds[-1][name] = await measure(calls[name], first, num_calls, in_flight, group)
    measured = rounds[1:]  # the first one warms up

    def median(of: Callable[[dict[str, dict[str, float]]], float]) -> float:
        return statistics.median(of(row) for row in measured)

    return {
        "in_flight": in_flight,
        "raw_calls_per_s": median(lambda row: row["raw"]["calls_per_s"]),
        "engine_calls_per_s": median(lambda row: row["engine"]["calls_per_s"]),
        "ratio": median(lambda row: row["engine"]["calls_per_s"] / row["raw"]["calls_per_s"]),
        "tokens_per_s": median(lambda row: row["engine"]["tokens_per_s"]),
        "ratio_by_cpu": median(lambda row: row["raw"]["all_ms"] / row["engine"]["all_ms"]),
        "client_ms": median(lambda row: row["engine"]["client_ms"]),
        "server_ms": median(lambda row: row["engine"]["server_ms"]),
        "added_ms": median(lambda row: row["engine"]["client_ms"] - row["raw"]["client_ms"]),
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    rows = asyncio.run(run(options))
    if options.json:
        print(
            json.dumps({"benchmark": "served_throughput", "engine": options.engine, "rows": rows})
        )
        return
    print(f"{options.engine}, {PROMPT_TOKENS} tokens of prompt, {options.tokens} new ones")
    heads = ("in flight", "raw/s", "engine/s", "ratio", "by CPU", "client", "server", "added")
    print("".join(f"{head:>10}" for head in heads))
    for row in rows:
        rates = f"{row['in_flight']:>10}{row['raw_calls_per_s']:>10.1f}"
        rates += f"{row['engine_calls_per_s']:>10.1f}{row['ratio']:>10.2f}"
        times = f"{row['client_ms']:>10.2f}{row['server_ms']:>10.2f}{row['added_ms']:>10.2f}"
        print(f"{rates}{row['ratio_by_cpu']:>10.2f}{times}")


if __name__ == "__main__":
    main()
