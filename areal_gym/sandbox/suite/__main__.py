"""`python -m areal_gym.sandbox.suite`: exit code 0 when every snippet is contained."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_gym.errors import DataError, GymError, UsageError
from areal_gym.plugins import registry
from areal_gym.sandbox.suite.attack import attack
from areal_gym.sandbox.suite.watch import descendants
from areal_gym.sandbox.worker import kernel

_OWN = Path(__file__).with_name("hostile.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite and print what came of it; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m areal_gym.sandbox.suite",
        description="Run hostile snippets in a sandbox and tell what got through.",
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: our own")
    parser.add_argument("--backend", default="process", help="id of a sandbox (%(default)s)")
    parser.add_argument("--image", help="for `docker`")
    parser.add_argument("--only", default="", metavar="NAME,...", help="these snippets alone")
    parser.add_argument("--without", default="", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--unsafe", action="store_true", help="needed for `none`: on a machine to throw away"
    )
    options = parser.parse_args(arguments)
    try:
        report = _run(options)
    except GymError as error:
        print(f"areal-gym: error: {error.message}", file=sys.stderr)
        for hint in error.hints:
            print(f"  {hint}", file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps(report))
    else:
        _print(report)
    return int(bool(report["failures"] or report["host"]))


def _run(options: argparse.Namespace) -> dict[str, Any]:
    if options.backend == "none" and not options.unsafe:
        raise UsageError(
            "without a sandbox, hostile snippets kill processes, fill memory and change files here",
            hints=["on a machine that you can throw away: --backend none --unsafe"],
        )
    snippets = [row for file in options.files or [_OWN] for row in _read(file)]
    if options.only:
        names = options.only.split(",")
        snippets = [row for row in snippets if row["name"] in names]
    if not snippets:
        raise DataError("no snippet is left to run")
    # Orphans of ours come back to us, so that they can be seen.
    kernel.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    settings: dict[str, Any] = {"num_workers": 2}
    if options.image:
        settings["image"] = options.image
    if options.without:
        settings.update(without=options.without.split(","), min_level="none")
    fds, temporary = len(os.listdir("/proc/self/fd")), _ours_in_tmp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # `--unsafe` was loud enough
        sandbox = registry().make("sandboxes", options.backend, **settings)
    report: dict[str, Any] = asyncio.run(_attack(sandbox, snippets))
    host = []
    if strays := descendants(os.getpid()):
        host.append(f"{len(strays)} processes are left")
    if (now := len(os.listdir("/proc/self/fd"))) > fds:
        host.append(f"{now - fds} descriptors are left")
    if left := _ours_in_tmp() - temporary:
        host.append(f"left in the temporary directory: {', '.join(sorted(left))}")
    return {**report, "host": host}


async def _attack(sandbox: Any, snippets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    async with sandbox:
        report = await sandbox.report()
        outcomes = await attack(sandbox, snippets)
    failures = {o.name: o.problems for o in outcomes if o.problems}
    return {
        **dataclasses.asdict(report),
        "contained": len(outcomes) - len(failures),
        "of": len(outcomes),
        "failures": failures,
        "statuses": {o.name: o.status for o in outcomes},
    }


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["snippets"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file} holds no snippets: {error}",
            hints=['{"snippets": [{"name", "code", "safe_expected", "checks": [...]}]}'],
        ) from None
    return rows


def _ours_in_tmp() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("areal-gym-*")}


def _print(report: dict[str, Any]) -> None:
    print(f"{report['backend']}, level {report['level']}: {', '.join(report['protections'])}")
    for name, problems in report["failures"].items():
        print(f"  {name}: {'; '.join(problems)}")
    for problem in report["host"]:
        print(f"  afterwards: {problem}")
    print(f"contained {report['contained']} of {report['of']}")


if __name__ == "__main__":
    sys.exit(main())
