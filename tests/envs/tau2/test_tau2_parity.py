"""Agreement with tau2-bench's own texts, hashes and verdicts."""

import gzip
import json
import shutil

import pytest

from areal_gym.cli.app import run
from areal_gym.envs.tau2.verdict_replay import replay
from areal_gym.errors import DataError, NothingToDoError
from tests._support.tau2_data import DATA, FIXTURES, needs_fixtures

pytestmark = needs_fixtures


def differences(agreements):
    return [example for agreement in agreements for example in agreement.examples]


@pytest.mark.parametrize("domain", ["retail", "airline"])
def test_domain_agrees_with_tau2_bench(domain):
    agreements = replay(FIXTURES, domains=(domain,), data_dir=DATA)
    assert differences(agreements) == []
    assert [agreement.name for agreement in agreements] == [domain, "actions"]
    assert agreements[0].counts["verdicts"] > 100
    assert agreements[0].counts["hashes"] > 500


def test_tenth_of_telecom_agrees_with_tau2_bench(tmp_path):
    for name in ("telecom.jsonl.gz", "probes-telecom.jsonl.gz"):
        lines = gzip.decompress((FIXTURES / name).read_bytes()).splitlines(keepends=True)
        (tmp_path / name).write_bytes(gzip.compress(b"".join(lines[::10])))
    shutil.copy(FIXTURES / "tool_schemas.json", tmp_path)
    (agreement,) = replay(tmp_path, domains=("telecom",), data_dir=DATA)
    assert differences([agreement]) == []
    assert agreement.counts["tasks"] > 100
    assert agreement.counts["probes"] > 30


@pytest.mark.slow
@pytest.mark.long
def test_all_of_telecom_agrees_with_tau2_bench():
    assert differences(replay(FIXTURES, domains=("telecom",), data_dir=DATA)) == []


def altered(tmp_path, change):
    """Replay the first airline fixture after `change` altered it."""
    with gzip.open(FIXTURES / "airline.jsonl.gz", "rt") as lines:
        row = json.loads(lines.readline())
    change(row)
    (tmp_path / "airline.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    (agreement,) = replay(tmp_path, domains=("airline",), data_dir=DATA)
    return agreement


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row["variants"]["gold"].update(reward=0.5),
        lambda row: row["variants"]["gold"].update(steps=3),
        lambda row: row["variants"]["gold"]["calls"][0].update(content="{}"),
        lambda row: row["variants"]["empty"]["predicted"].update(db_canonical="0"),
        lambda row: row["drop_each"][0].update(db_match=None),
    ],
)
def test_replay_reports_every_difference(tmp_path, change):
    agreement = altered(tmp_path, change)
    assert agreement.num_differences == 1
    assert not agreement.is_complete


def test_check_fixtures_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TAU2_DATA_DIR", str(DATA))
    altered(tmp_path, lambda row: None)
    assert run(["check", "tau2/airline", "--fixtures", str(tmp_path)]) == 0
    assert "all verdicts agree" in capsys.readouterr().out
    altered(tmp_path, lambda row: row["variants"]["gold"].update(reward=0.5))
    assert run(["check", "tau2", "--fixtures", str(tmp_path), "--json"]) == 1
    (agreement,) = json.loads(capsys.readouterr().out)
    assert (agreement["name"], agreement["num_differences"]) == ("airline", 1)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"id": 5}', "line 1: this fixture has no 'task_id'"),
        ("[1]", "line 1: a row is an object, not list"),
        ('{"task_id"', "line 1: not JSON"),
        (None, "cannot read"),
    ],
)
def test_broken_fixtures_are_named_with_their_line(
    tmp_path, capsys, monkeypatch, content, complaint
):
    monkeypatch.setenv("TAU2_DATA_DIR", str(DATA))
    file = tmp_path / "airline.jsonl.gz"
    file.write_bytes(b"no gzip" if content is None else gzip.compress(content.encode()))
    assert run(["check", "tau2", "--fixtures", str(tmp_path)]) == 2
    assert complaint in " ".join(capsys.readouterr().err.split())
    file.unlink()
    (tmp_path / "tool_schemas.json").write_text("[]")
    assert run(["check", "tau2", "--fixtures", str(tmp_path)]) == 2
    assert "tool_schemas.json: a fixture is a JSON object" in capsys.readouterr().err


def test_check_refuses_other_targets_and_empty_folders(tmp_path, capsys):
    assert run(["check", "tir", "--fixtures", str(tmp_path)]) == 2
    assert "tau2/airline" in capsys.readouterr().err
    with pytest.raises(NothingToDoError, match="no fixtures"):
        replay(tmp_path, data_dir=DATA)
    (tmp_path / "airline.jsonl.gz").write_bytes(gzip.compress(b"{broken\n"))
    with pytest.raises(DataError, match="line 1"):
        replay(tmp_path, domains=("airline",), data_dir=DATA)
