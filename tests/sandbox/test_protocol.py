"""No message of a cell or fork server can block or break the parent."""

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from areal_gym.errors import SandboxError
from areal_gym.sandbox import ProcessSandbox, SandboxLimits, SandboxStatus, cells
from areal_gym.sandbox.calls import MESSAGE_BYTES, CellMessage, parse_cell_message
from areal_gym.sandbox.process import _LocalServer
from areal_gym.sandbox.zygotes import Zygote

HANG_S = 240
"""A guard against hangs, far above what anything here takes."""
NONCE = b"0123456789abcdef"

STEAL = """
import os, sys
def steal():
    frame = sys._getframe()
    while frame:
        request = frame.f_locals.get("request")
        if isinstance(request, dict) and "nonce" in request:
            return request["nonce"].encode()
        frame = frame.f_back
    return b"0" * 16
def write(message):
    try:
        os.write(3, message)
    except OSError:
        pass
nonce = steal()
"""

ABUSES = {
    "nested": "for i in range(60): write(b'[' * 3000)\nos._exit(0)",
    "nested_objects": "write(b'{\"a\":' * 20_000)\nos._exit(0)",
    "nested_in_an_answer": "write(nonce + b' ok 1 value\\n' + b'[' * 60_000)\nos._exit(0)",
    "huge_number": "write(nonce + b' ok ' + b'9' * 50_000 + b' value\\n1')\nos._exit(0)",
    "negative_peak": "write(nonce + b' ok -1 value\\n1')",
    "infinite_peak": "write(nonce + b' ok 1e999 value\\n1')",
    "wrong_types": "write(nonce + b' [] {} null\\n1')\nwrite(b'{\"nonce\": []}')",
    "no_utf8": "write(nonce + b' ok 1 value\\n\\xff\\xfe\\x00\\xd8')",
    "nul": "write(b'\\0' * 5000)\nos._exit(0)",
    "empty": "import socket\nsocket.socket(fileno=os.dup(3)).send(b'')",
    "gigantic": "write(b'x' * 200_000)\nwrite(nonce + b' ok 1 value\\n' + b'y' * 200_000)",
    "flood": "for i in range(100_000): write(b'x')",
    "big_flood": "for i in range(1000): write(b'x' * 60_000)",
    "flood_of_answers": "for i in range(100_000): write(nonce + b' ok 1 value\\n1')",
    "begun_again": "for i in range(100): write(nonce + b' begun')",
    "closed": "os.close(3)",
    "closed_and_spinning": "os.close(3)\nwhile True: pass",
    "shut_down": "import socket\nsocket.socket(fileno=os.dup(3)).shutdown(2)",
    "another_descriptor_there": "os.dup2(os.open('/dev/null', 2), 3)",
    "answer_at_exit": "import atexit\natexit.register(write, nonce + b' ok 1 value\\nlate')",
    "nonce_of_another_call": "write(b'0' * 16 + b' ok 1 value\\n1')",
    "answer_and_spin": "write(nonce + b' ok 1 value\\n1')\nwhile True: pass",
    "killed_by_a_realtime_signal": "os.kill(os.getpid(), 40)",
    "stolen_request": "import threading\nthreading.Thread(target=os.read, args=(3, 9)).start()",
}


@pytest.mark.parametrize("without", [[], ["namespaces"]], ids=["isolated", "filtered"])
def test_channel_abuse_does_not_block_the_pool(without):
    limits = SandboxLimits(wall_s=0.6)  # some spin until then

    async def abuse(sandbox, code):
        await asyncio.gather(*(sandbox.run(code, limits=limits) for _ in range(2)))
        session = await sandbox.session()
        for _ in range(2):
            result = await session.run(code, limits=limits)
            assert 0 <= result.peak_memory_mb < 1e6
        await session.aclose()
        served = await sandbox.run("print('served')", limits=SandboxLimits(wall_s=60))
        assert served.stdout == "served\n", code

    async def go():
        async with (
            asyncio.timeout(HANG_S),
            ProcessSandbox(num_workers=2, without=without) as sandbox,
        ):
            await asyncio.gather(*(abuse(sandbox, STEAL + code) for code in ABUSES.values()))

    asyncio.run(go())


def test_channel_flood_ends_its_cell(execute):
    result = execute(STEAL + ABUSES["flood"])
    assert result.status is SandboxStatus.KILLED
    assert "channel" in result.stderr


def test_forged_answer_has_plain_types(runner, sandbox):
    async def go():
        session = await sandbox.session()
        code = STEAL + "write(nonce + b' ok 999999999999 value\\n\\xff\\xd8')"
        result = await session.run(code)
        await session.aclose()
        return result

    result = runner.run(go())
    assert result.value == "\ufffd\ufffd"
    assert math.isfinite(result.peak_memory_mb)


def test_stopped_fork_server_is_replaced(monkeypatch):
    monkeypatch.setattr(cells, "_END_S", 0.5)

    async def go():
        async with asyncio.timeout(HANG_S), ProcessSandbox(num_workers=1) as sandbox:
            session = await sandbox.session()
            assert (await session.run("1", limits=SandboxLimits(wall_s=60))).value == "1"
            server = sandbox.zygotes()[0].server.pid
            os.kill(server, signal.SIGSTOP)
            result = await session.run("while True: pass", limits=SandboxLimits(wall_s=0.5))
            assert result.status is SandboxStatus.TIMEOUT
            await session.aclose()
            monkeypatch.setattr(cells, "_END_S", 60.0)
            assert (await sandbox.run("2", limits=SandboxLimits(wall_s=60))).value == "2"
            assert sandbox.zygotes()[0].server.pid != server

    asyncio.run(go())


