"""`areal-gym bench`: every part measures something; its figures are the documented ones."""

import importlib
import json
import re

import pytest

from areal_gym.cli.app import run
from areal_gym.cli.command_reference import JSON_KEYS
from areal_gym.cli.setup_commands import BENCHES
from areal_gym.runs import speed as benches
from tests._support.paths import ROOT

manager_module = importlib.import_module("areal_gym.plugins.manager")
PAGE = (ROOT / "docs" / "performance.md").read_text()


@pytest.fixture
def brief(monkeypatch):
    """The fewest rounds."""
    monkeypatch.setattr(benches, "_PART_S", 0.0)


def test_every_benchmark_gives_figures(brief, capsys):
    assert run(["bench", "--env", "countdown", "--json"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert list(dict.fromkeys(row["part"] for row in rows)) == [*benches.PARTS]
    assert all(row["value"] > 0 for row in rows)
    assert all(set(JSON_KEYS["bench"][1].split()) == set(row) for row in rows)
    assert {row["part"] for row in rows if row["speed"]} == set(benches.REFERENCES)
    assert "sandbox: a snippet in a fresh sandbox process" in err


def test_benchmark_prints_a_table(brief, capsys):
    assert run(["bench", "rollout"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["measured", "reference", "ratio"]
    assert re.search(r"CPU-ms +0\.25 +[\d.]+x, (slow|ok|fast)$", line)


def test_speedup_is_above_one_when_faster():
    figure = {"part": "", "what": "", "unit": ""}
    assert benches.Figure(**figure, value=2.0, reference=1.0).speed == 0.5
    assert benches.Figure(**figure, value=2.0, reference=1.0, is_more_better=True).speed == 2.0
    assert benches.Figure(**figure, value=2.0).speed is None


def test_help_names_every_benchmark():
    assert tuple(benches.PARTS) == BENCHES


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("rollout", r"five-turn tool episode, recorded, scripted policy, 64 .* \| ([\d.]+) / "),
        ("sandbox", r"a snippet in a fresh sandbox process, median \| ([\d.]+) ms"),
        ("engine", r"sampling, batch 64, 0.4M / 2M parameters \| ([\d,]+) / "),
        ("step", r"64 new tokens, 2M parameters, generation included \| ([\d.]+) CPU-s"),
    ],
)
def test_page_of_performance_names_every_benchmark(part, line):
    (found,) = re.findall(line, PAGE)
    assert float(found.replace(",", "")) == benches.REFERENCES[part]


def test_unknown_benchmark_is_refused(capsys):
    assert run(["bench", "enigne"]) == 2
    assert "did you mean 'engine'?" in capsys.readouterr().err
    assert run(["bench", "env", "--env", "coundown"]) == 2
    assert "did you mean 'countdown'?" in capsys.readouterr().err


def test_bench_without_torch_runs_other_benchmarks(brief, capsys, monkeypatch):
    is_there = manager_module._is_importable
    monkeypatch.setattr(manager_module, "_is_importable", lambda n: n != "torch" and is_there(n))
    assert run(["bench", "engine"]) == 2
    assert "'engine' needs torch\n  install it: pip install" in capsys.readouterr().err
    assert run(["bench", "--env", "countdown"]) == 0
    assert "not measured without torch: engine, step" in capsys.readouterr().err
