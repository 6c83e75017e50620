"""What a call through the gateway costs, whether memory grows, and 256 streaming sessions at once.

    python benchmarks/gateway.py [--json]

The client is a process of its own: what is counted is the server's processor time. The policy is a
script, or, where tokens stream, the embedded engine with a tiny model of random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import aiohttp

from areal_gym.chat import Renderer
from areal_gym.engines.base import Engine, SamplingParams
from areal_gym.engines.scripted import ByteTokenizer, ScriptedEngine, byte_renderer
from areal_gym.gateway.gateway_server import Gateway
from areal_gym.gateway.session import Session
from areal_gym.recording import Recorder, TurnDraft
from areal_gym.types import Message
from areal_gym.utils.statistics import rss_mb

ANSWER = "The answer is 42, and here are a few words more of it."


class Host:
    """An episode without an environment, of which nothing is asked."""

    first_messages: Sequence[Message] = ()
    tools: Sequence[Any] = ()
    roles: Sequence[str] = ()
    role: str | None = None
    is_over = False

    async def call_tool(self, call_id: str) -> str:
        raise AssertionError("there are no tools")

    async def reply(self, answer: str) -> Sequence[Message]:
        raise AssertionError("the client goes on by itself")

    def give_reward(self, reward: float, *, turn: TurnDraft | None = None) -> None:
        raise AssertionError("nobody gives rewards")


# ---- the client's process ------------------------------------------------------------------------


def ask_in_a_process(
    pipe: Connection, url: str, keys: list[str], num_turns: int, is_stream: bool
) -> None:
    """Episodes of `num_turns` calls, one after the other for each key; all keys at once."""

    async def episode(http: aiohttp.ClientSession, key: str) -> int:
        messages = [{"role": "user", "content": "What is 6 * 7?"}]
        headers = {"Authorization": f"Bearer {key}"}
        num_tokens = 0
        for _ in range(num_turns):
            body: dict[str, Any] = {"messages": messages, "stream": is_stream, "model": "x"}
            if is_stream:
                body["stream_options"] = {"include_usage": True}
            async with http.post(f"{url}/chat/completions", json=body, headers=headers) as answer:
                if is_stream:
                    text = ""
                    async for line in answer.content:
                        if line.startswith(b"data: {"):
                            event = json.loads(line[6:])
                            for choice in event["choices"]:
                                text += choice["delta"].get("content") or ""
                            if event.get("usage"):
                                num_tokens += event["usage"]["completion_tokens"]
                else:
                    found = await answer.json()
                    text = found["choices"][0]["message"]["content"]
                    num_tokens += found["usage"]["completion_tokens"]
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "And then?"},
            ]
        return num_tokens

    async def run() -> int:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            return sum(await asyncio.gather(*(episode(http, key) for key in keys)))

    pipe.send(asyncio.run(run()))


async def asked(
    url: str, keys: list[str], *, num_turns: int, is_stream: bool
) -> tuple[int, float, float]:
    """Tokens that a client's process was told; this process's CPU seconds meanwhile; seconds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=ask_in_a_process, args=(theirs, url, keys, num_turns, is_stream)
    )
    process.start()
    start_s, wall_s = time.process_time(), time.perf_counter()
    while not ours.poll():
        await asyncio.sleep(0.02)
    cpu_s, wall_s = time.process_time() - start_s, time.perf_counter() - wall_s
    process.join()
    return ours.recv(), cpu_s, wall_s


# ---- what is measured ----------------------------------------------------------------------------


def open_sessions(
    gateway: Gateway, engine: Engine, renderer: Renderer, num: int, max_new_tokens: int = 200
) -> list[Session]:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    recorders = [Recorder(engine, renderer, params, seed=seed) for seed in range(num)]
    return [gateway.open_session(recorder, episode=Host()) for recorder in recorders]


