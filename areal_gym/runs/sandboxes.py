"""Says how far the policy's code is from this machine, before any of it runs."""

from __future__ import annotations

from collections.abc import Callable

from areal_gym.runs.components import Components
from areal_gym.sandbox.base import SandboxLevel, SandboxReport
from areal_gym.sandbox.shared_pool import reports_of

_MEANING = {
    SandboxLevel.ISOLATED: "",
    SandboxLevel.FILTERED: " (no root directory, processes or network of its own)",
    SandboxLevel.NONE: ": WHAT THE POLICY WRITES RUNS AS YOU, with your files and your network",
}


async def announce_sandboxes(
    components: Components, say: Callable[[str], None]
) -> list[SandboxReport]:
    """Start the environment's sandboxes, say their levels, and return their reports.

    Raises:
        SandboxError: one does not start, or protects less than it must.
    """
    env = components.make_env()
    try:
        reports = await reports_of(env.sandboxes)
    finally:
        await env.aclose()
    for report in reports:
        say(describe_sandbox(report))
    return reports


def describe_sandbox(report: SandboxReport) -> str:
    """Returns one line on a sandbox for people."""
    warning = "warning: " if report.level is SandboxLevel.NONE else ""
    return f"{warning}sandbox {report.backend}: level {report.level}{_MEANING[report.level]}"
