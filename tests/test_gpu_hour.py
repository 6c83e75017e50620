"""`benchmarks/gpu_hour.py` at toy size: every part runs on a CPU, none takes another one down."""

import json
import subprocess
import sys

import pytest

from benchmarks import gpu_hour
from tests._support.paths import ROOT


def gpu_hour_of(out, *arguments):
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_hour.py"), "--out", str(out)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=ROOT)
    return done


def parts_of(out):
    report = json.loads((out / "gpu_hour.json").read_text())
    return {part["part"]: part for part in report["parts"]}


@pytest.mark.slow
def test_parts_are_measured_beside_their_plan(tmp_path):
    done = gpu_hour_of(tmp_path, "--toy", "--parts", "parity-embedded,step-4k")
    assert done.returncode == 0, done.stderr
    parts = parts_of(tmp_path)
    rows = {row["figure"]: row for part in parts.values() for row in part["rows"]}
    assert rows["log-probability gap, largest"]["measured"] < 1e-4
    assert rows["tokens per second"]["measured"] > 0
    assert rows["tokens per second"]["plan"] > 0


@pytest.mark.long
def test_every_part_runs_at_toy_size(tmp_path):
    done = gpu_hour_of(tmp_path, "--toy")
    assert done.returncode == 0, done.stderr
    parts = parts_of(tmp_path)
    assert list(parts) == list(gpu_hour.LIMITS)
    bad = {name: part["reason"] for name, part in parts.items() if part["status"] == "failed"}
    assert bad == {}
    # What no machine of ours has may be skipped, with a reason.
    skipped = {name for name, part in parts.items() if part["status"] == "skipped"}
    assert skipped <= {"parity-vllm"}
    figures = {(name, row["figure"]): row for name in parts for row in parts[name]["rows"]}
    for name in ("parity-sglang", "parity-embedded"):
        assert figures[name, "log-probability gap, largest"]["measured"] < 1e-4
    for name in ("step-4k", "step-16k"):
        assert figures[name, "tokens per second"]["measured"] > 0
        assert figures[name, "tokens per second"]["plan"] > 0
    assert figures["publish-tensor", "publication by tensor"]["measured"] > 0
    assert figures["gsm8k-eta0", "staleness, mean of the last step"]["measured"] == 0
    for name, figure in figures:
        assert name in done.stdout
        assert figure in done.stdout


def test_part_that_fails_takes_none_down_and_is_tried_again(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    out = tmp_path / "out"
    done = gpu_hour_of(out, "--toy", "--parts", "parity-embedded", "--model", str(model))
    assert done.returncode == 0, done.stderr
    parts = parts_of(out)
    assert parts["model"]["status"] == "ok"
    assert parts["parity-embedded"]["status"] == "failed"
    assert parts["parity-embedded"]["reason"] in done.stdout
    assert gpu_hour.kept_result("model", out)
    assert gpu_hour.kept_result("parity-embedded", out) is None


def test_part_beyond_its_limit_is_ended(tmp_path):
    options = gpu_hour.parse(["--toy", "--out", str(tmp_path)])
    result = gpu_hour.run_part("model", options, 0.05)
    assert result["status"] == "failed"
    assert "not ready within" in result["reason"]


def test_hour_that_is_over_starts_nothing(tmp_path, capsys):
    gpu_hour.main(["--toy", "--out", str(tmp_path), "--minutes", "0"])
    assert {part["status"] for part in parts_of(tmp_path).values()} == {"skipped"}
    assert "the same command goes on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--toy", "--parts", "step-5k"], "no part 'step-5k'"),
        (["--toy", "--model", "/nowhere"], "no config.json"),
    ],
)
def test_bad_arguments_are_named(arguments, words, capsys):
    with pytest.raises(SystemExit):
        gpu_hour.parse(arguments)
    assert words in capsys.readouterr().err
