"""Processor time of a call to the gateway from inside a place's network namespace.

    python benchmarks/gateway_inside.py [CALLS]

A program in a local place asks a scripted policy through the socket there, over one connection.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time

from areal_gym.engines.scripted import ScriptedEngine, byte_renderer
from areal_gym.gateway.gateway_server import Gateway
from areal_gym.places import PlaceImage, PlaceLimits
from areal_gym.places.local_images import HOST_ROOT
from areal_gym.places.local_places import LocalPlaces

PROGRAM = """
import http.client, json, os, sys, time
connection = http.client.HTTPConnection("127.0.0.1", 8900)
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "Say hi."}]})
headers = {"Authorization": "Bearer " + os.environ["KEY"], "Content-Type": "application/json"}
times = []
for _ in range(int(os.environ["CALLS"])):
    start = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, headers)
    reply = connection.getresponse()
    assert reply.status == 200, reply.read()
    reply.read()
    times.append(time.perf_counter() - start)
print(json.dumps(times))
"""


async def measure(num_calls: int) -> None:
    places, gateway = LocalPlaces(), Gateway()
    await gateway.start()
    place = await places.start(PlaceImage(reference=HOST_ROOT), PlaceLimits())
    try:
        session = gateway.serve_policy(ScriptedEngine(lambda _: "hi"), byte_renderer())
        start_s = time.perf_counter()
        await session.listen_at(await place.listen(8900))
        listen_s = time.perf_counter() - start_s
        env = {"KEY": session.api_key}
        for calls in (20, num_calls):  # the first ones warm everything up
            cpu_s = time.process_time()
            result = await place.run(
                ["python3", "-c", PROGRAM], env={**env, "CALLS": str(calls)}, timeout_s=300
            )
            cpu_s = time.process_time() - cpu_s
        times = sorted(json.loads(result.stdout))
        print(
            json.dumps(
                {
                    "calls": num_calls,
                    "listen_ms": round(1e3 * listen_s, 2),
                    "server_cpu_ms_a_call": round(1e3 * cpu_s / num_calls, 3),
                    "median_ms": round(1e3 * statistics.median(times), 3),
                    "p99_ms": round(1e3 * times[int(0.99 * len(times))], 3),
                }
            )
        )
    finally:
        await place.aclose()
        await places.aclose()
        await gateway.aclose()


if __name__ == "__main__":
    asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
