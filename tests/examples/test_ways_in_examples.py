"""The examples of the page that compares the ways to bring a task in keep their contract."""

import json
import sys

import pytest

import areal_gym
from areal_gym.cli.app import run
from tests._support.paths import ROOT

WAYS_IN = ROOT / "examples" / "ways_in"


def check(capsys, *arguments):
    """Run `areal-gym check` on an environment; return its rules by name."""
    assert run(["check", *arguments, "--tasks", "2", "--concurrent", "8", "--json"]) == 0
    checked = json.loads(capsys.readouterr().out)
    return {rule["rule"]: rule for rules in checked.values() for rule in rules}


def test_function(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"What is twice {n}?", "answer": str(2 * n)} for n in range(4)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rules = check(capsys, "--data", str(rows), "--reward", f"{WAYS_IN / 'function.py'}:exact")
    assert rules["gold"]["is_ok"]


def test_environment_class(capsys):
    rules = check(capsys, f"{WAYS_IN / 'env_class.py'}:Double")
    assert rules["gold"]["is_ok"]


def test_folder(capsys):
    rules = check(capsys, f"harbor:{WAYS_IN / 'folder'}")
    assert rules["oracle"]["is_ok"]


def test_mcp_server():
    pytest.importorskip("mcp")
    server = {"name": "double", "command": sys.executable, "args": [f"{WAYS_IN}/mcp_server.py"]}
    env = areal_gym.make("countdown", mcp_servers=[server])
    try:
        env.reset(seed=0)
        call = {"id": "1", "type": "function"}
        call["function"] = {"name": "double", "arguments": {"number": 21}}
        step = env.step({"role": "assistant", "content": "", "tool_calls": [call]})
        assert step.observation == "42"
    finally:
        env.close()
