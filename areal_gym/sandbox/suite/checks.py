"""Checks of a program's result by name: `NAME` or `NAME:ARGUMENT`."""

from __future__ import annotations

import glob
import math
import os
import re
import sys
from collections.abc import Iterator

from areal_gym.errors import DataError
from areal_gym.sandbox.base import SandboxLimits, SandboxResult, SandboxStatus
from areal_gym.sandbox.suite.watch import Watch

_SETTLE_S = 5.0
_MOST_MEMORY_MB = 64 * 1024
# The shared file has four names of outcomes.
_COARSER = {"memory": "error", "output": "killed"}
# Checked after every program, whether or not it lists them.
_ALWAYS = {
    *("parent_alive", "no_survivors", "next_ok", "no_late_write", "cwd_cleaned", "canary_intact"),
    *("no_connect", "no_udp", "no_unix_connect", "no_abstract_connect", "no_harness_exception"),
}


def failed(
    check: str, result: SandboxResult, watch: Watch, grown_mb: float, limits: SandboxLimits
) -> Iterator[str]:
    """Yield why a check failed; nothing if it passed.

    Raises:
        DataError: the check is unknown.
    """
    name, _, argument = check.partition(":")
    if name in _ALWAYS:
        return
    if name in _OF_RESULTS:
        yield from _OF_RESULTS[name](argument, result)
    elif name in _OF_HOSTS:
        yield from _OF_HOSTS[name](argument)
    else:
        measured = {
            "returns_within": (result.elapsed_s - _SETTLE_S, "seconds"),
            "harness_rss_growth_mb": (grown_mb, "MB of growth of the caller"),
            "peak_rss_mb": (result.peak_memory_mb, "MB in one process"),
            "peak_tree_rss_mb": (watch.tree_mb, "MB in all processes"),
            "max_procs": (watch.num_processes, "processes"),
            "disk_mb": (watch.disk_mb, "MB on disk"),
            "output_cap": (len(result.stdout + result.stderr), "characters of output"),
            "held_mb": (_last_number("HELD", result), "MB held, as reported by itself"),
        }
        if name == "not_reachable":
            if watch.was_reached:
                yield f"answers on port {argument}"
        elif name not in measured:
            raise DataError(f"a snippet has the unknown check {name!r}")
        else:
            value, quantity = measured[name]
            if value > float(argument):
                yield f"{quantity}: {value:.0f}, at most {argument}"


def implausible(result: SandboxResult, limits: SandboxLimits) -> Iterator[str]:
    """Yield what no program may cause: a failure of the sandbox, or impossible figures."""
    if result.status is SandboxStatus.UNAVAILABLE:
        yield f"the sandbox failed: {result.stderr}"
    numbers = {"peak_memory_mb": result.peak_memory_mb, "elapsed_s": result.elapsed_s}
    for name, number in numbers.items():
        if not math.isfinite(number) or not 0 <= number <= _MOST_MEMORY_MB:
            yield f"{name} is {number!r}"
    for name, text in (("stdout", result.stdout), ("stderr", result.stderr)):
        if len(text) > limits.output_bytes + 100_000:
            yield f"{name} has {len(text)} characters"
    value: object = result.value
    if value is not None and not isinstance(value, str):
        yield f"value is a {type(value).__name__}"


def _status(argument: str, result: SandboxResult) -> Iterator[str]:
    if not {_COARSER.get(result.status, str(result.status)), str(result.status)} & {
        *argument.split("|")
    }:
        yield f"ended with {result.status}, expected {argument}"


def _in_output(argument: str, result: SandboxResult) -> Iterator[str]:
    output = result.stdout + result.stderr
    if argument not in output and "No module named" not in output:
        yield f"{argument!r} is not in the output"


def _not_in_output(argument: str, result: SandboxResult) -> Iterator[str]:
    if argument in result.stdout + result.stderr + (result.value or ""):
        yield f"{argument!r} is in the output"


def _exit(argument: str, result: SandboxResult) -> Iterator[str]:
    has_module = "No module named" not in result.stdout + result.stderr
    if (result.status == "ok") != (argument == "0") and has_module:
        yield f"ended with {result.status}, expected exit code {argument}"


def _returns_quickly(_: str, result: SandboxResult) -> Iterator[str]:
    if result.status == "timeout":
        yield "hangs"


def _value(argument: str, result: SandboxResult) -> Iterator[str]:
    if str(result.value) != argument:
        yield f"its value is {result.value!r}, expected {argument!r}"


def _max_number_after(argument: str, result: SandboxResult) -> Iterator[str]:
    word, _, bound = argument.partition(":")
    if _last_number(word, result) > int(bound):
        yield f"more than {bound} after {word}"


def _last_number(word: str, result: SandboxResult) -> int:
    numbers = re.findall(rf"{re.escape(word)}\s+(\d+)", result.stdout + result.stderr)
    return int(numbers[-1]) if numbers else 0


def _host_absent(argument: str) -> Iterator[str]:
    if os.path.exists(argument):
        yield f"{argument} was made"


def _no_pth(argument: str) -> Iterator[str]:
    if any(glob.glob(f"{path}/zz_{argument or 'mark'}*.pth") for path in sys.path):
        yield "a .pth file was installed"


def _no_core(_: str) -> Iterator[str]:
    candidates = glob.glob("core*") + glob.glob("/tmp/core*")
    if any(re.fullmatch(r"core(\.\d+)?", os.path.basename(path)) for path in candidates):
        yield "a core file was written"


def _no_zombies(_: str) -> Iterator[str]:
    if any(_is_own_zombie(entry) for entry in os.listdir("/proc")):
        yield "a zombie is left"


def _is_own_zombie(entry: str) -> bool:
    if not entry.isdigit():
        return False
    try:
        with open(f"/proc/{entry}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
    except OSError:
        return False
    return state == "Z" and int(parent) == os.getpid()


_OF_RESULTS = {
    "status": _status,
    "in_output": _in_output,
    "not_in_output": _not_in_output,
    "exit": _exit,
    "returns_quickly": _returns_quickly,
    "value": _value,
    "max_number_after": _max_number_after,
}
_OF_HOSTS = {
    "host_absent": _host_absent,
    "no_pth": _no_pth,
    "no_core": _no_core,
    "no_zombies": _no_zombies,
}
