"""`areal-gym doctor`."""

from __future__ import annotations

import dataclasses
import sys

import click

from areal_gym.cli.output import common_options, print_columns, print_json, talk


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@common_options
def doctor_command(as_json: bool) -> int:
    """Check what works on this machine; for what is missing, say what to type.

    Exit code 1 if something required is missing.
    """
    from areal_gym.runs.machine_report import examine

    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            status = "ok" if finding.is_ok else "MISSING" if finding.is_required else "missing"
            rows = [(f"{finding.subject:<15}", f"{status:<7}", finding.detail)]
            if finding.advice:
                rows.append(("", "", f"-> {finding.advice}"))
            print_columns(rows)
            sys.stdout.flush()  # the next check may take a while
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    missing = [finding for finding in findings if not finding.is_ok]
    num_missing = sum(finding.is_required for finding in missing)
    if not as_json:
        optional = "; what is missing is optional" if missing else ""
        talk("see MISSING above" if num_missing else f"everything required is here{optional}")
    return int(num_missing > 0)
