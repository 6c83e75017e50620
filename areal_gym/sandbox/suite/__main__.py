"""The command `python -m areal_gym.sandbox.suite`: exit code 0 if every program is contained."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from areal_gym.errors import DataError, GymError, UsageError
from areal_gym.plugins import PluginManager, Registry
from areal_gym.sandbox.base import SandboxLevel
from areal_gym.sandbox.suite.attack import attack
from areal_gym.sandbox.suite.programs import Program, builtin_files, read_programs
from areal_gym.sandbox.suite.watch import descendants
from areal_gym.sandbox.worker import kernel

_NUM_TOGETHER = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite, print the results, and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        report = _run(options)
    except GymError as error:
        print("\n  ".join([f"areal-gym: error: {error.message}", *error.hints]), file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps(report))
    else:
        _print(report)
    return int(bool(report["failures"] or report["host"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m areal_gym.sandbox.suite",
        description="Run hostile programs in a sandbox and report what was not contained.",
    )
    add = parser.add_argument
    files_help = "JSON or TOML; default: the built-in programs"
    add("files", nargs="*", type=Path, metavar="FILE", help=files_help)
    id_help = "id of a sandbox, built-in or from a plugin (default: %(default)s)"
    add("--sandbox", "--backend", dest="backend", default="process", metavar="ID", help=id_help)
    level_help = "for `process`: the level to test, with stronger protections left out"
    add("--level", choices=["isolated", "filtered"], help=level_help)
    add("--image", help="for `docker`: the image")
    add("--runtime", help="for `docker`: a container runtime, such as runsc")
    plugin_help = "import a plugin, which may provide a sandbox"
    add("-p", "--plugin", action="append", default=[], metavar="MODULE", help=plugin_help)
    set_help = "a setting of the sandbox; VALUE is JSON or text"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=set_help)
    add("--only", default="", metavar="NAME,...", help="programs or categories")
    leave_out_help = "programs that this sandbox does not promise to contain"
    add("--leave-out", default="", metavar="NAME,...", help=leave_out_help)
    add("--without", default="", help=argparse.SUPPRESS)
    fresh_help = "leave out programs that need a session"
    add("--fresh", action="store_true", help=fresh_help)
    add("--one-by-one", action="store_true", help="run one program at a time")
    add("--json", action="store_true", help="one JSON object")
    unsafe_help = "required for `none`: only on a disposable machine"
    add("--unsafe", action="store_true", help=unsafe_help)
    return parser


def _run(options: argparse.Namespace) -> dict[str, Any]:
    if options.backend == "none" and not options.unsafe:
        raise UsageError(
            "without a sandbox, hostile snippets kill processes, fill memory and change files here",
            hints=["on a disposable machine: --sandbox none --unsafe"],
        )
    programs = read_programs(options.files or builtin_files())
    if options.only:
        chosen = {*options.only.split(",")}
        programs = [p for p in programs if chosen & {p.name, p.category}]
    programs = [p for p in programs if p.name not in options.leave_out.split(",")]
    if options.fresh:
        programs = [p for p in programs if not p.is_session]
    if not programs:
        raise DataError("there are no snippets to run")
    kernel.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans become our children and are counted
    fds = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # `--unsafe` is explicit enough
        plugins = Registry(PluginManager.installed(modules=options.plugin))
        sandbox = plugins.make("sandboxes", options.backend, **_settings(options))
    num_together = 1 if options.one_by_one else _NUM_TOGETHER
    with _own_temporary_directory() as directory:
        report: dict[str, Any] = asyncio.run(_attack(sandbox, programs, num_together))
        left = sorted(os.listdir(directory))
    host = [f"left in the temporary directory: {', '.join(left)}"] if left else []
    if strays := descendants(os.getpid()):
        host.append(f"{len(strays)} processes are left")
    if (now := len(os.listdir("/proc/self/fd"))) > fds:
        host.append(f"{now - fds} descriptors are left")
    return {**report, "host": host}


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sandbox's settings from the command line."""
    is_builtin = options.backend in ("process", "docker", "none")
    settings: dict[str, Any] = {"num_workers": _NUM_TOGETHER} if is_builtin else {}
    for name in ("image", "runtime"):
        if value := getattr(options, name):
            settings[name] = value
    if options.level and options.backend == "process":
        settings["min_level"] = options.level
        if options.level == SandboxLevel.FILTERED:
            settings["without"] = ["namespaces"]
    elif options.level == SandboxLevel.FILTERED:
        raise UsageError(f"--level filtered is for the sandbox 'process', not {options.backend!r}")
    if options.without:
        settings.update(without=options.without.split(","), min_level="none")
    for setting in options.set:
        key, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting!r}: expected KEY=VALUE")
        try:
            settings[key] = json.loads(text)
        except ValueError:
            settings[key] = text
    return settings


async def _attack(sandbox: Any, programs: Sequence[Program], num_together: int) -> dict[str, Any]:
    async with sandbox:
        report = await sandbox.report()
        promised = [p for p in programs if not p.levels or report.level in p.levels]
        outcomes = await attack(sandbox, promised, num_together=num_together)
    failures = {o.name: o.problems for o in outcomes if o.problems}
    contained = Counter(o.category for o in outcomes if not o.problems)
    totals = Counter(o.category for o in outcomes)
    return {
        **dataclasses.asdict(report),
        "contained": len(outcomes) - len(failures),
        "of": len(outcomes),
        "not_promised": [p.name for p in programs if p not in promised],
        "categories": {name: {"contained": contained[name], "of": n} for name, n in totals.items()},
        "failures": failures,
        "statuses": {o.name: o.status for o in outcomes},
        "elapsed_s": {o.name: round(o.elapsed_s, 2) for o in outcomes},
    }


@contextlib.contextmanager
def _own_temporary_directory() -> Iterator[str]:
    """Give this process a private temporary directory, where other programs leave nothing."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="suite-") as directory:
        os.chmod(directory, 0o711)  # cells of other users pass through it
        tempfile.tempdir = directory
        try:
            yield directory
        finally:
            tempfile.tempdir = before


def _print(report: dict[str, Any]) -> None:
    print(f"{report['backend']}, level {report['level']}: {', '.join(report['protections'])}")
    print(f"\n{'category':14} {'contained':>9} {'of':>4}")
    for category, counts in sorted(report["categories"].items()):
        print(f"{category:14} {counts['contained']:9} {counts['of']:4}")
    for name, problems in report["failures"].items():
        print(f"\n{name}: {'; '.join(problems)}")
    for problem in report["host"]:
        print(f"\nafterwards: {problem}")
    if names := report["not_promised"]:
        print(f"\nnot promised at this level, and not run: {', '.join(names)}")
    print(f"\ncontained {report['contained']} of {report['of']}")


if __name__ == "__main__":
    sys.exit(main())
