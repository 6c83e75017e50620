"""Runs the tests of an imported task as another user, and writes the reward as root.

`swe_import` copies this file into each task as `tests/grade.py`, with the standard library only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

APP, FILES, REPORT = "/app", "/tests/files", "/report"
OTHER_USER = 65534
PLANTED = ("sitecustomize.py", "usercustomize.py")
_REPORT_BYTES = 1 << 24
# The directory of the program comes first only after the interpreter has started.
_RUN = """
import sys
import pytest
sys.path.insert(0, {app!r})
sys.exit(pytest.main({arguments!r}))
"""


def restore(expected: dict[str, Any]) -> None:
    """Bring the tests and their settings back, and remove files that an interpreter obeys."""
    for root in expected["roots"]:
        _remove(os.path.join(APP, root))
    for folder, names, files in os.walk(APP):
        for name in (*names, *files):
            if name in (*expected["settings"], *PLANTED) or name.endswith(".pth"):
                _remove(os.path.join(folder, name))
    for folder, _, files in os.walk(FILES):
        for name in files:
            source = os.path.join(folder, name)
            target = os.path.join(APP, os.path.relpath(source, FILES))
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if os.path.realpath(os.path.dirname(target)) != os.path.dirname(target):
                raise SystemExit(f"a link leads away from {target}")
            _remove(target)
            shutil.copyfile(source, target)


def _remove(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def run_tests(tests: list[str]) -> int:
    """Run pytest as a user who cannot write the reward; return its exit code."""
    os.makedirs(REPORT, exist_ok=True)
    os.chmod(REPORT, 0o1777)
    for folder, names, files in os.walk(APP):
        for name in (*names, *files):
            os.chown(os.path.join(folder, name), OTHER_USER, OTHER_USER, follow_symlinks=False)
    os.chown(APP, OTHER_USER, OTHER_USER)
    arguments = ["-q", "-p", "no:cacheprovider", f"--junitxml={REPORT}/junit.xml", *tests]
    return subprocess.run(
        [sys.executable, "-I", "-c", _RUN.format(app=APP, arguments=arguments)],
        cwd=APP,
        env={"PATH": os.environ["PATH"], "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"},
        user=OTHER_USER,
        group=OTHER_USER,
        extra_groups=[],
        check=False,
    ).returncode


def num_passed() -> int:
    """Return how many tests passed, or 0 if one failed or the report cannot be read."""
    passed = 0
    try:
        fd = os.open(f"{REPORT}/junit.xml", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, encoding="utf-8", errors="replace") as file:
            root = ElementTree.fromstring(file.read(_REPORT_BYTES))
        for suite in root.iter("testsuite"):
            counts = {name: int(suite.get(name, "0")) for name in ("tests", "skipped")}
            if int(suite.get("failures", "0")) or int(suite.get("errors", "0")):
                return 0
            passed += counts["tests"] - counts["skipped"]
    except (OSError, ValueError, ElementTree.ParseError):
        return 0
    return passed


def main() -> None:
    """Grade the files in /app."""
    with open("/tests/expected.json") as file:
        expected = json.load(file)
    os.makedirs("/logs/verifier", exist_ok=True)
    os.chmod("/logs/verifier", 0o700)
    restore(expected)
    code = run_tests(expected["tests"])
    passed = num_passed()
    with open("/logs/verifier/reward.json", "w") as file:
        json.dump({"reward": int(code == 0 and passed > 0), "tests_passed": passed}, file)


if __name__ == "__main__":
    main()
