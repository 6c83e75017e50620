"""Checks of a program's result by name: `NAME` or `NAME:ARGUMENT`."""

from __future__ import annotations

import glob
import math
import os
import re
import sys
from collections.abc import Callable, Iterator

from areal_gym.errors import DataError
from areal_gym.sandbox.base import SandboxLimits, SandboxResult, SandboxStatus
from areal_gym.sandbox.suite.watch import Watch, read_stat

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
    if name in _PROBLEMS:
        if problem := _PROBLEMS[name](argument, result):
            yield problem
    elif name in measured:
        value, quantity = measured[name]
        if value > float(argument):
            yield f"{quantity}: {value:.0f}, at most {argument}"
    elif name == "not_reachable":
        if watch.was_reached:
            yield f"answers on port {argument}"
    elif name not in _ALWAYS:
        raise DataError(f"a snippet has the unknown check {name!r}")


def implausible(result: SandboxResult, limits: SandboxLimits) -> Iterator[str]:
    """Yield what no program may cause: a failure of the sandbox, or impossible figures."""
    if result.status is SandboxStatus.UNAVAILABLE:
        yield f"the sandbox failed: {result.stderr}"
    for name in ("peak_memory_mb", "elapsed_s"):
        number = getattr(result, name)
        if not math.isfinite(number) or not 0 <= number <= _MOST_MEMORY_MB:
            yield f"{name} is {number!r}"
    for name in ("stdout", "stderr"):
        size = len(getattr(result, name))
        if size > limits.output_bytes + 100_000:
            yield f"{name} has {size} characters"
    value: object = result.value
    if value is not None and not isinstance(value, str):
        yield f"value is a {type(value).__name__}"


# ---- each returns what is wrong, or nothing -----------------------------------------------------


def _status(argument: str, result: SandboxResult) -> str | None:
    names = {_COARSER.get(result.status, str(result.status)), str(result.status)}
    if names & {*argument.split("|")}:
        return None
    return f"ended with {result.status}, expected {argument}"


def _in_output(argument: str, result: SandboxResult) -> str | None:
    output = result.stdout + result.stderr
    is_met = argument in output or "No module named" in output
    return None if is_met else f"{argument!r} is not in the output"


def _not_in_output(argument: str, result: SandboxResult) -> str | None:
    is_met = argument not in result.stdout + result.stderr + (result.value or "")
    return None if is_met else f"{argument!r} is in the output"


def _exit(argument: str, result: SandboxResult) -> str | None:
    has_module = "No module named" not in result.stdout + result.stderr
    is_met = (result.status == "ok") == (argument == "0") or not has_module
    return None if is_met else f"ended with {result.status}, expected exit code {argument}"


def _returns_quickly(_: str, result: SandboxResult) -> str | None:
    return "hangs" if result.status == "timeout" else None


def _value(argument: str, result: SandboxResult) -> str | None:
    is_met = str(result.value) == argument
    return None if is_met else f"its value is {result.value!r}, expected {argument!r}"


def _max_number_after(argument: str, result: SandboxResult) -> str | None:
    word, _, bound = argument.partition(":")
    return f"more than {bound} after {word}" if _last_number(word, result) > int(bound) else None


def _last_number(word: str, result: SandboxResult) -> int:
    numbers = re.findall(rf"{re.escape(word)}\s+(\d+)", result.stdout + result.stderr)
    return int(numbers[-1]) if numbers else 0


def _host_absent(argument: str, _: SandboxResult) -> str | None:
    return f"{argument} was made" if os.path.exists(argument) else None


def _no_pth(argument: str, _: SandboxResult) -> str | None:
    is_there = any(glob.glob(f"{path}/zz_{argument or 'mark'}*.pth") for path in sys.path)
    return "a .pth file was installed" if is_there else None


def _no_core(_: str, __: SandboxResult) -> str | None:
    paths = glob.glob("core*") + glob.glob("/tmp/core*")
    is_there = any(re.fullmatch(r"core(\.\d+)?", os.path.basename(path)) for path in paths)
    return "a core file was written" if is_there else None


def _no_zombies(_: str, __: SandboxResult) -> str | None:
    stats = [read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit()]
    is_there = any(stat[:2] == ["Z", str(os.getpid())] for stat in stats)
    return "a zombie is left" if is_there else None


_PROBLEMS: dict[str, Callable[[str, SandboxResult], str | None]] = {
    "status": _status,
    "in_output": _in_output,
    "not_in_output": _not_in_output,
    "exit": _exit,
    "returns_quickly": _returns_quickly,
    "value": _value,
    "max_number_after": _max_number_after,
    "host_absent": _host_absent,
    "no_pth": _no_pth,
    "no_core": _no_core,
    "no_zombies": _no_zombies,
}
