"""Publication of weights: seconds and bytes by each weight sync, and how long the event loop waits.

    python benchmarks/publication.py [--layers 14] [--rounds 3] [--json]

A decoder of 100M parameters is published in bfloat16 after real updates (AdamW, lr 1e-6), from a
trainer in a thread, to a server in another process that keeps what it receives and samples nothing.
`raw` is one gloo broadcast of the same bytes between two processes. `block` is the longest time for
which the event loop of the process that drives the run did not answer, where waiting for a core
that another process has does not count; `at rest` is the same in half a second without a
publication. CPU-s are those of that process. After each publication by `delta`, the relay's files
are compared with the weights, bit for bit. Times are the best of the rounds; the ratio to `raw`,
which is measured just before each publication, is the median.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from areal_gym.config import PluginConfig
from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.engines.sglang import FakeSGLangServer, SGLangEngine
from areal_gym.engines.weight_relay import WeightRelay
from areal_gym.models.flat_batch import causal_attend
from areal_gym.models.process_groups import join_group
from areal_gym.models.tiny.decoder import Decoder, build_decoder
from areal_gym.models.tiny.decoder_config import DecoderConfig
from areal_gym.trainer.weight_sync import make_weight_sync
from areal_gym.trainer.weight_sync.delta import DeltaWeightSync
from areal_gym.utils.http_servers.addresses import listen

CHANNELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("distributed", {"bucket_mb": 25}),  # several buckets: one is gathered while one is sent
    ("disk", {}),
    ("tensor", {}),
    ("tensor", {"handles": False}),
    ("delta", {}),
)


_REST_S = 0.5


class Receiver(ScriptedEngine):
    """An engine that takes weights, and does nothing with them."""

    async def publish(self, weights: Any, version: int) -> None:
        for _ in weights:
            pass


def model(num_layers: int) -> Decoder:
    config = DecoderConfig(
        architecture="qwen3",
        vocab_size=16_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=num_layers,
        num_attention_heads=12,
        num_key_value_heads=6,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return build_decoder(config, seed=0)


class Updates:
    """Real updates of the model: cross-entropy of random dialogues, AdamW."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-6)
        self._generator = torch.Generator().manual_seed(0)

    def step(self) -> None:
        ids = torch.randint(16_000, (64,), generator=self._generator)
        positions = torch.arange(len(ids))
        hidden = self.decoder.hidden_states(ids, positions, causal_attend([len(ids)]))
        loss = torch.nn.functional.cross_entropy(self.decoder.logits(hidden[:-1]), ids[1:])
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


class LoopProbe:
    """Measures the longest time for which an event loop did not answer."""

    def __init__(self) -> None:
        self.block_ms = 0.0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._probe())
        try:
            await asyncio.sleep(0)
            yield
        finally:
            task.cancel()

    async def _probe(self) -> None:
        while True:
            since_s, since_cpu_s = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.002)
            late_s = time.perf_counter() - since_s - 0.002
            # While other processes have the cores, this one cannot answer either.
            late_s = min(late_s, time.process_time() - since_cpu_s)
            self.block_ms = max(self.block_ms, 1000 * late_s)


@contextlib.contextmanager
def child(*arguments: object) -> Iterator[str]:
    """Run this script as another process; yield its first line."""
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


async def serve(directory: str | None) -> None:
    """Be a relay for a directory, or a server that keeps what it receives."""
    site: Any = FakeSGLangServer(Receiver(lambda _: [0]))
    if directory is not None:
        site = WeightRelay(Path(directory))
    async with site:
        print(site.url, flush=True)
        await asyncio.Event().wait()


class RawBroadcast:
    """One of two processes, of which rank 0 broadcasts as many bytes as are published."""

    def __init__(self, rank: int, port: int, num_bytes: int) -> None:
        facts: dict[str, Any] = {"world_size": 2, "name": "raw", "backend": "gloo"}
        self._group = join_group("127.0.0.1", port, rank=rank, timeout_s=600, **facts)
        self._flat = torch.zeros(num_bytes, dtype=torch.uint8)
        self.run()  # makes connections

    def run(self) -> float:
        """Broadcast once; return the seconds until both processes have the bytes."""
        dist.barrier(group=self._group)
        since_s = time.perf_counter()
        dist.broadcast(self._flat, src=0, group=self._group)
        dist.barrier(group=self._group)
        return time.perf_counter() - since_s