# ---- generated messages -----------------------------------------------------------------------

STATUSES = [b"ok", b"error", b"memory", b"begun", b"ready", b"timeout", b""]
KINDS = [b"value", b"traceback", b"nothing", b"", b"values"]
NUMBERS = st.one_of(
    st.integers(-(10**13), 10**13).map(lambda number: str(number).encode()),
    st.sampled_from([b"", b"nan", b"1e999", b"0x10", b"9" * 5000, b"\xd9\xa1", b" 1"]),
)
ANSWERS = st.builds(
    lambda nonce, status, number, kind, text: (
        b"%s %s %s %s\n%s" % (nonce, status, number, kind, text)
    ),
    st.sampled_from([b"NONCE", b"NONCE", NONCE, b""]),
    st.sampled_from(STATUSES),
    NUMBERS,
    st.sampled_from(KINDS),
    st.binary(max_size=8),
)
REAL = [b"ready", b"NONCE begun", b"NONCE ok 12000 value\n42", b"NONCE memory 9 nothing\n"]


def mutated(message: bytes, start: int, byte: bytes, count: int) -> bytes:
    """Return `message` with `count` bytes replaced by `byte`."""
    start %= len(message)
    return message[:start] + byte + message[start + count :]


MESSAGES = st.tuples(
    st.one_of(
        ANSWERS,
        st.binary(max_size=12),
        st.builds(
            mutated,
            st.sampled_from(REAL),
            st.integers(0, 40),
            st.binary(max_size=2),
            st.integers(0, 3),
        ),
        st.sampled_from([b"[", b'{"a":', b"9", b"\0", b"\xff", b"NONCE ", b"\n"]),
    ),
    st.sampled_from([1, 1, 1, 1, 2, 300, 6000]),
)
"""Bytes, and how often they are repeated in one message."""


@given(MESSAGES)
@example((b"", 1))
@example((b"x", MESSAGE_BYTES))
@example((b"NONCE ok 1 value", 1))
@settings(max_examples=1000)
def test_cell_messages_are_parsed_or_refused(repeated):
    unit, times = repeated
    message = parse_cell_message(unit.replace(b"NONCE", NONCE) * times)
    if message is not None:
        assert message.status in ("begun", "ok", "error", "memory")
        assert 0 <= message.peak_kb < 10**12
        assert message.value is None or message.traceback == ""


@given(st.sampled_from(["ok", "error", "memory"]), st.integers(0, 10**12 - 1), st.text())
def test_cell_answer_round_trips(status, peak_kb, text):
    text = text.encode("utf-8", "replace").decode()
    data = f"{NONCE.decode()} {status} {peak_kb} value\n{text}".encode()
    assert parse_cell_message(data) == CellMessage(NONCE.decode(), status, peak_kb, value=text)


ENDINGS = ["", "os._exit(0)", "1/0", "os.close(3)", "print(nonce)", "raise SystemExit(3)"]


def test_pool_serves_after_ten_thousand_fuzzed_messages(runner, sandbox):
    num_sent = 0
    session = runner.run(sandbox.session())

    @settings(max_examples=250, suppress_health_check=list(HealthCheck))
    @given(st.lists(MESSAGES, min_size=40, max_size=40), st.sampled_from(ENDINGS), st.booleans())
    def attack(messages, ending, is_fresh):
        nonlocal num_sent
        code = f"{STEAL}for unit, times in {messages!r}:\n"
        code += "    write(unit.replace(b'NONCE', nonce) * times)\n"
        running = (sandbox if is_fresh else session).run(code + ending)
        result = runner.run(asyncio.wait_for(running, HANG_S))
        num_sent += len(messages)
        assert result.status is not SandboxStatus.UNAVAILABLE
        assert result.value is None or isinstance(result.value, str)
        assert 0 <= result.peak_memory_mb < 1e9

    attack()
    assert num_sent >= 10_000
    runner.run(session.aclose())
    for _ in range(4):
        assert runner.run(sandbox.run("print('served')")).stdout == "served\n"


EVENTS = st.one_of(
    st.binary(max_size=40).filter(bool),
    st.sampled_from(
        [
            b"[" * 3000,
            b'{"event": "exit"}',
            b'{"event": "exit", "number": []}',
            b'{"event": "started"}',
            b'{"event": []}',
            b"9" * 5000,
            b'"exit"',
        ]
    ),
)


@settings(max_examples=8)
@given(EVENTS)
@example(b"[" * 3000)
def test_malformed_fork_server_messages_fail_its_start(event):
    """Whatever a fork server sends, no caller waits for ever."""

    async def go():
        errors = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = subprocess.Popen([sys.executable, "-S", "-c", ""], stderr=subprocess.PIPE)
        with theirs:
            starting = asyncio.create_task(
                Zygote.start(control, _LocalServer(process, f"/nowhere/{time.time()}"), num_warm=1)
            )
            await asyncio.sleep(0)
            theirs.send(event)
            with pytest.raises(SandboxError, match="did not start"):
                await asyncio.wait_for(starting, HANG_S)
        assert errors == []

    asyncio.run(go())
