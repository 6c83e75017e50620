"""`areal-gym doctor`."""

import importlib.metadata
import json
from collections import namedtuple

import pytest

from areal_gym.cli.app import run
from areal_gym.runs import machine_report as doctor

SUBJECTS = [
    *("python", "packages", "packages train", "engines", "C compiler", "gpu", "sandbox", "docker"),
    *("ray", "disk", "temporary files", "shared memory"),
]


def test_doctor_reports_ok_or_missing_for_each_check(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = run(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if not line.lstrip().startswith("->")]
    assert [line[:15].strip() for line in rows] == SUBJECTS
    assert {line[17:24].strip() for line in rows} <= {"ok", "missing", "MISSING"}
    assert code == int(any("MISSING" in line for line in rows))


def test_doctor_json(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert [finding["subject"] for finding in findings] == SUBJECTS
    sandbox = findings[SUBJECTS.index("sandbox")]
    assert sandbox["is_ok"] == (not sandbox["detail"].startswith("level none"))


def finding_of(subject):
    return next(finding for finding in doctor.examine() if finding.subject == subject)


def test_missing_package_is_named_with_install_command(monkeypatch):
    def requires(name):
        return ["numpy>=1", "no-such-package>=2", "torch>=2; extra == 'train'"]

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    found = finding_of("packages")
    assert (found.is_ok, found.is_required) == (False, True)
    assert found.detail == "not installed: no-such-package"
    assert found.advice == "pip install 'areal-gym'"


def test_missing_engine_is_named_with_install_command(monkeypatch, tmp_path):
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    found = finding_of("docker")
    assert not found.is_ok
    assert "no Docker engine answers" in found.detail
    assert found.advice


def test_full_disk_is_reported(monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(2**40, 2**40, 2**20))
    found = finding_of("disk")
    assert not found.is_ok
    assert found.detail.startswith("0.0 GB free")
    assert "--out" in found.advice
