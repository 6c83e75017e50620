"""`docs/traps.md` names a test for each trap, or the issue that it belongs to."""

import re

from tests._support.paths import ROOT, TESTS

ROWS = re.findall(r"^\| (\d+) \| (.*) \| (.*) \|$", (ROOT / "docs/traps.md").read_text(), re.M)


def test_every_trap_names_an_existing_test():
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 36))
    missing = []
    for number, _, held_by in ROWS:
        tests = re.findall(r"`([^`]*)::([^`]*)`", held_by)
        assert tests or "issue" in held_by, number
        for file, name in tests:
            text = (TESTS / file).read_text() if (TESTS / file).is_file() else ""
            if not re.search(rf"^(def {name}\(|{name} = )", text, re.M):
                missing.append(f"{number}: {file}::{name}")
    assert missing == []