async def measure(
    channel: str,
    arguments: dict[str, Any],
    updates: Updates,
    rounds: int,
    home: Path,
    raw: RawBroadcast,
) -> dict[str, Any]:
    """Publish after updates; return the best time, and the longest block of the loop."""
    probe, rest, times, raws, cpu = LoopProbe(), LoopProbe(), [], [], []
    extra: dict[str, Any] = {}
    with child("server") as url, child("relay", home / "relay") as relay:
        engine = SGLangEngine(home, urls=[url], max_context=512, health_interval_s=60.0)
        await engine.start()
        if channel == "delta":
            arguments = {**arguments, "relay_port": int(relay.rpartition(":")[2])}
        settings = PluginConfig(id=channel, kwargs=arguments)
        sync = make_weight_sync(engine, settings, directory=home / channel)
        # The first one makes groups, and has nothing that it could compare with.
        for version in range(rounds + 1):
            await asyncio.to_thread(updates.step)
            weights = [(name, p.detach()) for name, p in updates.decoder.named_parameters()]
            raws.append(await asyncio.to_thread(raw.run))
            async with rest.running():
                await asyncio.sleep(_REST_S)
            async with probe.running():
                since_s, since_cpu_s = time.perf_counter(), time.process_time()
                await sync.publish(weights, version)
                times.append(time.perf_counter() - since_s)
                cpu.append(time.process_time() - since_cpu_s)
            if isinstance(sync, DeltaWeightSync):
                assert sync.last is not None
                require_equal(home / "relay", weights)
                if version == 0:
                    extra["whole_s"] = times[0]
                    extra["whole_bytes"] = sum(sync.last.num_bytes.values())
                extra["num_bytes"] = sum(sync.last.num_bytes.values())
                extra["changed"] = sync.last.num_changed / sync.last.num_weights
        await sync.aclose()
        await engine.aclose()
    # Side by side, because the machine's speed changes from minute to minute.
    ratios = [seconds / raw_s for seconds, raw_s in zip(times[1:], raws[1:], strict=True)]
    return {
        "channel": channel,
        "seconds": min(times[1:]),
        "cpu_s": min(cpu[1:]),
        "raw_s": min(raws[1:]),
        "of_raw": statistics.median(ratios),
        "block_ms": probe.block_ms,
        "rest_ms": rest.block_ms,
        **extra,
    }


def require_equal(directory: Path, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Compare a relay's files with the weights in bfloat16, bit for bit."""
    files = [load_file(file) for file in sorted(directory.glob("*.safetensors"))]
    kept = {name: tensor for file in files for name, tensor in file.items()}
    assert kept.keys() == {name for name, _ in weights}
    for name, tensor in weights:
        assert torch.equal(kept[name].view(torch.int16), tensor.bfloat16().view(torch.int16)), name


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        role, *rest = sys.argv[2:]
        torch.set_num_threads(1)
        if role == "broadcast":
            print(role, flush=True)
            raw = RawBroadcast(1, *map(int, rest))
            with contextlib.suppress(RuntimeError):  # the other end has left
                while True:
                    raw.run()
        else:
            asyncio.run(serve(rest[0] if rest else None))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=14, help="14 are 100M parameters")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    updates = Updates(model(arguments.layers))
    num_weights = sum(p.numel() for p in updates.decoder.parameters())
    rows = []
    with listen("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    with child("broadcast", port, 2 * num_weights):
        raw = RawBroadcast(0, port, 2 * num_weights)
        for channel, kwargs in CHANNELS:
            with tempfile.TemporaryDirectory() as home:
                settings = {"dtype": "bfloat16", **kwargs}
                rounds = arguments.rounds
                row = asyncio.run(measure(channel, settings, updates, rounds, Path(home), raw))
            rows.append({"num_bytes": 2 * num_weights, **row})
    if arguments.json:
        content = {"parameters": num_weights, "rows": rows}
        print(json.dumps({"benchmark": "publication", **content}))
        return
    print(f"{num_weights:,} parameters, {2 * num_weights / 1e6:.0f} MB in bfloat16")
    print(f"{'channel':<13}{'seconds':>9}{'CPU-s':>8}{'raw':>9}{'of raw':>9}{'MB':>9}", end="")
    print(f"{'block':>12}{'at rest':>12}")
    for row in rows:
        print(
            f"{row['channel']:<13}{row['seconds']:>9.3f}{row['cpu_s']:>8.2f}{row['raw_s']:>9.3f}"
            f"{row['of_raw']:>8.2f}x{row['num_bytes'] / 1e6:>9.2f}{row['block_ms']:>9.1f} ms"
            f"{row['rest_ms']:>9.1f} ms"
        )
    last = rows[-1]
    print(f"changed by an update: {last['changed']:.2%}; the first delta sends all: ", end="")
    print(f"{last['whole_s']:.3f} s, {last['whole_bytes'] / 1e6:.0f} MB")
    print("aims: distributed 1.5x of raw; block 50 ms")


if __name__ == "__main__":
    main()
