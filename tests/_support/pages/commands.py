"""Runs commands: `areal-gym` in this process, which is quicker, and others in their own."""

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
import time
import urllib.request
import warnings
from pathlib import Path
from typing import NamedTuple

from areal_gym.cli.app import run
from areal_gym.plugins import PluginManager, Registry, set_registry

TIMEOUT_S = 60

MCP_HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}


class Outcome(NamedTuple):
    code: int
    out: str
    err: str = ""


def call(words, stdin=""):
    """Run `areal-gym ...` or `python -m areal_gym...` in this process."""
    out, err = io.StringIO(), io.StringIO()
    previous, sys.stdin = sys.stdin, io.StringIO(stdin)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = _main(words)
    finally:
        sys.stdin = previous
    return Outcome(code, out.getvalue(), err.getvalue())


def _main(words):
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


def environment():
    """Return an environment in which this interpreter's programs and modules are found."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def shell(command):
    done = subprocess.run(
        ["bash", "-ec", command],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env=environment(),
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def serve(words, ask):
    """Start a server, ask it something as soon as it is ready, and press Ctrl-C.

    Args:
        words: the command.
        ask: gets the server's standard output, line by line, and returns the server's answer.
    """
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment())
    with process, process.stdout as out:
        printed = _KeptLines(out)
        try:
            answer = ask(printed)
        finally:
            process.send_signal(signal.SIGINT)
        return Outcome(process.wait(TIMEOUT_S), "".join(printed.lines)), answer


class _KeptLines:
    """Lines of a stream, which stay after they were read: pages show them."""

    def __init__(self, stream):
        self._stream = stream
        self.lines = []

    def readline(self):
        self.lines.append(self._stream.readline())
        return self.lines[-1]


def get(url, key="", body=None):
    """Return a server's answer, which must have status 200."""
    headers = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with opener.open(request, timeout=TIMEOUT_S) as answer:
        assert answer.status == 200
        return answer.read().decode()


def _ask_gateway(out):
    facts = json.loads(out.readline())
    body = {"messages": [{"role": "user", "content": "1+1?"}], "max_tokens": 4}
    return get(f"{facts['base_url']}/chat/completions", facts["api_key"], body)


def _ask_online(out):
    file = Path("runs/online/gateway.json")
    deadline_s = time.monotonic() + TIMEOUT_S
    while not file.exists():
        assert time.monotonic() < deadline_s, "the gateway is not ready"
        time.sleep(0.01)
    facts = json.loads(file.read_text())
    return get(f"{facts['base_url']}/rl/sessions", facts["control_key"])


def _ask_env(out):
    facts = json.loads(out.readline())
    return get(f"{facts['url']}/v1/env", facts["token"] or "")


SERVERS = (
    (r"--env online", _ask_online, "free"),
    (
        r"^areal-gym serve-env .*--mcp http",
        lambda out: get(json.loads(out.readline())["url"], body=MCP_HELLO),
        "serverInfo",
    ),
    (r"^areal-gym serve-env (?!.*--mcp stdio)", _ask_env, '"tir"'),
    (r"^areal-gym serve ", _ask_gateway, '"choices"'),
    (r"^areal-gym view (?!.*--export)", lambda out: get(out.readline().strip()), "<html"),
    (
        r"^python .*sglang\.fake",
        lambda out: get(out.readline().split()[-1] + "/get_model_info"),
        "model_path",
    ),
)
"""(pattern of commands that serve until Ctrl-C, how to ask, text that the answer contains)"""


def talk_to_mcp(command):
    """Run a server on pipes, which ends with its input."""
    outcome = shell(f"echo {shlex.quote(json.dumps(MCP_HELLO))} | {command}")
    assert "serverInfo" in outcome.out, outcome
    return outcome


def is_alike(shown, printed):
    """Tell whether a line of the docs shows what was printed: `...` and numbers match any."""
    parts = re.split(r"(-?\d[\d.,]*|\.\.\.)", shown)
    pattern = [
        ".*" if part == "..." else r"-?\d[\d.,]*" if number % 2 else re.escape(part)
        for number, part in enumerate(parts)
    ]
    return re.fullmatch("".join(pattern), printed) is not None
