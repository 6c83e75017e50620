"""What a sandbox costs: `python benchmarks/sandbox.py [--backend docker] [--json] [--num-calls N]`.

Processor time counts this process, the fork servers and all cells that have ended. On a busy
machine trust it, and the ratios, more than the wall times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import time
from pathlib import Path

from areal_gym.plugins import registry
from areal_gym.sandbox import SandboxLimits
from areal_gym.sandbox.forking import ForkingSandbox

LIMITS = SandboxLimits(wall_s=60.0, cpu_s=60.0)
PLAIN = "print(1)"
SYMPY = "import sympy\nprint(sympy.sqrt(8))"


def cpu_s(sandbox: ForkingSandbox) -> float:
    """Processor time of this process and the sandbox's, with the children that were waited for."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    total = used.ru_utime + used.ru_stime
    for zygote in sandbox.zygotes():
        pid = zygote.server.pid
        for process in [pid, *children(pid)]:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def private_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


def percentile(times_s: list[float], share: float) -> float:
    return sorted(times_s)[min(len(times_s) - 1, int(share * len(times_s)))] * 1e3


async def one_by_one(sandbox: ForkingSandbox, code: str, num_calls: int) -> dict[str, float]:
    await sandbox.run(code, limits=LIMITS)
    times_s, cpu_before = [], cpu_s(sandbox)
    for _ in range(num_calls):
        started = time.perf_counter()
        assert (await sandbox.run(code, limits=LIMITS)).is_ok
        times_s.append(time.perf_counter() - started)
    cpu_ms = (cpu_s(sandbox) - cpu_before) / num_calls * 1e3
    return {"p50": percentile(times_s, 0.5), "p99": percentile(times_s, 0.99), "cpu": cpu_ms}


async def persistent(sandbox: ForkingSandbox, num_calls: int) -> dict[str, float]:
    session = await sandbox.session()
    await session.run(PLAIN, limits=LIMITS)
    times_s, cpu_before = [], cpu_s(sandbox)
    for _ in range(num_calls):
        started = time.perf_counter()
        await session.run(PLAIN, limits=LIMITS)
        times_s.append(time.perf_counter() - started)
    cpu_ms = (cpu_s(sandbox) - cpu_before) / num_calls * 1e3
    await session.aclose()
    return {"p50": percentile(times_s, 0.5), "p99": percentile(times_s, 0.99), "cpu": cpu_ms}


async def together(sandbox: ForkingSandbox, num_callers: int, num_calls: int) -> float:
    async def caller() -> None:
        for _ in range(max(1, num_calls // num_callers)):
            assert (await sandbox.run(PLAIN, limits=LIMITS)).is_ok

    started = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(num_callers)))
    return num_callers * max(1, num_calls // num_callers) / (time.perf_counter() - started)


async def measure(backend: str, num_calls: int) -> dict[str, float]:
    results: dict[str, float] = {}
    started = time.perf_counter()
    async with registry().make("sandboxes", backend) as sandbox:
        results["pool start, ms"] = (time.perf_counter() - started) * 1e3
        for name, figures in (
            ("fresh", await one_by_one(sandbox, PLAIN, num_calls)),
            ("fresh with sympy", await one_by_one(sandbox, SYMPY, num_calls // 4)),
            ("persistent", await persistent(sandbox, num_calls * 4)),
        ):
            for figure, value in figures.items():
                results[f"{name} {figure}, ms"] = value
        results["fresh at 64 callers, 1/s"] = await together(sandbox, 64, num_calls * 2)
        server = sandbox.zygotes()[0].server.pid
        while not (cells := children(server)):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        results["fork server, MB"] = private_mb(server)
        results["waiting cell, MB"] = sum(map(private_mb, cells)) / len(cells)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="process", choices=("process", "docker"))
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--num-calls", type=int, default=400)
    options = parser.parse_args()
    results = asyncio.run(measure(options.backend, options.num_calls))
    if options.json:
        print(json.dumps(results))
        return
    for name, value in results.items():
        print(f"{name:28}{value:10.2f}")


if __name__ == "__main__":
    main()
