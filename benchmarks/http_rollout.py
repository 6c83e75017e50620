"""What an episode costs over HTTP: rollout and SGLang engine, one server with an instant policy.

The server is a process of its own that answers `/generate` in SGLang's shape and does no more: what
is measured is the client: CPU milliseconds per episode and per call, episodes per second, memory
before, and how much more it takes at most, the batch of finished episodes included. Each row is the
best of three rounds after one that warms up; weights are published (a version) between rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from areal_gym.agents.chat import ChatAgent
from areal_gym.config import RolloutConfig
from areal_gym.engines.scripted import ByteTokenizer, byte_renderer
from areal_gym.engines.sglang import SGLangEngine
from areal_gym.rollout.episode_runners import EpisodeSetup
from areal_gym.rollout.runner import RolloutRunner
from areal_gym.runs.speed import CALL, Sums
from areal_gym.utils.garbage import relax_garbage_collection

NUM_TURNS = 5
IN_FLIGHT = (64, 1024)
END = ByteTokenizer.eos_token_id


class InstantServer(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, as little of it as one client needs."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        while (end := self.received.find(b"\r\n\r\n") + 4) >= 4:
            head = self.received[:end].lower()
            _, found, rest = head.partition(b"content-length:")
            length = int(rest.split(b"\r\n")[0]) if found else 0
            if len(self.received) < end + length:
                return
            route = self.received.split(b" ", 2)[1].decode()
            body, self.received = self.received[end : end + length], self.received[end + length :]
            status, answer = self.answer(route, body)
            self.transport.write(
                b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (status, len(answer), answer)
            )

    def answer(self, route: str, body: bytes) -> tuple[bytes, bytes]:
        if route == "/generate":
            # One message has ended per end-of-turn: tools, question, and two for each turn so far.
            num_turns = (json.loads(body)["input_ids"].count(END) - 2) // 2
            return b"200 OK", POLICY.answering if num_turns == 4 else POLICY.calling
        if route == "/update_weight_version":
            POLICY.say(json.loads(body)["new_version"])
        info: dict[str, object] = {"weight_version": POLICY.version}
        info |= {"version": "0.5.23", "max_req_input_len": 100_000}
        is_there = route in ("/model_info", "/server_info", "/update_weight_version")
        is_there = is_there or route in ("/abort_request", "/health")
        return b"200 OK" if is_there else b"404 Not Found", json.dumps(info).encode()


class InstantPolicy:
    """Calls the tool, or answers; both are written down before anybody asks."""

    def __init__(self) -> None:
        self.say("default")

    def say(self, version: str) -> None:
        self.version = version
        self.calling = self._answer_of(CALL)
        self.answering = self._answer_of("The answer is 7.")

    def _answer_of(self, text: str) -> bytes:
        ids = [*ByteTokenizer().encode(text), END]
        meta = {
            "id": "0" * 32,
            "finish_reason": {"type": "stop", "matched": END},
            "weight_version": self.version,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-6.925712585449219, token, None] for token in ids],
        }
        return json.dumps({"text": text, "output_ids": ids, "meta_info": meta}).encode()


POLICY = InstantPolicy()


def serve(pipe: Connection) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(InstantServer, "127.0.0.1", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        await loop.run_in_executor(None, pipe.recv)

    asyncio.run(main())


@contextmanager
def instant_server() -> Iterator[str]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        ours.send(None)
        process.join()


def memory_mb(key: str) -> float:
    """VmRSS: now; VmHWM: at most, since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


async def measure(url: str, in_flight: int, num_episodes: int) -> dict[str, float]:
    engine = SGLangEngine(Path("instant"), urls=[url], max_context=32768)
    await engine.start()
    config = RolloutConfig(
        batch_groups=max(1, num_episodes // 8),
        group_size=8,
        max_in_flight=in_flight,
        max_new_tokens=256,
    )
    forget_peak()
    before_mb = memory_mb("VmRSS")
    best: dict[str, float] = {}
    async with RolloutRunner(
        EpisodeSetup(Sums, ChatAgent(), engine, byte_renderer()), config
    ) as runner:
        for version in range(1, 5):
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            groups = await runner.next_batch()
            cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
            trajectories = [t for group in groups for t in group]
            assert all(t.reward == 1.0 and len(t.turns) == NUM_TURNS for t in trajectories)
            if version > 1 and cpu_s < best.get("cpu_s", float("inf")):
                best = {
                    "cpu_s": cpu_s,
                    "cpu_ms_per_episode": cpu_s / len(trajectories) * 1e3,
                    "cpu_ms_per_call": cpu_s / len(trajectories) / NUM_TURNS * 1e3,
                    "episodes_per_s": len(trajectories) / wall_s,
                }
            del groups, trajectories
            async with engine.updating(version) as servers:
                body = {"new_version": str(version)}
                await servers[0].post("/update_weight_version", body, timeout_s=60.0)
    best["rss_mb"] = before_mb
    best["growth_mb"] = memory_mb("VmHWM") - before_mb
    assert engine.stats.num_retries == 0
    await engine.aclose()
    return best


def measure_row(in_flight: int, num_episodes: int) -> dict[str, float]:
    relax_garbage_collection()  # as a run does
    with instant_server() as url:
        return asyncio.run(measure(url, in_flight, num_episodes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--episodes", type=int, default=1024, help="per round")
    options = parser.parse_args()
    rows = []
    for in_flight in IN_FLIGHT:
        # A process for each row: memory that one has used would hide what the next one needs.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            numbers = pool.submit(measure_row, in_flight, options.episodes).result()
        rows.append({"num_turns": NUM_TURNS, "in_flight": in_flight, **numbers})
    if options.json:
        print(json.dumps({"benchmark": "http_rollout", "rows": rows}))
        return
    print("five-turn tool episodes")
    print(f"{'in flight':>10}{'CPU ms':>8}{'a call':>8}{'per s':>8}{'RSS MB':>8}{'+ MB':>7}")
    for row in rows:
        print(
            f"{row['in_flight']:>10}{row['cpu_ms_per_episode']:>8.2f}"
            f"{row['cpu_ms_per_call']:>8.3f}{row['episodes_per_s']:>8.0f}{row['rss_mb']:>8.0f}"
            f"{row['growth_mb']:>7.0f}"
        )


if __name__ == "__main__":
    main()
