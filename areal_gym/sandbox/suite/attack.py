"""Runs hostile snippets one after another and looks at what came of each."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from areal_gym.errors import DataError, SandboxError
from areal_gym.sandbox.base import SandboxLimits, SandboxResult, SandboxStatus
from areal_gym.sandbox.forking import ForkingSandbox
from areal_gym.sandbox.suite.bait import Bait
from areal_gym.sandbox.suite.watch import Watch, leftovers, resident_mb

__all__ = ["Outcome", "attack"]

HANG_S, WALL_S = 0.6, 10.0
"""Time for snippets that are meant to hang, and for all others."""
_SETTLE_S = 5.0
# The shared file knows four names of outcomes.
_COARSER = {"memory": "error", "output": "killed"}
_WATCHED = ("max_procs", "peak_tree_rss_mb", "disk_mb", "not_reachable")
# Looked at after every snippet, whether it asks for it or not.
_ALWAYS = {
    *("parent_alive", "no_survivors", "next_ok", "no_late_write", "cwd_cleaned", "canary_intact"),
    *("no_connect", "no_udp", "no_unix_connect", "no_abstract_connect", "no_harness_exception"),
}


@dataclass(slots=True)
class Outcome:
    """What came of one snippet; contained when there is no problem."""

    name: str
    status: str
    elapsed_s: float
    problems: list[str] = field(default_factory=list)


async def attack(sandbox: ForkingSandbox, snippets: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """Run `snippets`, rows of a file of the shared format, in fresh interpreters of `sandbox`.

    Raises:
        DataError: a snippet asks for a check that is not known.
        SandboxError: the sandbox does not start.
    """
    report = await sandbox.report()
    with ExitStack() as stack:
        bait = Bait(stack)
        attackers = _Attacker(sandbox, bait, can_fork="no fork" not in report.protections)
        return [await attackers.run(snippet, n) for n, snippet in enumerate(snippets)]


class _Attacker:
    def __init__(self, sandbox: ForkingSandbox, bait: Bait, *, can_fork: bool) -> None:
        self._sandbox = sandbox
        self._bait = bait
        self._can_fork = can_fork

    async def run(self, snippet: Mapping[str, Any], number: int) -> Outcome:
        mark = f"mark{os.getpid()}x{number}"
        code = self._bait.fill(snippet["code"], mark)
        checks = [self._bait.fill(check, mark) for check in snippet["checks"]]
        hangs = "timeout" in snippet["safe_expected"] + str(checks)
        limits = SandboxLimits(wall_s=HANG_S if hangs else WALL_S)
        watch = Watch(self._sandbox, self._bait.free_port)
        is_watched = any(check.startswith(_WATCHED) for check in checks)
        watching = asyncio.create_task(watch()) if is_watched else None
        held_mb = resident_mb(os.getpid())
        try:
            result = await self._sandbox.run(code, limits=limits)
        except SandboxError as error:
            result = SandboxResult(status=SandboxStatus.UNAVAILABLE, stderr=error.message)
        finally:
            if watching is not None:
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching
        grown_mb = resident_mb(os.getpid()) - held_mb
        problems = [
            problem
            for check in checks
            for problem in _failed(check, result, watch, grown_mb, limits)
            if not self._was_refused_to_fork(check, code, result)
        ]
        problems += self._bait.taken()
        problems += await leftovers(self._sandbox)
        problems += await self._next_one()
        return Outcome(snippet["name"], str(result.status), result.elapsed_s, problems)

    def _was_refused_to_fork(self, check: str, code: str, result: SandboxResult) -> bool:
        """Where nobody may fork, what a snippet says after it has forked is not to be seen."""
        is_refused = not self._can_fork and "PermissionError" in result.stderr
        return is_refused and "fork()" in code and check.startswith(("in_output", "exit"))

    async def _next_one(self) -> list[str]:
        try:
            result = await self._sandbox.run("print(6*7)")
        except SandboxError as error:
            return [f"the next snippet finds no sandbox: {error.message}"]
        return [] if result.stdout == "42\n" else [f"the next snippet does not work: {result}"]


def _failed(
    check: str, result: SandboxResult, watch: Watch, grown_mb: float, limits: SandboxLimits
) -> Iterator[str]:
    """Why a check is not met; nothing when it is."""
    name, _, argument = check.partition(":")
    status = _COARSER.get(result.status, str(result.status))
    output = result.stdout + result.stderr

    def at_most(value: float, what: str) -> Iterator[str]:
        if value > float(argument):
            yield f"{what}: {value:.0f}, at most {argument}"

    match name:
        case "status":
            if status not in argument.split("|"):
                yield f"ended with {result.status}, expected {argument}"
        case "in_output":
            has_module = "No module named" not in output
            if argument not in output and has_module:
                yield f"{argument!r} is not in the output"
        case "not_in_output":
            if argument in output:
                yield f"{argument!r} is in the output"
        case "exit":
            if (status == "ok") != (argument == "0") and "No module named" not in output:
                yield f"ended with {result.status}, expected exit code {argument}"
        case "output_cap":
            yield from at_most(len(output), "characters of output")
        case "returns_within":
            yield from at_most(result.elapsed_s - _SETTLE_S, "seconds")
        case "returns_quickly":
            if status == "timeout":
                yield "hangs"
        case "host_absent":
            if os.path.exists(argument):
                yield f"{argument} was made"
        case "no_pth":
            mark = argument or "mark"
            if any(glob.glob(f"{path}/zz_{mark}*.pth") for path in sys.path):
                yield "a .pth file was installed"
        case "no_core":
            named_so = glob.glob("core*") + glob.glob("/tmp/core*")
            if any(re.fullmatch(r"core(\.\d+)?", os.path.basename(path)) for path in named_so):
                yield "a core file was written"
        case "no_zombies":
            if any(_is_zombie_of_ours(entry) for entry in os.listdir("/proc")):
                yield "a zombie is left"
        case "max_number_after":
            word, _, bound = argument.partition(":")
            if word in output and int(output.split(word)[1].split()[0]) > int(bound):
                yield f"more than {bound} after {word}"
        case "harness_rss_growth_mb":
            yield from at_most(grown_mb, "MB that we have grown by")
        case "peak_rss_mb":
            yield from at_most(result.peak_memory_mb, "MB in one process")
        case "peak_tree_rss_mb":
            yield from at_most(watch.tree_mb, "MB in all processes")
        case "max_procs":
            yield from at_most(watch.num_processes, "processes")
        case "disk_mb":
            yield from at_most(watch.disk_mb, "MB on disk")
        case "not_reachable":
            if watch.was_reached:
                yield f"answers on port {argument}"
        case _ if name not in _ALWAYS:
            raise DataError(f"a snippet asks for the check {name!r}, which is not known")


def _is_zombie_of_ours(entry: str) -> bool:
    if not entry.isdigit():
        return False
    try:
        with open(f"/proc/{entry}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
    except OSError:
        return False
    return state == "Z" and int(parent) == os.getpid()
