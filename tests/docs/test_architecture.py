"""docs/architecture.md and CONTRIBUTING.md describe the package as it is."""

import re

import pytest

from tests._support.paths import ROOT
from tests.test_layering import FLOORS

PAGE = ROOT / "docs" / "architecture.md"
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|\w+\.(?:py|md))`")
BASES = (ROOT, ROOT / "areal_gym", ROOT / "docs", ROOT / "tests")


def test_paths_of_the_architecture_exist():
    paths = set(PATH.findall(PAGE.read_text())) - {"NAME_command.py"}
    assert len(paths) > 50
    assert [
        path for path in sorted(paths) if not any((base / path).exists() for base in BASES)
    ] == []


@pytest.mark.parametrize("name", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_table_of_floors_is_that_of_the_layering_test(name):
    rows = re.findall(r"^\| (\d) \| (.+?) \| (.+?) \|$", (ROOT / name).read_text(), re.MULTILINE)
    table = {int(floor): (purpose, re.findall(r"`(\w+)`", parts)) for floor, parts, purpose in rows}
    expected = {
        floor: (purpose, [part or "areal_gym" for part in parts])
        for floor, (purpose, parts) in enumerate(FLOORS)
    }
    assert table == expected


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])
def test_links_to_the_repository_are_absolute_and_lead_somewhere(name):
    text = (ROOT / name).read_text()
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    ours = [
        re.match(r"https://[\w.]+/areal-gym/areal-gym/(?:blob/)?main/(.+)", link) for link in links
    ]
    assert len([link for link in links if link.startswith("http")]) == len(links)
    assert [link[1] for link in ours if link and not (ROOT / link[1]).exists()] == []
    assert any(ours)
