"""Somebody who types commands: in this process, as that is quicker, and Ctrl-C where one serves."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_gym.cli.app import run
from areal_gym.plugins import PluginManager, Registry, set_registry

PATIENCE_S = 60

Until = Callable[[Callable[[str], str]], str]
"""Waits until something is found in what was printed."""
Ask = Callable[[Until], str]
"""Asks a server something, as soon as it is there; what it answered."""


@dataclass(frozen=True)
class Said:
    """What came of a command."""

    code: int
    out: str
    err: str = ""


def call(words: Sequence[str], typed: str = "") -> Said:
    """`areal-gym`, or `python -m` a module of ours, to its end."""
    out, err = io.StringIO(), io.StringIO()
    stdin, sys.stdin = sys.stdin, io.StringIO(typed)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = _main(words)
    finally:
        sys.stdin = stdin
    return Said(code, out.getvalue(), err.getvalue())


def _main(words: Sequence[str]) -> int:
    if words[0] == "areal-gym":
        set_registry(Registry(PluginManager.installed()))  # as a new process would
        return run(words[1:])
    assert list(words[:2]) == ["python", "-m"]
    argv, sys.argv = sys.argv, [*words[2:]]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'areal_gym.* found in sys.modules", RuntimeWarning)
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = argv
    return 0


def shell(command: str) -> Said:
    """Any other program, in a process of its own."""
    done = subprocess.run(
        ["bash", "-ec", command],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=_environment(),
    )
    return Said(done.returncode, done.stdout, done.stderr)


def _environment() -> dict[str, str]:
    """Where this Python's programs are found, and find what is found here."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


# ---- what serves --------------------------------------------------------------------------------


def serve(words: Sequence[str], ask: Ask) -> tuple[Said, str]:
    """Start what serves until Ctrl-C, ask it something, and press Ctrl-C.

    Args:
        words: the command.
        ask: returns what the server answered; waits, by what it is called with, for what is
            found in what the command has printed so far.

    Returns:
        what came of the command, and the answer.
    """
    out, lock, answers = io.StringIO(), threading.Lock(), []
    is_over = False

    def until(find: Callable[[str], str]) -> str:
        end_s = time.monotonic() + PATIENCE_S
        while not (found := find(out.getvalue())):
            assert not is_over, "it has ended"
            assert time.monotonic() < end_s, "it is not ready"
            time.sleep(0.01)
        return found

    def visit() -> None:
        try:
            answers.append(ask(until))
        except Exception as error:
            answers.append(error)
        with lock:
            if not is_over:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    visitor = threading.Thread(target=visit)
    visitor.start()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = _main(words)
        with lock:
            is_over = True
    visitor.join()
    assert isinstance(answers[0], str), (answers[0], err.getvalue())
    return Said(code, out.getvalue(), err.getvalue()), answers[0]


def serve_apart(words: Sequence[str], ask: Ask) -> tuple[Said, str]:
    """The same in a process of its own: what MCP's server is made of serves once in a process."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=_environment())
    assert process.stdout is not None
    with process, process.stdout as out:
        try:
            answer = ask(lambda find: find(out.readline()))
        finally:
            process.send_signal(signal.SIGINT)
        return Said(process.wait(PATIENCE_S), ""), answer


def get(url: str, key: str = "", body: object = None) -> str:
    """What a server answers with 200."""
    headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with opener.open(request, timeout=PATIENCE_S) as answer:
        assert answer.status == 200
        return answer.read().decode()


HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}
"""What a client of the Model Context Protocol says first."""


def _line(printed: str) -> str:
    return printed.partition("\n")[0] if "\n" in printed else ""


def _ask_gateway(until: Until) -> str:
    said = json.loads(until(_line))
    body = {"messages": [{"role": "user", "content": "1+1?"}], "max_tokens": 4}
    return get(f"{said['base_url']}/chat/completions", said["api_key"], body)


def _ask_online(until: Until) -> str:
    file = Path("runs/online/gateway.json")
    said = json.loads(until(lambda _: file.read_text() if file.exists() else ""))
    return get(f"{said['base_url']}/rl/sessions", said["control_key"])


def _ask_env(until: Until) -> str:
    said = json.loads(until(_line))
    return get(f"{said['url']}/v1/env", said["token"] or "")


def _ask_mcp(until: Until) -> str:
    return get(json.loads(until(_line))["url"], body=HELLO)


def _ask_page(until: Until) -> str:
    return get(until(_line))


def _ask_sglang(until: Until) -> str:
    return get(until(_line).split()[-1] + "/get_model_info")


SERVERS: Sequence[tuple[str, Callable[..., tuple[Said, str]], Ask, str]] = (
    (r"--env online", serve, _ask_online, "free"),
    (r"^areal-gym serve-env .*--mcp http", serve_apart, _ask_mcp, "serverInfo"),
    (r"^areal-gym serve-env (?!.*--mcp stdio)", serve, _ask_env, '"tir"'),
    (r"^areal-gym serve ", serve, _ask_gateway, '"choices"'),
    (r"^areal-gym view (?!.*--export)", serve, _ask_page, "<html"),
    (r"^python .*sglang\.fake", serve, _ask_sglang, "model_path"),
)
"""(which commands serve until Ctrl-C, how they are started, how asked, what the answer holds)"""


def talk_to_mcp(command: str) -> Said:
    """A server on pipes, which ends with its input."""
    said = shell(f"echo {shlex.quote(json.dumps(HELLO))} | {command}")
    assert "serverInfo" in said.out, said
    return said


def is_alike(line: str, said: str) -> bool:
    """Whether the docs show what was said: `...` is anything, and any number will do."""
    parts = re.split(r"(-?\d[\d.,]*|\.\.\.)", line)
    pattern = [
        ".*" if part == "..." else r"-?\d[\d.,]*" if number % 2 else re.escape(part)
        for number, part in enumerate(parts)
    ]
    return re.fullmatch("".join(pattern), said) is not None
