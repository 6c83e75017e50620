"""20,000 gateway calls, many malformed, cut off or abandoned: nothing is left, nothing lost."""

import asyncio
import gc
import json
import os
import random
from pathlib import Path

from areal_gym.engines.scripted import ScriptedEngine
from areal_gym.utils.statistics import rss_mb
from tests._support.raw_http import exchange, request, statuses
from tests._support.scripted_gateway import open_recorded_session, running_gateway

KINDS = ("valid", "stream", "malformed", "cut off", "abandoned")
MALFORMED = (b"{", b"[]", b'{"messages": 3}', b'{"messages": [], "n": -1}', b"\xff", b"9" * 5000)


def chat(session, body, headers=()):
    """A whole request with the session's key."""
    headers = [("Authorization", f"Bearer {session.api_key}"), *headers]
    return request("POST", "/v1/chat/completions", body, headers)


async def call(kind, gateway, session, number, dice):
    """Makes one call; returns whether it was a turn that was answered."""
    messages = [{"role": "user", "content": f"Number {number}."}]
    body = json.dumps({"messages": messages, "stream": kind == "stream"}).encode()
    if kind in ("valid", "stream"):
        answer = await exchange(gateway._port, chat(session, body), ends=False)
        assert statuses(answer) == [200], answer
        assert b"Hello" in answer
        assert kind == "valid" or b"[DONE]" in answer
        return True
    if kind == "malformed":
        headers = [("Content-Encoding", "gzip")] if dice.random() < 0.3 else []
        raw = chat(session, dice.choice(MALFORMED), headers)
        assert statuses(await exchange(gateway._port, raw, ends=False)) == [400]
        return False
    raw = chat(session, body)
    if kind == "cut off":
        raw = raw[: dice.randrange(1, len(raw))]
    # Abandoned ones are complete: whoever sent them does not wait for the answer.
    _, writer = await asyncio.open_connection("127.0.0.1", gateway._port)
    writer.write(raw)
    await writer.drain()
    writer.transport.abort()
    return False


async def play(num_calls, at_once):
    """Plays all calls, in sessions of 50 calls each; figures before and after."""
    dice = random.Random(0)
    counts = dict.fromkeys(KINDS, 0)
    async with running_gateway() as (gateway, _):
        facts = []
        num_answers = num_turns = 0
        for start in range(0, num_calls, at_once):
            if start in (at_once, at_once * (num_calls // at_once // 2)):
                facts.append(await settled(gateway))
            session = open_recorded_session(gateway, ScriptedEngine(lambda question: "Hello."))
            kinds = dice.choices(KINDS, weights=(4, 2, 2, 1, 1), k=at_once)
            answers = await asyncio.gather(
                *(call(kind, gateway, session, start + i, dice) for i, kind in enumerate(kinds))
            )
            for kind in kinds:
                counts[kind] += 1
            num_answers += sum(answers)
            await settled(gateway)
            turns = len(session.recorder.turns)
            assert turns >= sum(answers), "a turn that was answered is not recorded"
            num_turns += turns
            session.close()
        facts.append(await settled(gateway))
    first, half, last = facts if len(facts) == 3 else (facts[0], facts[0], facts[-1])
    assert last["sessions"] == first["sessions"]
    assert last["files"] <= first["files"]
    return {
        **counts,
        "answered": num_answers,
        "lost": 0,
        "memory_mb": [round(fact["memory_mb"], 1) for fact in (first, half, last)],
        "open_files": [fact["files"] for fact in (first, half, last)],
        "sessions": [fact["sessions"] for fact in (first, half, last)],
    }


async def settled(gateway):
    """Waits until no call and no connection is left, and counts what the process holds."""
    async with asyncio.timeout(120):
        while gateway.num_calls or len(gateway._site.guard):
            await asyncio.sleep(0.01)
    gc.collect()
    return {
        "memory_mb": rss_mb() or 0.0,
        "files": len(os.listdir("/proc/self/fd")),
        "sessions": len(gateway.sessions),
    }


def run(small: bool, directory: Path) -> dict[str, object]:
    """Calls a gateway 20,000 times, or 300."""
    return asyncio.run(play(300 if small else 20_000, 50))
