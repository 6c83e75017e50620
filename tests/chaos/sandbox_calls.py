"""Sandbox calls, fresh and persistent, that crash, hang, flood, fork and use up their memory.

Sixteen callers share four workers; half of the callers keep a session. Every sixth call is an
attack, the others are plain and their results are checked: beside attacks, and in a session after
them. Counted are wrong results, sandbox failures, and what the process and its fork servers hold
before and after: memory, descriptors, processes.
"""

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path

from areal_gym.errors import SandboxError
from areal_gym.sandbox import ProcessSandbox, SandboxLimits, SandboxResult, SandboxStatus
from areal_gym.sandbox.suite.watch import descendants, resident_mb

NUM_CALLERS = 16
NUM_WORKERS = 4
SETTLE_S = 240.0
PLAIN_LIMITS = SandboxLimits(wall_s=240.0, cpu_s=120.0)
ATTACK_LIMITS = SandboxLimits(wall_s=0.3, memory_mb=192)
SLACK_MB = 48.0
"""Allocators do not hand back every page; a leak of 10 kB a call would be 200 MB."""

ATTACKS = {
    "hang": ["while True: pass", "import time; time.sleep(60)", "int('9' * 4000) ** 99999"],
    "crash": [
        "import os; os._exit(7)",
        "import os; os.abort()",
        "import ctypes; ctypes.string_at(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    ],
    "memory": [
        "x = bytearray(1 << 30)",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "import os\nfor _ in range(6): os.fork()\nx = bytearray(60 << 20)\nwhile True: pass",
        "import mmap\nm = [mmap.mmap(-1, 32 << 20) for _ in range(20)]\n"
        "for x in m: x.write(b'x' * len(x))",
    ],
    "flood": [
        "while True: print('x' * 10_000)",
        "import os\nfor _ in range(5000): os.write(3, b'[' * 3000)",
        "import os\nfor _ in range(60): os.write(3, b'[' * 3000)\nos._exit(0)",
        "import os\nfor fd in range(4): os.close(fd)",
    ],
    "processes": [
        "import os\nwhile True: os.fork()",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    while True: pass",
        "import threading\ndef f():\n    while True: pass\n"
        "for _ in range(50): threading.Thread(target=f, daemon=True).start()",
    ],
}


class _Chaos:
    def __init__(self, sandbox: ProcessSandbox, num_calls: int) -> None:
        self._sandbox = sandbox
        self._left = num_calls
        self.statuses: Counter[str] = Counter()
        self.attacks: Counter[str] = Counter()
        self.num_wrong = self.num_lost = 0

    async def caller(self, number: int) -> None:
        """Calls until none is left, odd numbers in a session of their own."""
        choices = random.Random(number)
        session = await self._sandbox.session() if number % 2 else None
        target = session or self._sandbox
        while self._left > 0:
            self._left -= 1
            if choices.random() < 1 / 6:
                kind = choices.choice(sorted(ATTACKS))
                self.attacks[kind] += 1
                await self._run(target, choices.choice(ATTACKS[kind]), ATTACK_LIMITS)
                continue
            value = choices.randrange(1000)
            result = await self._run(target, f"print({value} * 7)\n{value} + 1", PLAIN_LIMITS)
            if result is not None:
                self.num_wrong += not _is_right(result, value, is_fresh=session is None)
        if session:
            await session.aclose()

    async def _run(self, target, code: str, limits: SandboxLimits) -> SandboxResult | None:
        try:
            result = await target.run(code, limits=limits)
        except SandboxError:
            self.num_lost += 1
            return None
        self.statuses[result.status.value] += 1
        return result


def _is_right(result: SandboxResult, value: int, *, is_fresh: bool) -> bool:
    """Whether a plain call gave its value; a session may be harmed by the attacks before it."""
    if not is_fresh and not result.is_ok:
        return result.status is not SandboxStatus.UNAVAILABLE
    has_printed = not is_fresh or result.stdout == f"{value * 7}\n"
    return result.is_ok and result.value == str(value + 1) and has_printed


async def _holdings(sandbox: ProcessSandbox) -> dict[str, float]:
    """What is held when no call runs and every session is closed."""
    zygotes = sandbox.zygotes()
    deadline = time.monotonic() + SETTLE_S
    while True:
        num_cells = sum(zygote.num_cells for zygote in zygotes)
        num_processes = sum(len(descendants(zygote.server.pid)) for zygote in zygotes) - num_cells
        if num_processes == 0 and all(zygote.is_settled for zygote in zygotes):
            break
        assert time.monotonic() < deadline, f"{num_processes} processes are left"
        await asyncio.sleep(0.1)
    return {
        "processes": num_processes,
        # A channel and two pipes lead to each waiting cell.
        "descriptors": len(os.listdir("/proc/self/fd")) - 3 * num_cells,
        "resident_mb": round(resident_mb(os.getpid()), 1),
        "servers_mb": round(sum(resident_mb(zygote.server.pid) for zygote in zygotes), 1),
    }


async def _go(num_calls: int) -> dict[str, object]:
    async with ProcessSandbox(num_workers=NUM_WORKERS, modules=()) as sandbox:
        warm_up = _Chaos(sandbox, 32)
        await asyncio.gather(*(warm_up.caller(n) for n in range(NUM_CALLERS)))
        before = await _holdings(sandbox)
        chaos = _Chaos(sandbox, num_calls)
        await asyncio.gather(*(chaos.caller(n) for n in range(NUM_CALLERS)))
        after = await _holdings(sandbox)
        server = sandbox.zygotes()[0].server.pid
    assert chaos.num_wrong == 0, f"{chaos.num_wrong} wrong results"
    assert chaos.num_lost == 0, f"{chaos.num_lost} calls were lost"
    assert sum(chaos.statuses.values()) == num_calls
    assert after["descriptors"] == before["descriptors"], (before, after)
    for name in ("resident_mb", "servers_mb"):
        assert after[name] <= before[name] + SLACK_MB, (before, after)
    assert not Path(f"/proc/{server}").exists()
    return {
        "calls": num_calls,
        "attacks": dict(chaos.attacks),
        "statuses": dict(chaos.statuses),
        "wrong": chaos.num_wrong,
        "lost": chaos.num_lost,
        "before": before,
        "after": after,
    }


def run(small: bool, directory: Path) -> dict[str, object]:
    """Returns counts of calls, attacks and statuses, and what was held before and after."""
    return asyncio.run(_go(120 if small else 20_000))
