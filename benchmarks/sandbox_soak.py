"""Many calls, some hostile, and what stays behind: `python benchmarks/sandbox_soak.py [--json]`.

20,000 executions, 64 at a time, one in twenty hostile (of those that ship with the package).
After a warm-up, and after each of ten rounds, it counts processes, descriptors, temporary files
and resident memory, of this process and of the fork servers; a leak grows with the rounds.
Exit code 1 when anything grew, or a plain snippet gave a wrong result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from areal_gym.plugins import registry
from areal_gym.sandbox import SandboxLimits, SandboxStatus
from areal_gym.sandbox.forking import ForkingSandbox
from areal_gym.sandbox.suite.watch import descendants, leftovers, resident_mb

PLAIN = (
    ("print({n} * 7)", "{seven}\n"),
    ("x = [i for i in range({n})]\nprint(len(x))", "{n}\n"),
    ("import math\nprint(math.comb(10, 3) + {n})", "{sum}\n"),
    ("open('f', 'w').write('x' * {n}); print(len(open('f').read()))", "{n}\n"),
)
PLAIN_LIMITS = SandboxLimits(wall_s=60.0, cpu_s=30.0)
HOSTILE_LIMITS = SandboxLimits(wall_s=0.3)
NUM_ROUNDS = 10
# Memory is not handed back to the last page: an allocator's own growth levels off.
SLACK_MB = 8.0


@dataclass(frozen=True)
class Holdings:
    """What the sandbox holds while nobody uses it."""

    processes: int
    descriptors: int
    files: int
    resident_mb: float
    servers_mb: float


async def settled_holdings(sandbox: ForkingSandbox) -> Holdings:
    problems = await leftovers(sandbox)
    assert not problems, problems
    zygotes = sandbox.zygotes()
    num_cells = sum(zygote.num_cells for zygote in zygotes)
    servers = [zygote.server.pid for zygote in zygotes]
    return Holdings(
        processes=sum(len(descendants(pid)) for pid in servers) - num_cells,
        # A channel and two pipes lead to a cell, a channel and perhaps a pipe to a server.
        descriptors=len(os.listdir("/proc/self/fd")) - 3 * num_cells - 2 * len(zygotes),
        files=len(os.listdir(tempfile.gettempdir())),
        resident_mb=resident_mb(os.getpid()),
        servers_mb=sum(map(resident_mb, servers)) / len(servers),
    )


def hostile_codes() -> list[str]:
    text = resources.files("areal_gym.sandbox.suite").joinpath("hostile.json").read_text()
    rows = json.loads(text)["snippets"]
    # Placeholders name bait that is not laid out here: such snippets fail, which is as good.
    return [row["code"] for row in rows if row["category"] != "benign"]


async def soak(
    sandbox: ForkingSandbox, num_calls: int, num_callers: int, share: float, seed: int
) -> dict[str, Any]:
    rng = random.Random(seed)
    hostile = hostile_codes()
    counts = {"calls": 0, "hostile": 0, "wrong": 0}
    left = 0

    async def caller() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            counts["calls"] += 1
            if rng.random() < share:
                counts["hostile"] += 1
                await sandbox.run(rng.choice(hostile), limits=HOSTILE_LIMITS)
                continue
            code, expected = rng.choice(PLAIN)
            n = rng.randrange(1, 1000)
            result = await sandbox.run(code.format(n=n), limits=PLAIN_LIMITS)
            values = {"n": n, "seven": 7 * n, "sum": 120 + n}
            if result.status is not SandboxStatus.OK or result.stdout != expected.format(**values):
                counts["wrong"] += 1

    async def go(num: int) -> Holdings:
        nonlocal left
        left = num
        await asyncio.gather(*(caller() for _ in range(num_callers)))
        return await settled_holdings(sandbox)

    await go(max(num_callers, num_calls // 20))  # whatever is made once, is made now
    counts.update(calls=0, hostile=0)
    started = time.perf_counter()
    rounds = [await go(num_calls // NUM_ROUNDS) for _ in range(NUM_ROUNDS)]
    return {
        **counts,
        "seconds": round(time.perf_counter() - started, 1),
        "rounds": [asdict(holdings) for holdings in rounds],
        "grown": grown(rounds),
    }


def grown(rounds: list[Holdings]) -> list[str]:
    """What the last rounds hold more of than the first ones."""
    half = len(rounds) // 2
    found = []
    for name, slack in (
        ("processes", 0),
        ("descriptors", 0),
        ("files", 0),
        ("resident_mb", SLACK_MB),
        ("servers_mb", SLACK_MB),
    ):
        early = max(getattr(r, name) for r in rounds[:half])
        late = min(getattr(r, name) for r in rounds[half:])
        if late > early + slack:
            found.append(f"{name}: {early:.1f} to {late:.1f}")
    return found


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    image = {"image": options.image} if options.image else {}
    sandbox = registry().make(
        "sandboxes", options.backend, num_workers=options.num_workers, **image
    )
    async with sandbox:
        return await soak(
            sandbox, options.num_calls, options.num_callers, options.hostile, options.seed
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="process", choices=("process", "docker"))
    parser.add_argument("--image", help="for docker")
    parser.add_argument("--num-calls", type=int, default=20_000)
    parser.add_argument("--num-callers", type=int, default=64)
    parser.add_argument("--num-workers", type=int, default=None)
    parser.add_argument("--hostile", type=float, default=0.05, help="their share")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        tempfile.tempdir = directory  # nobody else's files are counted
        report = asyncio.run(measure(options))
    is_good = not report["grown"] and not report["wrong"]
    if options.json:
        print(json.dumps(report))
        return int(not is_good)
    names = list(report["rounds"][0])
    print("round" + "".join(f"{name:>14}" for name in names))
    for number, row in enumerate(report["rounds"], 1):
        print(f"{number:5}" + "".join(f"{row[name]:14.1f}" for name in names))
    rate = report["calls"] / report["seconds"]
    print(
        f"{report['calls']} calls, {report['hostile']} hostile, {report['wrong']} wrong, "
        f"{report['seconds']:.0f} s, {rate:.0f}/s"
    )
    print("grown: " + ("; ".join(report["grown"]) or "nothing"))
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
