"""The site builds without a warning, its search finds pages, and generated pages are up to date."""

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import yaml

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


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    # Not --quiet: warnings that are not shown are not counted by --strict, either. Pages that the
    # navigation lacks, and links and anchors that lead nowhere, are warnings.
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'areal-gym[docs]'")
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", directory],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    return directory


def test_api_reference_has_every_public_name(site):
    reference = (site / "api" / "index.html").read_text()
    names = {name for name in areal_gym.__all__ if name not in ("__version__", "registry")}
    assert [name for name in sorted(names) if f">{name}</" not in reference] == []


def test_each_page_is_in_one_of_four_parts():
    first, *parts = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert list(first.values()) == ["index.md"]
    titles = [title for part in parts for title in part]
    assert titles == ["Tutorials", "How-to guides", "Reference", "Explanation"]
    pages = [page for part in parts for listed in part.values() for page in listed]
    files = {file.name for file in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert sorted(pages) == sorted(files)


def test_gallery_has_every_example():
    folder = ROOT / "examples"
    examples = {path.name for path in folder.iterdir() if path.name != "__pycache__"}
    examples |= {
        path.name for kind in ("recipes", "notebooks") for path in (folder / kind).iterdir()
    }
    named = set(re.findall(r"[\w.-]+", (ROOT / "docs" / "examples.md").read_text()))
    assert sorted(examples - named) == []


@pytest.fixture(scope="module")
def address(site):
    """The address of the built site, on a server of this process."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_search_finds_the_right_page_first(address):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = os.environ.get("AREAL_GYM_CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium here: apt-get install chromium, or AREAL_GYM_CHROMIUM")
    expected = {
        "reward function": "rewards",
        "own data": "data",
        "out of memory": "trainer",
        "vllm": "vllm",
        "resume": "checkpoints",
    }
    first = {}
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        for query in expected:
            page.goto(f"{address}/?q={query}")
            link = page.locator("a.md-search-result__link").first
            first[query] = link.get_attribute("href", timeout=60_000).split("/")[3]
        browser.close()
    assert first == expected
