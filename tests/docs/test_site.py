"""The site builds without a warning, and the page of settings is the settings'."""

import json
import subprocess
import sys

import pytest

import areal_gym
from areal_gym.cli.command_reference import commands_page
from areal_gym.config.reference import settings_page
from tests._support.paths import ROOT


def test_settings_page_is_up_to_date():
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == settings_page(), "python -m areal_gym.config.reference > docs/settings.md"


def test_commands_page_is_up_to_date():
    page = (ROOT / "docs" / "cli.md").read_text()
    assert page == commands_page(), "python -m areal_gym.cli.command_reference > docs/cli.md"


def test_every_setting_has_a_description():
    rows = [row for row in settings_page().splitlines() if row.startswith("| `")]
    assert [row for row in rows if row.endswith("|  |")] == []


def test_learning_curve_picture_is_up_to_date():
    script = ROOT / "docs" / "asynchrony_picture.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == (ROOT / "docs" / "asynchrony.svg").read_text()


def test_site_builds_without_warnings(tmp_path):
    # Not --quiet: warnings that are not shown are not counted by --strict, either.
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'areal-gym[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "settings" / "index.html").exists()
    entries = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())["docs"]
    found = {entry["location"] for entry in entries if "reward function" in entry["text"].lower()}
    assert any(place.startswith("rewards/") for place in found), found
    reference = (tmp_path / "site" / "api" / "index.html").read_text()
    names = {name for name in areal_gym.__all__ if name not in ("__version__", "registry")}
    assert [name for name in sorted(names) if f">{name}</" not in reference] == []
