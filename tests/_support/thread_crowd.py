"""Runs eight programs with eight threads each at once.

    python -m tests._support.thread_crowd UID [PROTECTION...]

Prints the level, and the status and output of each program, as JSON. Protections are left out.
"""

import asyncio
import json
import sys

from areal_gym.sandbox import ProcessSandbox, SandboxLimits
from tests._support.ordinary_user import become

THREADS = """
import threading
everybody = threading.Barrier(9, timeout=100)
threads = [threading.Thread(target=everybody.wait) for _ in range(8)]
for thread in threads: thread.start()
everybody.wait()
for thread in threads: thread.join()
print("eight")
"""
NUMPY = """
import numpy, threading
everybody = threading.Barrier(9, timeout=100)
def work():
    a = numpy.ones((200, 200))
    everybody.wait()
    (a @ a).sum()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads: thread.start()
everybody.wait()
for thread in threads: thread.join()
print("eight")
"""
BOMB = """
import threading
for _ in range(200): threading.Thread(target=threading.Event().wait, daemon=True).start()
threading.Event().wait()
"""
LIMITS = SandboxLimits(wall_s=120.0, cpu_s=60.0)  # the default but for time


async def run(without):
    """Return the results of eight programs, and of one with too many threads."""
    async with ProcessSandbox(num_workers=8, without=without, min_level="none") as sandbox:
        sessions = [await sandbox.session() for _ in range(4)]
        results = await asyncio.gather(
            *(sandbox.run(code, limits=LIMITS) for code in (THREADS, NUMPY) * 2),
            *(session.run(code, limits=LIMITS) for session in sessions for code in (THREADS,)),
        )
        bomb = await sandbox.run(BOMB, limits=LIMITS)
        for session in sessions:
            await session.aclose()
        return {
            "level": (await sandbox.report()).level,
            "results": [[result.status, result.stdout, result.stderr] for result in results],
            "bomb": [bomb.status, bomb.stderr],
        }


if __name__ == "__main__":
    if int(sys.argv[1]):
        become(int(sys.argv[1]))
    print(json.dumps(asyncio.run(run(sys.argv[2:]))))