async def overhead(
    *, is_stream: bool, num_sessions: int = 32, num_turns: int = 8, rounds: int = 6
) -> float:
    """CPU milliseconds of the server for a call, of episodes with `num_turns` calls."""
    engine = ScriptedEngine(lambda question: ANSWER, latency_s=0.001)
    gateway = Gateway()
    await gateway.start()
    best = []
    for _ in range(rounds):
        sessions = open_sessions(gateway, engine, byte_renderer(), num_sessions)
        keys = [session.api_key for session in sessions]
        base_url = sessions[0].base_url
        _, cpu_s, _ = await asked(base_url, keys, num_turns=num_turns, is_stream=is_stream)
        best.append(1000 * cpu_s / (num_sessions * num_turns))
        for session in sessions:
            session.close()
    await gateway.aclose()
    return min(best)


async def memory(
    num_calls: int = 20_000, num_turns: int = 10, at_once: int = 100
) -> tuple[float, float]:
    """MB that the process holds after half of the calls, and after all."""
    engine = ScriptedEngine(lambda question: ANSWER)
    gateway = Gateway()
    await gateway.start()
    free = gateway.serve_policy(engine, byte_renderer())
    renderer = byte_renderer()
    sizes = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def episode(session: Session, number: int) -> None:
            messages = [{"role": "user", "content": f"Number {number}."}]
            for _ in range(num_turns):
                async with http.post(
                    f"{session.base_url}/chat/completions",
                    json={"messages": messages},
                    headers={"Authorization": f"Bearer {session.api_key}"},
                ) as answer:
                    found = await answer.json()
                messages += [found["choices"][0]["message"], {"role": "user", "content": "More."}]

        for round_ in range(num_calls // (num_turns * at_once)):
            # Half of them are episodes of their own, half ask with the one key of `serve`.
            sessions = open_sessions(gateway, engine, renderer, at_once // 2)
            both = sessions + [free] * (at_once // 2)
            await asyncio.gather(*(episode(s, round_ * at_once + i) for i, s in enumerate(both)))
            for session in sessions:
                session.close()
            sizes.append(rss_mb() or 0.0)
    await gateway.aclose()
    return sizes[len(sizes) // 2], sizes[-1]


async def streams(num_sessions: int = 256, num_turns: int = 2) -> dict[str, float]:
    """256 sessions stream from the embedded engine: tokens told, tokens sampled, CPU per token."""
    from areal_gym.engines.embedded import EmbeddedEngine
    from areal_gym.models.tiny.decoder import build_decoder
    from areal_gym.models.tiny.decoder_config import DecoderConfig

    config = DecoderConfig(
        vocab_size=ByteTokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
    )
    engine = EmbeddedEngine(build_decoder(config, seed=0), num_slots=num_sessions, max_context=512)
    await engine.start()
    gateway = Gateway()
    await gateway.start()
    sessions = open_sessions(gateway, engine, byte_renderer(), num_sessions, max_new_tokens=48)
    keys = [session.api_key for session in sessions]
    told, cpu_s, wall_s = await asked(
        sessions[0].base_url, keys, num_turns=num_turns, is_stream=True
    )
    kept = sum(
        len(span)
        for session in sessions
        for span in session.recorder.outcome()["spans"]
        if span.origin == "policy"
    )
    found = {
        "tokens_told": told,
        "tokens_recorded": kept,
        "tokens_sampled": engine.stats.generated,
        "tokens_per_s": told / wall_s,
        "cpu_ms_per_token": 1000 * cpu_s / told,
    }
    await gateway.aclose()
    await engine.aclose()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--calls", type=int, default=20_000)
    arguments = parser.parse_args()
    half, end = asyncio.run(memory(arguments.calls))
    found = {
        "cpu_ms_per_call": asyncio.run(overhead(is_stream=False)),
        "cpu_ms_per_streamed_call": asyncio.run(overhead(is_stream=True)),
        "memory_half_way_mb": half,
        "memory_end_mb": end,
        **asyncio.run(streams()),
    }
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<28}{value:>14,.2f}")


if __name__ == "__main__":
    main()
